"""`PolicyCache`: a cache for ``model.generate(past_key_values=...)``, kept within a plan.

`generate` calls the model, not the engine. While a `PolicyCache` exists, the ``forward`` of its
model looks at the cache it is given: a call with a `PolicyCache` is served by that cache, every
other call by the model as before. To serve a call, the cache finds the new tokens of each row and
runs steps over the same core as the engine's loop.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import wraps
from types import MethodType
from typing import Any, NoReturn

import attrs
import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvpolicy.cache.contents import LayerContents
from kvpolicy.compat import cache_argument, cache_in
from kvpolicy.engine.bound_plan import DEFAULT_MAX_TOKENS, BoundPlan
from kvpolicy.engine.compose import core_of, images_of, slabs_of, snapshots_of
from kvpolicy.engine.core import Core
from kvpolicy.engine.extensions.base import Extension, Found
from kvpolicy.engine.requests.encoding import encode
from kvpolicy.engine.requests.request import Request
from kvpolicy.engine.requests.savings import nothing_evicted, saved_share
from kvpolicy.engine.requests.sequence import Sequence as EngineSequence
from kvpolicy.engine.scheduler import Chunks, decode_step
from kvpolicy.engine.slots import Slots
from kvpolicy.engine.snapshots.snapshot import SequenceSnapshot
from kvpolicy.engine.step import Drawn, Step
from kvpolicy.errors import CacheError, ModelError, RequestError, SnapshotError
from kvpolicy.hf.inputs import Columns, check_tensor
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.embedded import EmbeddedPrompt, image_arguments
from kvpolicy.model.wrappers import row_arguments
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.resolved import ResolvedPlan

# Slabs grow by so many rows at a time.
GROWTH = 256

# Arguments of a forward that a cache serves; others must be empty.
_KNOWN = {
    "attention_mask",
    "cache",  # of newer releases of transformers
    "cache_position",  # of older releases of transformers
    "input_ids",
    "logits_to_keep",
    "past_key_values",  # of older releases
    "position_ids",
    "return_dict",
    "tokenizer",  # for stop strings: generate passes it on to the model
    "use_cache",
}

# Arguments of a forward that may have a value for each column that the cache has seen, too.
_OF_COLUMNS = {"attention_mask", "mm_token_type_ids", "token_type_ids"}

_INCOMPLETE = "is incomplete: a forward did not end; call reset() and start again"


@attrs.frozen
class CacheReport:
    """What a cache holds and has cost since it was made or reset; valid at any moment.

    Attributes:
        tokens: Tokens each row of the batch has seen, without pads.
        rows: The most rows any layer holds for each of them now.
        peak_rows: The most rows any layer ever held for one of them.
        peak_kv_bytes: Bytes of the cache at its largest, as in `RunReport`.
        compactions: Compactions of one sequence in one layer.
        rows_evicted: Rows evicted, summed over layers and sequences, counted per KV head.
        held_bytes: Bytes of keys, values and states that each sequence held at most, summed.
        full_bytes: What a full cache holds for the same tokens.
        note: A sentence if no row was evicted although the plan has a budget; else ``None``.
        policy_s: Seconds of policy work.
    """

    tokens: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    peak_rows: int = 0
    peak_kv_bytes: int = 0
    compactions: int = 0
    rows_evicted: int = 0
    held_bytes: int = 0
    full_bytes: int = 0
    note: str | None = None
    policy_s: float = 0.0

    @property
    def saved_share(self) -> float:
        """Share of a full cache's bytes that the sequences did not need."""
        return saved_share(self.held_bytes, self.full_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return attrs.asdict(self) | {"saved_share": self.saved_share}


def _refuse(reason: str) -> NoReturn:
    msg = f"a PolicyCache {reason}"
    raise CacheError(msg)


class PolicyCache(Cache):
    """Keys and values of one batch, kept within a plan, for a model's own `generate`.

    Greedy tokens equal those of `Engine.generate` with the same plan and a ``prefill_buffer``
    equal to its ``buffer``: prompts enter in chunks of the buffer. Rows may be padded on the
    left; pads are never stored. The same cache continues the same conversation: give it the
    whole text again, or the new tokens with the whole attention mask. `reset` makes it ready
    for another. A row that has ended still receives the pads that `generate` gives it, as
    tokens; they are stored in its own slot and do not affect other rows.

    `copy.deepcopy` gives a cache that continues on its own, and beam search reorders rows: what
    policies remember of a row goes with it. `schedule` is not called: all rows are admitted at
    once, in order. Assisted decoding and gradients raise a `CacheError`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Plan | ResolvedPlan | None = None,
        tokenizer: Any = None,
        *,
        max_length: int | None = None,
        chunk: int | None = None,
        max_tokens_per_forward: int = DEFAULT_MAX_TOKENS,
        extensions: Iterable[Callable[[], Extension]] = (),
    ) -> None:
        """Bind a plan to a model; slabs are allocated by the first forward.

        Args:
            model: A decoder-only transformers model.
            plan: The plan.
            tokenizer: Its tokenizer, for policies that read text.
            max_length: Tokens for which to allocate slabs at once. Without it, and beyond it,
                slabs grow as needed, `GROWTH` rows at a time, up to budget and buffer.
            chunk: The most prompt tokens of one row in one forward; as in `Engine`.
            max_tokens_per_forward: The most prompt tokens of all rows in one forward; as in
                `Engine`.
            extensions: Make extensions, as in `Engine`.

        Raises:
            ModelError: If the engine cannot run the model.
            PlanError: If the plan does not fit the model.
            CacheError: If the plan stores pads, or has a ``prefill_buffer``.
        """
        super().__init__(layers=_NoLayers())
        is_number = isinstance(max_length, int) and not isinstance(max_length, bool)
        if max_length is not None and (not is_number or max_length < 1):
            _refuse(f"was given max_length={max_length!r}; expected a number of tokens")
        # The hooks of the model run around each call of it: once, and not again in the engine.
        adapter = ModelAdapter(model, run_own_hooks=False)
        self._bound = BoundPlan(
            adapter,
            tokenizer,
            plan,
            chunk=chunk,
            max_tokens_per_forward=max_tokens_per_forward,
            eager=True,  # as are its steps
            extensions=extensions,
        )
        if self._bound.plan.padding != "none":
            _refuse('stores no pads; run plans with padding = "stored" in an Engine')
        if any(one.stages and not one.prefill_by_default for one in self._bound.plan.layers):
            _refuse("has no rows beside its slabs; run plans with a prefill_buffer in an Engine")
        self._max_length = max_length
        self.reset()
        _attach(self, adapter.model)

    def reset(self) -> None:
        """Forget everything, and be ready for another prompt."""
        self._is_whole = True
        self._columns = Columns()
        self._longest = self._max_length or 0
        self.core: Core | None = None
        self._slots: Slots

    @property
    def report(self) -> CacheReport:
        """What the cache holds and has cost so far."""
        core, sequences = self.core, self.sequences
        if core is None:
            return CacheReport()
        for seq in sequences:
            core.evictor.note_peak(seq)
        rows = {seq.id: int(core.cache.rows[:, seq.slot].max()) for seq in sequences}
        peak_rows = max(seq.peak_rows for seq in sequences)
        rows_evicted = sum(seq.rows_evicted for seq in sequences)
        return CacheReport(
            tokens=tuple(self._columns.num_tokens.tolist()),
            rows=tuple(rows[row] for row in range(len(rows))),
            peak_rows=peak_rows,
            peak_kv_bytes=core.cache.peak_bytes,
            compactions=core.evictor.num_compactions,
            rows_evicted=rows_evicted,
            held_bytes=sum(seq.peak_bytes for seq in sequences),
            full_bytes=sum(seq.full_bytes for seq in sequences),
            note=nothing_evicted(self._bound.plan, rows_evicted, peak_rows),
            policy_s=core.timings.policy_s,
        )

    @property
    def sequences(self) -> list[EngineSequence]:
        """The sequence of each row, in the order of their slots."""
        return [] if self.core is None else self._slots.active

    def extension(self, kind: type[Found]) -> Found | None:
        """The extension of a class; ``None`` before the first forward, or if there is none."""
        return None if self.core is None else self.core.extensions.find(kind)

    def check_prompt(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> None:
        """Check that a prompt continues the tokens that the cache has seen.

        `generate` passes only the columns after those, so a longer prompt that begins with other
        tokens would otherwise be taken for a second turn.

        Args:
            input_ids: The whole prompt, ``[B, columns]``.
            attention_mask: 0 for pads, of the same shape; ``None`` if there are none.

        Raises:
            CacheError: If it does not begin with the tokens that the cache has seen.
        """
        check_tensor("input_ids", input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if mask.shape != input_ids.shape:
            _refuse("is checked against a whole prompt and its mask; give both, of one shape")
        for seq in self.sequences:
            seen = [*seq.prompt, *seq.tokens]
            given = input_ids[seq.id][mask[seq.id] != 0].tolist()
            if len(given) <= len(seen) or given[: len(seen)] != seen:
                _refuse(
                    f"that has seen {len(seen)} tokens in row {seq.id} was given a prompt that "
                    "does not begin with them and go on; call reset() first"
                )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, pads included: `generate` passes the columns after these."""
        return self._columns.count

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def serve(self, model: PreTrainedModel, given: Mapping[str, Any]) -> CausalLMOutputWithPast:
        """Serve one forward of the model.

        Args:
            model: The model that was called.
            given: Arguments of the call, by name.

        Returns:
            Logits after the newest token of each row, ``[B, 1, V]``.

        Raises:
            CacheError: If a cache cannot serve such a forward.
            HookError: If a policy fails.
        """
        if model is not self._bound.adapter.model:
            _refuse("was made for another model; make one for each")
        if not self._is_whole:
            _refuse(_INCOMPLETE)
        images = self._images_in(given)
        _check_arguments(model, {one: given[one] for one in given if one not in images})
        token_ids, mask = given["input_ids"], given.get("attention_mask")
        new = self._columns.read(token_ids, mask, given.get("position_ids"))
        vocab_size = model.config.get_text_config().vocab_size
        for row, tokens in enumerate(new):
            try:
                encode(tokens, None, vocab_size)
            except RequestError as error:
                _refuse(f"cannot serve row {row}: {error}")
        # Slabs and the notes of policies outlive the caller's inference mode.
        with torch.inference_mode(False), torch.no_grad():
            embedded = self._embedded(given, images, new)
            if not embedded:
                self._check_planes(given.get("position_ids"), len(new))
            core = self._core_for(new)
            for seq in self.sequences if embedded else ():
                images_of(core).hold(seq, embedded[seq.id])
            logits = self._logits(core, new)
        self._columns.add(new, token_ids.shape[1], mask)
        self._is_whole = True
        stacked = torch.stack([logits[row] for row in range(len(new))])[:, None]
        return CausalLMOutputWithPast(logits=stacked, **cache_argument(self))

    def _images_in(self, given: Mapping[str, Any]) -> list[str]:
        """Names of what a forward is given for images."""
        if self._bound.adapter.embedder is None:
            return []
        return [
            name
            for name, value in given.items()
            if name in image_arguments(self._bound.adapter.model) and not _says_nothing(value)
        ]

    def _embedded(
        self, given: Mapping[str, Any], images: Sequence[str], new: list[list[int]]
    ) -> list[EmbeddedPrompt]:
        """What new tokens of each row have for the decoder; empty: they have no image.

        What is given for images beside a prompt that has begun before may be of its beginning.
        """
        adapter, is_first = self._bound.adapter, not self._columns.count
        ids = adapter.image_ids
        has_any = not ids or any(not ids.isdisjoint(tokens) for tokens in new)
        if adapter.embedder is None or not images or not (is_first or has_any):
            return []
        token_ids, mask = given["input_ids"], given.get("attention_mask")
        arguments = {name: given[name] for name in images} | {"input_ids": token_ids}
        if mask is not None:
            arguments["attention_mask"] = mask
        for name in _OF_COLUMNS & arguments.keys():
            arguments[name] = arguments[name][:, -token_ids.shape[1] :]
        if is_first and given.get("position_ids") is not None:
            arguments["position_ids"] = given["position_ids"]
        return adapter.embedder(arguments, self._columns.new_is_real)

    def _check_planes(self, positions: Tensor | None, num_rows: int) -> None:
        """Check that positions in planes, ``[3, B, L]``, are those that tokens get here."""
        if positions is None or positions.dim() != 3:
            return
        is_real = self._columns.new_is_real
        expected = np.broadcast_to(self._columns.num_tokens, num_rows)[:, None]
        expected = expected + is_real.cumsum(axis=1) - 1
        for seq in self.sequences:
            assert self.core is not None
            expected[seq.id] += self.core.cache.rope_offset[seq.slot]
        given = positions[-3:].cpu().numpy()
        fits = given.shape[1:] == is_real.shape and (given == expected)[:, is_real].all()
        if not fits:
            _refuse("was given positions in planes that are not those behind the images before")

    def _core_for(self, new: list[list[int]]) -> Core:
        """A core whose slabs can take the new tokens, and one more."""
        needed = int(max(self._columns.num_tokens + [len(tokens) for tokens in new]))
        most = self._bound.adapter.max_positions
        if needed > most:
            _refuse(
                f"was given {needed} tokens; the model has positions for {most}: generate with "
                f"max_length={most}"
            )
        self._check_growth(new)
        longest = self._longest_for(needed)
        self._is_whole = False  # until the forward has ended
        if longest > self._longest and self.core is not None:
            self.core.cache.grow(slabs_of(self._bound.plan, longest, self._longest_prompt, 0, 0))
        self._longest = longest
        if self.core is not None:
            return self.core
        core = self._begin(len(new), max(len(tokens) for tokens in new))
        # `generate` samples the tokens and ends the rows.
        self._admit(
            [
                EngineSequence(row, Request(tokens), tuple(tokens), 0, frozenset())
                for row, tokens in enumerate(new)
            ]
        )
        return core

    def _begin(self, num_rows: int, longest_prompt: int) -> Core:
        """Allocate slabs for some rows."""
        self._longest_prompt = longest_prompt
        # No prompt has rows beside its slot: each call may be one, of a length that is not known.
        self.core = core_of(self._bound, num_rows, self._longest, longest_prompt, 0)
        self._slots = Slots(self.core.cache)
        return self.core

    def _admit(self, sequences: Sequence[EngineSequence]) -> None:
        """Give the sequence of each row a slot."""
        assert self.core is not None
        for seq in sequences:
            self._slots.place(seq)
        for one in self.core.extensions:
            one.admit(sequences)

    def _longest_for(self, needed: int) -> int:
        """Tokens for which to allocate slabs if so many, and one more, are needed."""
        if needed < self._longest:
            return self._longest
        rounded = (needed // GROWTH + 1) * GROWTH
        return max(needed + 1, min(rounded, self._bound.adapter.max_positions + 1))

    def _check_growth(self, new: list[list[int]]) -> None:
        """Check that rows can grow by the new tokens, and up to `max_length` if it was given."""
        seen = np.broadcast_to(self._columns.num_tokens, len(new)).tolist()
        for before, tokens in zip(seen, new, strict=True):
            after = before + len(tokens)
            if not before:  # the last token of `max_length` is not brought in
                before, after = after, max(after, (self._max_length or 0) - 1)
            if problem := self._bound.adapter.growth_problem(before, after):
                _refuse(f"cannot go on: {problem}")

    def _logits(self, core: Core, new: list[list[int]]) -> dict[int, Tensor]:
        """Bring in new tokens: a prompt, one more token of each row, or another turn.

        Returns:
            The logits after the newest token of each row, ``[V]``.
        """
        sequences, logits = self.sequences, dict[int, Tensor]()
        chunks = Chunks(core, self._bound.chunk, self._bound.max_tokens_per_forward)
        is_decode = self._columns.count > 0 and all(len(tokens) == 1 for tokens in new)
        is_decode = is_decode and not any(seq.is_within_prompt for seq in sequences)
        for seq in sequences if self._columns.count else ():
            if is_decode:
                seq.tokens += new[seq.id]
            else:
                seq.begin_turn(new[seq.id])
        while len(logits) < len(sequences):
            unfinished = chunks.unfinished(sequences)
            for one in core.extensions if unfinished else ():
                one.advance(unfinished)
            # A row that waits for others is compacted when its next token is known: a lookahead
            # begins with it.
            core.evictor.evict(sequences if is_decode else unfinished)
            for error in [seq.error for seq in sequences if seq.error is not None]:
                raise ModelError(error)
            step = decode_step(sequences) if is_decode else chunks.step(unfinished)
            if step is not None:
                logits |= self._run(core, step)
        return logits

    def _run(self, core: Core, step: Step) -> dict[int, Tensor]:
        """Run a step; the logits after the newest known token of each row, ``[V]``."""
        output = core.run(step)
        core.commit(step, output, Drawn([[] for _ in step.sequences]))
        rows = zip(step.sequences, step.completes, output.logits, strict=True)
        return {seq.id: newest for seq, is_last, newest in rows if is_last}

    # Snapshots and copies

    def snapshot(self, row: int) -> SequenceSnapshot:
        """The sequence in a row as it is now; the cache stays as it is.

        Args:
            row: Row of the batch, counted from 0.

        Raises:
            SnapshotError: If a policy remembers something that cannot be copied.
            CacheError: If there is no such row.
        """
        found = [one for one in self.sequences if one.id == row]
        if not found:
            _refuse(
                f"of {max(self.batch_size, 0)} rows was asked for a snapshot of row {row!r:.60}"
            )
        if not self._is_whole:
            _refuse(_INCOMPLETE)
        assert self.core is not None
        with torch.inference_mode(False), torch.no_grad():
            snapshot: SequenceSnapshot = snapshots_of(self.core).snapshot(found[0])
        return snapshot

    def restore(self, snapshots: Sequence[SequenceSnapshot]) -> None:
        """Hold the sequences of snapshots, one in each row, and nothing else.

        To go on, give `generate` their whole texts and new tokens, padded on the left. Of a
        snapshot of an `Engine`, the newest token is new.

        Args:
            snapshots: The snapshots; one may be given several times.

        Raises:
            CacheError: If a snapshot is of another plan or model, or has rows beside its slot.
            SnapshotError: If the memory of a policy cannot be copied. The cache is empty then.
        """
        snapshots = list(snapshots)
        if not snapshots or not all(isinstance(one, SequenceSnapshot) for one in snapshots):
            _refuse("is restored from a list of snapshots, one for each row")
        for one in snapshots:
            if (problem := self._bound.resuming.problem_with(one)) is not None:
                _refuse(f"cannot be restored: {problem}")
            if self._has_rows_beside(one):
                _refuse(
                    "cannot be restored: a snapshot is from within a prompt that has more rows "
                    "than a slot; take it later, or give the engine's plan prefill_buffer = buffer"
                )
        self.reset()
        seen = [one.seq_len for one in snapshots]
        self._columns = Columns.holding(seen)
        self._longest = self._longest_for(max(seen))
        self._hold(snapshots)

    def _has_rows_beside(self, snapshot: SequenceSnapshot) -> bool:
        """Whether a sequence has more rows in some layer than its slot takes."""
        pairs = zip(self._bound.plan.layers, snapshot.contents.layers, strict=True)
        return any(
            layer.stages and held.num_rows > (layer.budget or 0) + layer.buffer
            for layer, held in pairs
            if isinstance(held, LayerContents)
        )

    def _hold(self, snapshots: Sequence[SequenceSnapshot]) -> Core:
        """Hold a snapshot in each row."""
        with torch.inference_mode(False), torch.no_grad():
            resumed = [_resumed(row, one) for row, one in enumerate(snapshots)]
            core = self._begin(len(resumed), max(seq.num_staying for seq in resumed))
            self._admit(resumed)
        for error in [seq.error for seq in resumed if seq.error is not None]:
            self.reset()
            raise SnapshotError(error)
        return core

    def __deepcopy__(self, memo: dict[int, Any]) -> "PolicyCache":
        """A copy that continues on its own; model, plan and policies are shared."""
        copy = object.__new__(type(self))
        memo[id(self)] = copy
        vars(copy).update(vars(self))
        copy._columns = deepcopy(self._columns, memo)
        if self.core is not None:
            core = copy._hold([self.snapshot(row) for row in range(self.batch_size)])
            core.timings.take(self.core.timings)
            core.evictor.num_compactions = self.core.evictor.num_compactions
        _attach(copy, self._bound.adapter.model)
        return copy

    def __copy__(self) -> NoReturn:
        _refuse("cannot share its rows with a shallow copy; use copy.deepcopy()")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(
            "belongs to a model in memory and cannot be pickled; save a snapshot of each row, as "
            "by cache.snapshot(0).save(FILE), or use copy.deepcopy() within the process"
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        """Continue with some rows of the batch only.

        Args:
            indices: Indices of rows, or a mask of them.

        Raises:
            CacheError: If there is no such row, or a policy's memory cannot be copied.
        """
        if self.core is None:
            return
        try:
            rows = torch.arange(self.batch_size)[torch.as_tensor(indices).cpu()].tolist()
        except (IndexError, RuntimeError, TypeError, ValueError):
            _refuse(f"of {self.batch_size} rows was asked for rows {indices!r:.60}")
        self._fill(rows)
        self._columns.take(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continue with each row several times: copies that go on separately."""
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            _refuse(f"was asked for {repeats!r:.60} copies of each row; expected at least 1")
        self.batch_select_indices(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue each row from the row of a beam, as beam search does after every step."""
        self.batch_select_indices(beam_idx)

    def _fill(self, rows: Sequence[int]) -> None:
        """Go on with copies of rows, in this order: slots, memory and registers."""
        if not self._is_whole:
            _refuse(_INCOMPLETE)
        source, by_number = self.core, {seq.id: seq for seq in self.sequences}
        assert source is not None
        with torch.inference_mode(False), torch.no_grad():
            chosen = [by_number[row] for row in rows]
            copied = self._bound.resuming.memories.copy
            copies = [seq.copied(row, copied(seq.memory)) for row, seq in enumerate(chosen)]
            places = [seq.slot for seq in chosen]
            if len(rows) != source.cache.num_slots:
                core = self._begin(len(rows), self._longest_prompt)
                core.timings.take(source.timings)
                core.evictor.num_compactions = source.evictor.num_compactions
            assert self.core is not None
            self.core.cache.take(source.cache, places)
            self._slots.fill(copies)

    # What caches of transformers tell about themselves

    def __repr__(self) -> str:
        report = self.report
        return f"{type(self).__name__}(tokens={report.tokens}, rows={report.rows})"

    def __bool__(self) -> bool:
        """False: `generate` of some models drops a cache that is true, to compute it anew."""
        return False

    def __len__(self) -> int:
        """Layers of the model."""
        return self._bound.adapter.num_layers

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first forward."""
        return -1 if self.core is None else self.core.cache.num_slots

    max_batch_size = batch_size  # of older releases of transformers

    @property
    def is_initialized(self) -> bool:
        """Whether slabs are allocated."""
        return self.core is not None

    @property
    def is_sliding(self) -> list[bool]:
        """Whether each layer has a sliding window."""
        shapes = self._bound.adapter.layer_shapes()
        return [shape.sliding_window is not None for shape in shapes]

    @property
    def is_linear(self) -> list[bool]:
        """False for every layer."""
        return [False] * len(self)

    is_dummy = is_linear

    @property
    def is_compileable(self) -> bool:
        """Never: shapes change with the rows held."""
        return False

    @property
    def is_croppable(self) -> bool:
        """Never."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never."""
        return False

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no limit other than the model's positions."""
        return -1

    get_max_cache_shape = get_max_length  # of older releases of transformers
    # What this cache refuses

    def _other_model(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("was given to a model that it was not made for; make one for each model")

    update = get_mask_sizes = get_query_offset = early_initialization = _other_model
    get_conv_state = update_conv_state = _other_model
    get_recurrent_state = update_recurrent_state = _other_model
    has_previous_state = update_indexer = _other_model

    def crop(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: rows that were evicted for tokens that are taken back do not return."""
        _refuse(
            "cannot take back tokens, as assisted decoding does; leave out assistant_model and "
            "prompt_lookup_num_tokens"
        )

    activate_past_recording = crop

    @property
    def max_cache_len(self) -> NoReturn:
        """Refused: PEFT asks for it when it puts a cache with learned keys in place of this one."""
        _refuse("has no fixed length, and takes no learned keys and values, as of prefix tuning")

    def offload(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: a slab stays on the device of its layer."""
        _refuse("keeps its rows on the devices of the model; set a smaller budget instead")

    prefetch = offload

    def _no_layers(self, *_: Any) -> NoReturn:
        _refuse(
            "has no layers of keys and values to read: sequences hold different rows; "
            ".report says how many, and 'kvpolicy trace' which"
        )

    __iter__ = __getitem__ = _no_layers


class _NoLayers(list[Any]):
    """The empty ``layers`` of a cache whose rows are in slabs; its items are refused."""

    __getitem__ = PolicyCache._no_layers


def _resumed(row: int, snapshot: SequenceSnapshot) -> EngineSequence:
    """The sequence of a row that goes on from a snapshot, with the tokens the model has seen."""
    num_generated = max(snapshot.seq_len - len(snapshot.prompt), 0)
    return EngineSequence(
        row,
        Request(resume=snapshot),
        snapshot.prompt[: snapshot.seq_len],
        0,
        frozenset(),
        tokens=[*snapshot.tokens[:num_generated]],
        **attrs.asdict(snapshot.costs),
    )


def _check_arguments(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Check that a cache can serve a forward; raises `CacheError` if not."""
    if names := row_arguments(model):
        _refuse(
            f"computes rows in its own order, and PEFT was given {' and '.join(names)} for each; "
            "generate with one adapter at a time"
        )
    if given.get("input_ids") is None:
        _refuse("was given no input_ids; policies need token ids, not embeddings")
    if given.get("use_cache") is False:
        for name in ("generation_config", "config"):
            if getattr(getattr(model, name, None), "use_cache", None) is False:
                _refuse(f"needs a model that uses caches; set model.{name}.use_cache = True")
        _refuse("was given use_cache=False; leave it out")
    if isinstance(given.get("logits_to_keep"), Tensor) or given.get("logits_to_keep", 0) > 1:
        _refuse("gives the logits of the newest token only, and assisted decoding asks for more")
    if torch.is_grad_enabled():
        _refuse("computes no gradients; call the model under torch.no_grad(), as generate does")
    unknown = [
        name for name, value in given.items() if name not in _KNOWN and not _says_nothing(value)
    ]
    if unknown:
        _refuse(f"was given {min(unknown)} for a forward, which it does not support; leave it out")


def _says_nothing(value: Any) -> bool:
    """Whether an argument is the same as none, such as the empty outputs of encoders."""
    return value is None or value is False or (isinstance(value, (Mapping, list)) and not value)


# The forward of a model that has caches

_REPLACED = "_kvpolicy_replaced_forward"
_attaching = threading.RLock()
# Not in the model: a copy of it, or one that was pickled, has no caches.
_num_caches: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()


def _attach(cache: PolicyCache, model: PreTrainedModel) -> None:
    """Have a model serve forwards with a `PolicyCache` for as long as one of its caches lives."""
    attributes = vars(model)
    with _attaching:
        if model not in _num_caches and not _is_ours(attributes.get("forward")):
            if "forward" in attributes:  # replaced on the instance already, as by accelerate
                attributes[_REPLACED] = attributes["forward"]
            attributes["forward"] = MethodType(_dispatching(type(model)), model)
        _num_caches[model] = _num_caches.get(model, 0) + 1
    weakref.finalize(cache, _detach, model)


def _detach(model: PreTrainedModel) -> None:
    attributes = vars(model)
    with _attaching:
        _num_caches[model] -= 1
        # If another library has replaced it since, ours stays below and passes every call on.
        if _num_caches[model] or not _is_ours(attributes.get("forward")):
            return
        del attributes["forward"], _num_caches[model]
        if _REPLACED in attributes:
            attributes["forward"] = attributes.pop(_REPLACED)


def _is_ours(forward: object) -> bool:
    return hasattr(getattr(forward, "__func__", None), "kvpolicy")


def _dispatching(model_class: type[PreTrainedModel]) -> Any:
    """A forward that calls the `PolicyCache` it is given, and otherwise the model's own."""
    names = list(inspect.signature(model_class.forward).parameters)[1:]

    @wraps(model_class.forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        cache = cache_in(given)
        if isinstance(cache, PolicyCache):
            return cache.serve(self, given)
        replaced = vars(self).get(_REPLACED)
        if replaced is not None:
            return replaced(*args, **kwargs)
        return model_class.forward(self, *args, **kwargs)

    forward.__module__ = __name__  # it is not the model's, whatever it wraps
    forward.kvpolicy = True  # type: ignore[attr-defined]
    return forward
