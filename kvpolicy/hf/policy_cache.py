"""A cache for ``model.generate(past_key_values=...)``: the engine's slots, one for each row.

`generate` calls the model, not us. Before a forward, the cache works out which tokens are new,
brings in all of a long prompt but its last chunk by forwards of its own, and lets the caller's
forward do that last chunk, with the engine's attention and slabs. After it, the cache counts,
observes and compacts. What is done is done by `RunningBatch`, as in a run of the engine.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvpolicy.engine.batch import RunningBatch
from kvpolicy.engine.engine import DEFAULT_CHUNK, Engine
from kvpolicy.engine.sequence import LiveSequence
from kvpolicy.hf.hooks import attach
from kvpolicy.hf.inputs import Columns
from kvpolicy.hf.refusals import NoOtherCache, check_arguments, refuse
from kvpolicy.hf.report import CacheReport
from kvpolicy.hf.turns import turn_feeds
from kvpolicy.plan.plan import Plan

# Slabs grow by so many rows at a time.
GROWTH = 256

# Yields what the model is to be called with, is sent its output, returns what the caller gets.
Serving = Generator[dict[str, Any], CausalLMOutputWithPast, CausalLMOutputWithPast]


class PolicyCache(NoOtherCache):
    """Keys and values of one batch, kept within a plan, for a model's own `generate`.

    Greedy tokens equal those of `Engine.generate` with the same plan. Rows may be padded on the
    left; pads are never stored. The same cache continues the same conversation: give it the
    whole text again, or the new tokens with the whole attention mask. `reset` makes it ready
    for another. A row that has ended keeps receiving the pads that `generate` gives it, as
    tokens; they take room in its own slot and touch no other row.

    Policies for the order of admission (``schedule``) have no say: rows are fed as they come.
    Beam search, assisted decoding and gradients are refused with a `CacheError`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Plan | None = None,
        tokenizer: Any = None,
        *,
        max_length: int | None = None,
        chunk: int = DEFAULT_CHUNK,
    ) -> None:
        """Bind a plan to a model, which is left as it is; slabs come with the first forward.

        Args:
            model: A decoder-only transformers model.
            plan: What each layer does with its cache.
            tokenizer: Its tokenizer, for policies that read text.
            max_length: Tokens for which to make room at once. Without it, and beyond it, slabs
                grow as they are needed, `GROWTH` rows at a time, up to budget and buffer.
            chunk: The most prompt tokens of one row in one forward.

        Raises:
            ModelError: If the engine cannot run the model.
            PlanError: If the plan does not fit the model.
            CacheError: If the plan is to store pads.
        """
        super().__init__()
        if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
            refuse(f"was given max_length={max_length!r}; a number of tokens is wanted")
        self._engine = Engine(model, tokenizer, plan, chunk=chunk)
        if self._engine.plan.padding != "none":
            refuse('stores no pads; run plans with padding = "stored" in an Engine')
        self._max_length = max_length
        self._under_way: Serving | None = None
        self.reset()
        attach(self, model)

    def reset(self) -> None:
        """Forget everything, and be ready for another prompt."""
        self.abandon()
        self._is_whole = True
        self._columns = Columns()
        self._longest = self._max_length or 0
        self._slots: RunningBatch | None = None

    @property
    def report(self) -> CacheReport:
        """What the cache holds and has cost so far."""
        slots = self._slots
        if slots is None:
            return CacheReport()
        for slot, served in enumerate(slots.active):
            slots.compactor.note_peak(served, slot)
        rows = {
            served.id: int(slots.cache.rows[:, slot].max())
            for slot, served in enumerate(slots.active)
        }
        return CacheReport(
            tokens=tuple(self._columns.num_tokens.tolist()),
            rows=tuple(rows[row] for row in range(len(rows))),
            peak_rows=max(served.peak_rows for served in slots.active),
            peak_kv_bytes=slots.cache.peak_bytes,
            compactions=slots.compactor.num_compactions,
            rows_evicted=sum(served.rows_evicted for served in slots.active),
            policy_s=slots.clock.policy_s,
        )

    def check_prompt(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> None:
        """Make sure that a prompt continues what the cache has seen.

        `generate` shows a cache only the columns after those it has seen, so that a longer
        prompt that begins otherwise would pass for a second turn.

        Args:
            input_ids: The whole prompt, ``[B, columns]``.
            attention_mask: 0 for pads, of the same shape; ``None`` if there are none.

        Raises:
            CacheError: If it does not begin with the tokens that the cache has seen.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if mask.shape != input_ids.shape:
            refuse("is checked against a whole prompt and its mask; give both, of one shape")
        for served in self._slots.active if self._slots else ():
            seen = [*served.prompt, *served.tokens]
            given = input_ids[served.id][mask[served.id] != 0].tolist()
            if len(given) <= len(seen) or given[: len(seen)] != seen:
                refuse(
                    f"that has seen {len(seen)} tokens in row {served.id} was given a prompt that "
                    "does not begin with them and go on; call reset() first"
                )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, pads included: by this `generate` tells old columns from new ones."""
        return self._columns.count

    # One forward, as the hooks see it

    def begin(self, module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
        """Prepare a forward of the model; what it is to be called with instead."""
        if module is not self._engine.adapter.model:
            refuse("was made for another model; make one for each")
        if not self._is_whole:
            refuse("lost its place: a forward did not end; call reset() and start again")
        check_arguments(given)
        token_ids, mask = given["input_ids"], given.get("attention_mask")
        new = self._columns.read(token_ids, mask, given.get("position_ids"))
        slots = self._drop_oldest_if_full(new)
        self._is_whole = False
        under_way = self._serve(slots, new)
        with _as_in_the_engine():
            arguments = next(under_way)
        self._columns.add(new, token_ids.shape[1], mask)
        self._under_way = under_way
        return arguments

    def end(self, output: CausalLMOutputWithPast | None) -> CausalLMOutputWithPast | None:
        """Finish the forward under way; ``None`` for an output means that it raised."""
        under_way = self._under_way
        if under_way is None or output is None:
            self.abandon()
            return None
        self._under_way = None
        try:
            with _as_in_the_engine():
                under_way.send(output)
        except StopIteration as done:
            self._is_whole = True
            return done.value
        msg = "a forward was to be the last, and another came"
        raise AssertionError(msg)

    def abandon(self) -> None:
        """Give up the forward under way, if any, and give the model back its attention."""
        if self._under_way is not None:
            self._under_way.close()
            self._under_way = None

    def _drop_oldest_if_full(self, new: list[list[int]]) -> RunningBatch:
        """Slabs that can take the new tokens, and one more."""
        needed = int(max(self._columns.num_tokens + [len(tokens) for tokens in new]))
        most = self._engine.adapter.max_positions
        if needed > most:
            refuse(
                f"was given {needed} tokens; the model has positions for {most}: generate with "
                f"max_length={most}"
            )
        with _as_in_the_engine():
            if needed >= self._longest:
                rounded = (needed // GROWTH + 1) * GROWTH
                self._longest = max(needed + 1, min(rounded, most + 1))
                if self._slots is not None:
                    self._slots.reserve(self._longest)
            if self._slots is None:
                self._slots = RunningBatch(self._engine, len(new), self._longest)
        return self._slots

    def _serve(self, slots: RunningBatch, new: list[list[int]]) -> Serving:
        """Run all forwards but the last; yields what to call the model with for that one."""
        adapter = self._engine.adapter
        logits: dict[int, Tensor] = {}

        def take(sequences: Sequence[LiveSequence], newest: Tensor) -> None:
            logits.update(zip((served.id for served in sequences), newest, strict=True))

        with closing(turn_feeds(slots, new, take)) as feeds:
            feed = next(feeds)
            while int(feed.step.lengths.sum()) < slots.num_unfed:
                feed = feeds.send(
                    adapter.forward(feed.token_ids, feed.step, wants_states=slots.wants_states)
                )
            with adapter.running(feed.token_ids, feed.step, slots.wants_states) as forward:
                output = yield forward.arguments
            assert output.logits is not None
            with suppress(StopIteration):
                feeds.send((output.logits[:, -1], forward.last_states))
        output.logits = torch.stack([logits[row] for row in range(len(new))])[:, None]
        output.past_key_values = self
        return output


@contextmanager
def _as_in_the_engine() -> Iterator[None]:
    """Slabs and what policies remember outlive the caller's inference mode, and need no graph."""
    with torch.inference_mode(False), torch.no_grad():
        yield
