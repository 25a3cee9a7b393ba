"""A paged KV cache that evicts by any plan: how `kvpolicy.select_rows` fits a serving engine.

Serving engines keep keys and values in blocks of a pool; a table lists the blocks of each sequence,
for all layers and heads at once. So all layers and heads of a sequence hold the same tokens, and a
policy has to decide for all of them together, which `select_rows` does when it is given several
layers.

Two lengths that are equal in a full cache part here. The *logical* length counts the tokens that a
sequence has seen: the next token gets it as its position, whatever has been evicted. The *physical*
length counts the rows that it holds: the next row is written there, and attention reads so many.

Run it: ``python docs/examples/paged_cache.py``.
"""

from itertools import chain

import attrs
import torch
from torch import Tensor

from kvpolicy import CacheView, Plan, SequenceMemory, select_rows


@attrs.define(eq=False)
class PagedSequence:
    """One sequence of a paged cache.

    Attributes:
        blocks: Its blocks, in order.
        logical_len: Tokens it has seen.
        physical_len: Rows it holds.
        prompt_len: Tokens of its prompt.
        compacted_at: Logical length at its last compaction.
        queries: Its last queries after RoPE, ``[layers, H_q, W, D]``.
        memory: What policies remember of it.
    """

    prompt_len: int
    queries: Tensor
    blocks: list[int] = attrs.field(factory=list)
    logical_len: int = 0
    physical_len: int = 0
    compacted_at: int = 0
    memory: SequenceMemory = attrs.field(factory=SequenceMemory)


