"""Look-ahead: the queries of tokens that might follow, computed before a compaction.

A lookahead is a forward beside the cache (`kvpolicy.cache.beside`) of tokens that a policy
names, or that the model likes best. It changes nothing of the sequence.
"""

from collections import abc, defaultdict
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.beside import RowsBeside, StepBeside
from kvpolicy.engine.compaction import DueSlot
from kvpolicy.engine.extensions.base import ANY, Extension
from kvpolicy.engine.requests.isolation import ErrorScope
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import PolicyTimings
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.forward_input import ForwardInput
from kvpolicy.state import Lookahead, Memory


@attrs.frozen(eq=False)
class _Asked:
    """A lookahead of one sequence, and the layers whose queries it is for."""

    sequence: Sequence
    token_ids: tuple[int, ...]  # of a greedy lookahead the first
    num_tokens: int
    is_greedy: bool
    layers: list[int]


class LookaheadQueries(Extension):
    """Asks policies for lookaheads, runs them, and supplies their queries.

    Attributes:
        stacks: The stacks that implement `lookahead`, without repetitions.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        stacks: abc.Sequence[Stack],
        tokenizer: Any,
        timings: PolicyTimings,
        errors: ErrorScope,
        *,
        chunk: int,
        max_tokens_per_forward: int,
    ) -> None:
        """Find who looks ahead.

        Args:
            adapter: The model.
            stacks: The policies of each layer.
            tokenizer: The model's, if there is one.
            timings: Measures the time of policies.
            errors: Isolates errors of hooks.
            chunk: The most tokens of one sequence in one forward.
            max_tokens_per_forward: The most tokens of all sequences in one forward.
        """
        self.stacks = [stack for stack in dict.fromkeys(stacks) if stack.implements("lookahead")]
        self._layers = {
            stack: np.array([other is stack for other in stacks]) for stack in self.stacks
        }
        self._adapter, self._tokenizer = adapter, tokenizer
        self._timings, self._errors = timings, errors
        self._chunk, self._max_tokens = chunk, max_tokens_per_forward
        # Of the eviction under way, for the slot of a sequence in a layer, [H_q, P, D].
        self._queries: dict[tuple[int, int], Tensor] = {}

    def repeats(self, sequences: abc.Sequence[Sequence]) -> int:
        """A lookahead begins with the newest token."""
        return 1 if self.cache.num_free_rows([seq.slot for seq in sequences]).min() <= 1 else ANY

    def before_eviction(self, sequences: abc.Sequence[Sequence], due: np.ndarray) -> None:
        """Compute the queries that policies want."""
        self._queries = {}
        asked = [
            lookahead
            for index, seq in enumerate(sequences)
            for lookahead in self._ask(seq, due[:, index])
        ]
        groups: dict[tuple[bool, int], list[_Asked]] = defaultdict(list)
        for lookahead in asked:
            if lookahead.sequence.finish_reason is None:
                groups[lookahead.is_greedy, lookahead.num_tokens].append(lookahead)
        for (_, num_tokens), group in groups.items():
            width = min(num_tokens, self._chunk)
            most = max(self._max_tokens // width, 1)
            for first in range(0, len(group), most):
                with self._timings.time("lookahead_s", self._adapter.device):
                    self._lookahead(group[first : first + most])

    def together(self, due: DueSlot) -> int:
        """Slots with equally many queries."""
        queries = self._queries.get((due.layer_idx, due.slot))
        return 0 if queries is None else queries.shape[1]

    def arguments(self, due: abc.Sequence[DueSlot]) -> abc.Mapping[str, Any]:
        """Their queries, ``[B, H_q, P, D]``."""
        found = [self._queries.get((one.layer_idx, one.slot)) for one in due]
        queries = [one for one in found if one is not None]
        return {"lookahead_queries": torch.stack(queries) if queries else None}

    def _ask(self, seq: Sequence, due: np.ndarray) -> abc.Iterator[_Asked]:
        """Ask the policies of each stack for which a sequence is due in some layer."""
        seq_len = int(self.cache.seq_len[seq.slot])
        for stack in self.stacks:
            layers = np.flatnonzero(due & self._layers[stack]).tolist()
            if not layers or seq.finish_reason is not None:
                continue
            answer: Lookahead | None = None
            with self._errors.covering([seq]), self._timings.time("lookahead_s", None):
                answer = stack.lookahead(
                    vocab_size=self._adapter.vocab_size,
                    token_ids=torch.tensor(seq.token_ids(0, seq_len)),
                    seq_len=seq_len,
                    prompt_len=seq.prompt_len(seq_len),
                    tokenizer=self._tokenizer,
                    memory=Memory([seq.memory]),
                )
            num_tokens = 0 if answer is None else min(answer.num_tokens, self._most(seq_len))
            if answer is not None and num_tokens:
                token_ids = answer.token_ids
                if token_ids is None:  # within a prompt, what follows is known
                    token_ids = tuple(seq.token_ids(seq_len, seq_len + num_tokens))
                is_greedy = answer.token_ids is None and len(token_ids) < num_tokens
                if is_greedy:  # from the token that was drawn last
                    token_ids = tuple(seq.token_ids(seq_len, seq_len + 1))
                yield _Asked(seq, token_ids[:num_tokens], num_tokens, is_greedy, layers)

    def _most(self, seq_len: int) -> int:
        """Tokens for which the model has positions after so many."""
        most, edge = self._adapter.max_positions, self._adapter.longrope_length
        if edge is not None and seq_len <= edge:
            most = min(most, edge)
        return max(most - seq_len, 0)

    def _lookahead(self, group: list[_Asked]) -> None:
        """Run lookaheads of equally many tokens, and collect their queries."""
        first = group[0]
        slots = [lookahead.sequence.slot for lookahead in group]
        layers = sorted({layer for lookahead in group for layer in lookahead.layers})
        beside = RowsBeside(first.num_tokens, layers)
        tokens = torch.tensor([lookahead.token_ids for lookahead in group])
        if first.is_greedy:
            num_queries = self._run_greedily(slots, beside, tokens)
        else:
            width = 1 if self.cache.one_by_one else self._chunk
            for start in range(0, first.num_tokens, width):
                self._forward(slots, beside, tokens[:, start : start + width])
            num_queries = [first.num_tokens] * len(group)
        self.cache.counts.note_copy(beside.num_bytes)
        whole = {
            # A copy: those of a forward in inference mode cannot be checked for changes.
            layer_idx: self._adapter.processes.all_gather(beside.queries[layer_idx].clone())
            for layer_idx in layers
        }
        for row, (lookahead, num) in enumerate(zip(group, num_queries, strict=True)):
            for layer_idx in lookahead.layers if num else ():
                self._queries[layer_idx, lookahead.sequence.slot] = whole[layer_idx][row, :, :num]

    def _run_greedily(self, slots: list[int], beside: RowsBeside, tokens: Tensor) -> list[int]:
        """Feed tokens ``[B, 1]``, then the likeliest after them; the number before a stop token."""
        fed = []
        for _ in range(beside.num_tokens):
            fed.append(tokens)
            newest = self._forward(slots, beside, tokens).argmax(dim=-1)
            tokens = self._adapter.processes.same_tokens(newest)[:, None]
        stops = frozenset(self._adapter.stop_ids)
        rows = torch.cat([one.cpu() for one in fed], dim=1).tolist()
        return [next((i for i, one in enumerate(row) if one in stops), len(row)) for row in rows]

    def _forward(self, slots: list[int], beside: RowsBeside, tokens: Tensor) -> Tensor:
        """Logits after tokens ``[B, L]``."""
        step = StepBeside(self.cache, slots, tokens.shape[1], beside)
        logits, _ = self._adapter.forward(ForwardInput(tokens, step))
        step.commit()
        return logits
