"""Slabs under random sequences of operations against a model made of lists."""

import attrs
import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from reference import SlabModel

from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.shape import LayerShape, Slab

NUM_SLOTS = 3
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 2
SLABS = (
    Slab(7, window_size=3, tracks=("mark",)),
    Slab(10),
    Slab(12, window_size=5),
    Slab(10),  # shares its tensors with the second
    Slab(10),
    Slab(12, tracks=("unmarked",)),
)
SHAPE = LayerShape(HEADS, KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
WINDOW = 4  # of the last layer, which accepts any number of tokens at once
SHAPES = (*[SHAPE] * 5, attrs.evolve(SHAPE, sliding_window=WINDOW))


class CacheMachine(RuleBasedStateMachine):
    """Random operations: store, keep, mark, clear, move, swap; the model does them with lists."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(SHAPES, SLABS, NUM_SLOTS)
        self.models = [SlabModel(NUM_SLOTS, KV_HEADS) for _ in SLABS]
        self.queries: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
        self.marks: dict[tuple[int, int, int], float] = {}  # slot, head, token -> mark
        self.num_tokens = 0

    def rows(self, layer_idx: int, slot: int) -> int:
        return len(self.models[layer_idx].rows[slot, 0])

    def free(self, slot: int) -> int:
        capacity = self.cache.capacity[:-1].tolist()
        return min(most - self.rows(i, slot) for i, most in enumerate(capacity))

    @rule(data=st.data(), first=st.integers(0, NUM_SLOTS - 1))
    def store(self, data: st.DataObject, first: int) -> None:
        """One forward: different numbers of new tokens in adjacent slots."""
        free_rows = []
        for slot in range(first, NUM_SLOTS):
            if self.free(slot) == 0:
                break
            free_rows.append(self.free(slot))
        if not free_rows:
            return
        free_rows = free_rows[: data.draw(st.integers(1, len(free_rows)), label="slots")]
        lengths = [data.draw(st.integers(1, most), label="tokens") for most in free_rows]
        step = EagerStep(self.cache, range(first, first + len(lengths)), lengths)
        tokens = self._number_tokens(lengths)
        for layer_idx, slab in enumerate(SLABS):
            content = torch.full((len(lengths), KV_HEADS, step.width, HEAD_DIM), torch.nan)
            for b, new in enumerate(tokens):
                for h in range(KV_HEADS):
                    content[b, h, step.width - len(new) :, 0] = torch.tensor(new).float()
                    content[b, h, step.width - len(new) :, 1] = h
            step.store(layer_idx, content, -content)
            if slab.window_size:
                queries = content[:, :1, :, :].repeat(1, HEADS, 1, 1)
                step.layers[layer_idx].remember(queries)
        step.commit()
        for b, new in enumerate(tokens):
            for token in new:
                self.queries[first + b].append(token)
                for model in self.models:
                    model.append(first + b, lambda head, token=token: (float(token), float(head)))
            for head in range(KV_HEADS):
                windowed = self.models[-1].rows[first + b, head]
                self.models[-1].rows[first + b, head] = windowed[-WINDOW:]

    def _number_tokens(self, lengths: list[int]) -> list[list[int]]:
        tokens = []
        for length in lengths:
            tokens.append(list(range(self.num_tokens, self.num_tokens + length)))
            self.num_tokens += length
        return tokens

    @rule(data=st.data(), layer_idx=st.integers(0, len(SLABS) - 1))
    def keep(self, data: st.DataObject, layer_idx: int) -> None:
        """Compact some slots with equal row counts; every head keeps different rows."""
        model = self.models[layer_idx]
        filled = [slot for slot in range(NUM_SLOTS) if self.rows(layer_idx, slot)]
        if not filled:
            return
        num_rows = self.rows(layer_idx, data.draw(st.sampled_from(filled)))
        equally_full = [slot for slot in filled if self.rows(layer_idx, slot) == num_rows]
        slots = sorted(data.draw(st.sets(st.sampled_from(equally_full), min_size=1)))
        num_kept = data.draw(st.integers(1, num_rows))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
        chosen = [
            [sorted(rng.permutation(num_rows)[:num_kept].tolist()) for _ in range(KV_HEADS)]
            for _ in slots
        ]
        LayerRows(self.cache, layer_idx, slots).keep(torch.tensor(chosen))
        for slot, per_head in zip(slots, chosen, strict=True):
            for head, rows in enumerate(per_head):
                model.keep(slot, head, rows)

    @rule(data=st.data())
    def keep_in_several_layers(self, data: st.DataObject) -> None:
        """Compact slots of layers that share their tensors together."""
        arenas = [layer.arena for layer in self.cache.layers]
        members = [i for i, arena in enumerate(arenas) if arena is arenas[1]]
        places = [(i, slot) for i in members for slot in range(NUM_SLOTS) if self.rows(i, slot)]
        if not places:
            return
        num_rows = self.rows(*data.draw(st.sampled_from(places)))
        equally_full = [place for place in places if self.rows(*place) == num_rows]
        chosen = sorted(data.draw(st.sets(st.sampled_from(equally_full), min_size=1)))
        num_kept = data.draw(st.integers(1, num_rows))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
        keep = [
            [sorted(rng.permutation(num_rows)[:num_kept].tolist()) for _ in range(KV_HEADS)]
            for _ in chosen
        ]
        layers, slots = zip(*chosen, strict=True)
        rows = LayerRows(self.cache, layers, slots)
        for b, (layer_idx, slot) in enumerate(chosen):
            assert rows.layers[b] == layer_idx
            for head in range(KV_HEADS):
                held = self.models[layer_idx].positions(slot, head)
                assert rows.positions[b, head].tolist() == held
        rows.keep(torch.tensor(keep))
        for (layer_idx, slot), per_head in zip(chosen, keep, strict=True):
            for head, kept in enumerate(per_head):
                self.models[layer_idx].keep(slot, head, kept)

    @rule(layer_idx=st.integers(0, len(SLABS) - 1), more=st.integers(1, 3))
    def grow(self, layer_idx: int, more: int) -> None:
        """Grow one layer, which leaves its arena, or joins another."""
        if self.cache.capacity[layer_idx] < 16:
            slabs = [layer.slab for layer in self.cache.layers]
            larger = slabs[layer_idx].capacity + more
            slabs[layer_idx] = attrs.evolve(slabs[layer_idx], capacity=larger)
            self.cache.grow(slabs)

    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        """Write random track values to the rows of one slot."""
        filled = [slot for slot in range(NUM_SLOTS) if self.rows(0, slot)]
        if not filled:
            return
        slot = data.draw(st.sampled_from(filled))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
        marks = rng.integers(1, 100, size=(1, KV_HEADS, self.rows(0, slot)))
        LayerRows(self.cache, 0, [slot]).tracks["mark"] = torch.from_numpy(marks).float()
        for head in range(KV_HEADS):
            for row, (token, _) in enumerate(self.models[0].contents(slot, head)):
                self.marks[slot, head, int(token)] = float(marks[0, head, row])

    @rule(slot=st.integers(0, NUM_SLOTS - 1))
    def clear(self, slot: int) -> None:
        self.cache.clear(slot)
        self._forget(slot)

    def _forget(self, slot: int) -> None:
        self.queries[slot] = []
        self.marks = {key: mark for key, mark in self.marks.items() if key[0] != slot}
        for model in self.models:
            model.clear(slot)

    @precondition(lambda self: any(self.queries))
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """Move a sequence to another slot, which discards the contents of that slot."""
        source, target = data.draw(st.permutations(range(NUM_SLOTS)))[:2]
        self.cache.move(source, target)
        self._forget(target)
        self.queries[target] = self.queries[source]
        for (slot, head, token), mark in list(self.marks.items()):
            if slot == source:
                self.marks[target, head, token] = mark
        for model in self.models:
            model.seen[target] = model.seen[source]
            for head in range(KV_HEADS):
                model.rows[target, head] = model.rows[source, head]
        self._forget(source)

    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        """Exchange two sequences, of which each may be empty."""
        pair = data.draw(st.permutations(range(NUM_SLOTS)))[:2]
        self.cache.swap(*pair)
        other = dict(zip(pair, reversed(pair), strict=True))
        exchanged = [self.queries[other.get(slot, slot)] for slot in range(NUM_SLOTS)]
        self.queries[:] = exchanged
        self.marks = {
            (other.get(slot, slot), head, token): mark
            for (slot, head, token), mark in self.marks.items()
        }
        for model in self.models:
            model.seen[pair[0]], model.seen[pair[1]] = model.seen[pair[1]], model.seen[pair[0]]
            model.rows = {
                (slot, head): model.rows[other.get(slot, slot), head] for slot, head in model.rows
            }

    @invariant()
    def contents_equal_the_lists(self) -> None:
        for layer_idx, model in enumerate(self.models):
            layer = self.cache.layers[layer_idx]
            for (slot, head), rows in model.rows.items():
                num = len(rows)
                assert self.cache.rows[layer_idx, slot] == num
                content = torch.tensor(model.contents(slot, head)).view(num, HEAD_DIM)
                assert torch.equal(layer.keys[slot, head, :num], content)
                assert torch.equal(layer.values[slot, head, :num], -content)
                positions = layer.positions[slot, head].tolist()
                assert positions[:num] == model.positions(slot, head)
                assert set(positions[num:]) <= {-1}

    @invariant()
    def marks_move_with_their_rows_and_start_at_zero(self) -> None:
        track = self.cache.layers[0].tracks["mark"]
        for (slot, head), rows in self.models[0].rows.items():
            held = [self.marks.get((slot, head, int(token)), 0.0) for _, (token, _) in rows]
            empty = [0.0] * (track.shape[2] - len(held))
            assert track[slot, head].tolist() == held + empty

    @invariant()
    def windows_hold_the_last_queries_oldest_first(self) -> None:
        for layer_idx, slab in enumerate(SLABS):
            for slot in range(NUM_SLOTS):
                if slab.window_size and self.rows(layer_idx, slot):
                    window = LayerRows(self.cache, layer_idx, [slot]).queries
                    newest = self.queries[slot][-slab.window_size :]
                    assert window[0, :, :, 0].tolist() == [newest] * HEADS

    @invariant()
    def layers_of_equal_shape_share_their_tensors(self) -> None:
        kinds = {(layer.shape, layer.slab) for layer in self.cache.layers}
        assert len(self.cache.arenas) == len(kinds) == len({id(x.arena) for x in self.cache.layers})
        for layer in self.cache.layers:
            assert layer.keys.data_ptr() == layer.arena.keys[layer.first].data_ptr()
            assert layer.slab.capacity == layer.keys.shape[2]

    @invariant()
    def lengths_count_all_tokens_seen(self) -> None:
        assert self.cache.seq_len.tolist() == [len(queries) for queries in self.queries]


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=4 * settings.default.max_examples, stateful_step_count=20
)


def test_num_bytes_counts_every_tensor_of_every_layer() -> None:
    cache = KVCache([SHAPE] * len(SLABS), SLABS, NUM_SLOTS)
    row = KV_HEADS * (2 * HEAD_DIM * 4 + 8)  # keys and values in fp32, one int64 position
    expected = sum(NUM_SLOTS * slab.capacity * row for slab in SLABS)
    expected += NUM_SLOTS * (SLABS[0].capacity + SLABS[-1].capacity) * KV_HEADS * 4  # tracks
    expected += NUM_SLOTS * (3 + 5) * HEADS * HEAD_DIM * 4  # the query windows
    assert cache.num_bytes == expected
    assert cache.num_bytes == sum(layer.num_bytes for layer in cache.layers)