class PagedCache:
    """Keys and values of all sequences in blocks of a pool, with the numbers that policies need.

    Attributes:
        free: Blocks that belong to no sequence.
        most_used: The most blocks that sequences had at a time.
        pool: Tensors by name, ``[blocks, block_size, layers, H_kv, ...]``: a block belongs to a
            sequence in all layers and heads.
    """

    def __init__(
        self, plan: Plan, num_blocks: int, block_size: int, layers: int, heads: int, dim: int
    ) -> None:
        """Allocate the pool, for a plan whose layers are all alike."""
        resolved = plan.resolve(layers)
        self.budget, self.buffer = resolved.layers[0].budget, resolved.layers[0].buffer
        self.stack = resolved.stacks()[0]
        self.num_blocks, self.block_size, self.num_layers = num_blocks, block_size, layers
        rows = (num_blocks, block_size, layers, heads)
        self.pool = {name: torch.zeros(*rows, dim) for name in ("keys", "values")}
        self.pool["positions"] = torch.full(rows, -1)
        self.pool |= {name: torch.zeros(rows) for name in self.stack.tracks}
        self.free = list(range(num_blocks))
        self.most_used = 0

    def slots(self, sequence: PagedSequence, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Block and place within it of rows ``[first, last)`` of a sequence: the block table."""
        rows = torch.arange(first, last)
        return torch.tensor(sequence.blocks)[rows // self.block_size], rows % self.block_size

    def append(self, sequence: PagedSequence, keys: Tensor, values: Tensor) -> None:
        """Store new rows, ``[N, layers, H_kv, D]``, at the physical end of a sequence."""
        start, end = sequence.physical_len, sequence.physical_len + len(keys)
        while len(sequence.blocks) * self.block_size < end:
            sequence.blocks.append(self.free.pop())
        self.most_used = max(self.most_used, self.num_blocks - len(self.free))
        at = self.slots(sequence, start, end)
        positions = torch.arange(sequence.logical_len, sequence.logical_len + len(keys))
        self.pool["keys"][at], self.pool["values"][at] = keys, values
        self.pool["positions"][at] = positions[:, None, None].expand(keys.shape[:3])
        for name in self.stack.tracks:
            self.pool[name][at] = 0
        sequence.physical_len = end
        sequence.logical_len += len(keys)

    def read(self, sequence: PagedSequence, name: str) -> Tensor:
        """The rows of a sequence, ``[layers, H_kv, T, ...]``."""
        rows = self.pool[name][self.slots(sequence, 0, sequence.physical_len)]
        return rows.movedim(0, 2)

    def write(self, sequence: PagedSequence, name: str, rows: Tensor) -> None:
        """Store numbers of all rows of a sequence, ``[layers, H_kv, T]``."""
        self.pool[name][self.slots(sequence, 0, sequence.physical_len)] = rows.movedim(2, 0)

    def compact(self, sequence: PagedSequence) -> None:
        """Evict rows of a sequence whose buffer is full, and free the blocks behind the others."""
        if self.budget is None or sequence.physical_len < self.budget + self.buffer:
            return
        names = ("keys", "values", "positions", *self.stack.tracks)
        rows = {name: self.read(sequence, name) for name in names}
        lengths = {
            "seq_len": sequence.logical_len,
            "prompt_len": sequence.prompt_len,
            "num_new": sequence.logical_len - sequence.compacted_at,
        }
        selection = select_rows(
            self.stack,
            [
                CacheView(
                    **{name: rows[name][layer, None] for name in names[:3]},
                    **{name: torch.tensor([length]) for name, length in lengths.items()},
                    queries=sequence.queries[layer, None],
                    tracks={name: rows[name][layer, None] for name in self.stack.tracks},
                    layer_idx=layer,
                )
                for layer in range(self.num_layers)
            ],
            budget=self.budget,
            memory=[sequence.memory],
        )
        keep = selection.keep[0]  # the same rows in all layers and heads
        for name in self.stack.tracks:
            rows[name] = torch.cat([tracks[name] for tracks in selection.tracks])
        sequence.physical_len = len(keep)
        sequence.compacted_at = sequence.logical_len
        at = self.slots(sequence, 0, len(keep))
        for name in names:
            self.pool[name][at] = rows[name][:, :, keep].movedim(2, 0)
        used = -(-len(keep) // self.block_size)
        self.free += sequence.blocks[used:]
        del sequence.blocks[used:]

    def finish(self, sequence: PagedSequence) -> None:
        """Free all blocks of a sequence."""
        self.free += sequence.blocks
        sequence.blocks, sequence.physical_len = [], 0


class Decoder:
    """A decoder with random weights: attention with RoPE in a few layers, and nothing else."""

    def __init__(
        self, layers: int = 2, heads: int = 4, kv_heads: int = 2, dim: int = 8, vocab: int = 61
    ) -> None:
        """Draw the weights."""
        rng = torch.Generator().manual_seed(0)
        hidden = heads * dim
        self.layers, self.heads, self.kv_heads, self.dim = layers, heads, kv_heads, dim
        self.embedding = torch.randn(vocab, hidden, generator=rng)
        sizes = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim, "o": hidden}
        self.weights = [
            {name: torch.randn(hidden, size, generator=rng) / 3 for name, size in sizes.items()}
            for _ in range(layers)
        ]

    def rotate(self, states: Tensor, positions: Tensor) -> Tensor:
        """RoPE for ``[N, H, D]`` at positions ``[N]``."""
        frequencies = 100.0 ** (-torch.arange(0, self.dim, 2) / self.dim)
        angles = (positions[:, None] * frequencies)[:, None]
        even, odd = states[..., ::2], states[..., 1::2]
        turned = (
            even * angles.cos() - odd * angles.sin(),
            even * angles.sin() + odd * angles.cos(),
        )
        return torch.stack(turned, dim=-1).flatten(-2)

    def step(self, cache: PagedCache, sequence: PagedSequence, token: int) -> int:
        """Feed one token of a sequence, and return the most likely next one."""
        position = torch.tensor([sequence.logical_len])
        hidden = self.embedding[token]
        keys, values, queries = [], [], []
        new_row = sequence.physical_len
        size = (1, self.layers, self.kv_heads, self.dim)
        cache.append(sequence, torch.zeros(size), torch.zeros(size))
        at = cache.slots(sequence, new_row, new_row + 1)
        for layer, weights in enumerate(self.weights):
            normed = hidden / hidden.norm() * len(hidden) ** 0.5
            query, key, value = (normed @ weights[name] for name in "qkv")
            query = self.rotate(query.view(1, self.heads, self.dim), position)[0]
            key = self.rotate(key.view(1, self.kv_heads, self.dim), position)
            cache.pool["keys"][at[0], at[1], layer] = key
            cache.pool["values"][at[0], at[1], layer] = value.view(1, self.kv_heads, self.dim)
            keys, values = (
                cache.read(sequence, "keys")[layer],
                cache.read(sequence, "values")[layer],
            )
            grouped = query.view(self.kv_heads, -1, self.dim)
            attention = (grouped @ keys.mT * self.dim**-0.5).softmax(dim=-1)  # [H_kv, G, T]
            if "attn_sums" in cache.stack.tracks:
                sums = cache.read(sequence, "attn_sums")
                sums[layer] += attention.sum(dim=1)
                cache.write(sequence, "attn_sums", sums)
            queries.append(query)
            hidden = hidden + (attention @ values).flatten() @ weights["o"]
        window = torch.cat([sequence.queries, torch.stack(queries)[:, :, None]], dim=2)
        sequence.queries = window[:, :, -max(cache.stack.window_size, 1) :]
        return int((self.embedding @ hidden).argmax())


def generate(
    model: Decoder, cache: PagedCache, prompts: list[list[int]], num_tokens: int
) -> list[list[int]]:
    """Continue prompts together, token by token."""
    empty = torch.zeros(model.layers, model.heads, 0, model.dim)
    sequences = [PagedSequence(len(prompt), empty) for prompt in prompts]
    tokens = [list(prompt) for prompt in prompts]
    most = max(map(len, prompts)) + num_tokens - 1
    for step in range(most):
        for sequence, own, prompt in zip(sequences, tokens, prompts, strict=True):
            if step >= len(prompt) + num_tokens - 1:
                continue
            following = model.step(cache, sequence, own[step])
            if step + 1 >= len(prompt):
                own.append(following)
            cache.compact(sequence)
    for sequence in sequences:
        cache.finish(sequence)
    return [own[len(prompt) :] for own, prompt in zip(tokens, prompts, strict=True)]


def main() -> None:
    """Decode three sequences with and without a budget, and print what that takes."""
    model = Decoder()
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7], [2, 7, 1]]
    full: list[list[int]] = []
    print("policy     budget   blocks at most   tokens as with the full cache")
    for policy, budget in (
        ("full", None),
        ("h2o", 64),
        ("h2o", 16),
        ("streaming", 16),
        ("rkv", 16),
    ):
        plan = Plan.uniform(policy, budget=budget, buffer=4)
        cache = PagedCache(plan, 64, 4, model.layers, model.kv_heads, model.dim)
        tokens = generate(model, cache, prompts, 40)
        full = full or tokens
        pairs = zip(chain(*tokens), chain(*full), strict=True)
        same = sum(one == other for one, other in pairs)
        print(f"{policy:<11}{budget or '-':>6}{cache.most_used:>17}{same:>19} of 120")


if __name__ == "__main__":
    main()
