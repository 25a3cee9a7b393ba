"""Probing: the queries of tokens that might follow, computed before a compaction.

A probe is a forward beside the cache (`kvpolicy.cache.beside`) of tokens that a policy
names, or that the model likes best. It changes nothing of the sequence.
"""

from collections import abc, defaultdict
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.beside import RowsBeside, StepBeside
from kvpolicy.cache.slab import KVCache
from kvpolicy.engine.requests.isolation import ErrorScope
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import PolicyTimings
from kvpolicy.model.adapter import ForwardInput, ModelAdapter
from kvpolicy.state import Memory, Probe

# Queries of a probe for the slot of a sequence in a layer, [H_q, P, D].
ProbeQueries = abc.Mapping[tuple[int, int], Tensor]


@attrs.frozen(eq=False)
class _Asked:
    """A probe of one sequence, and the layers whose queries it is for."""

    sequence: Sequence
    token_ids: tuple[int, ...]  # of a greedy probe the first
    num_tokens: int
    is_greedy: bool
    layers: list[int]


class Prober:
    """Asks policies for probes, and runs them.

    Attributes:
        stacks: The stacks that implement `probe`, without repetitions.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: KVCache,
        stacks: abc.Sequence[Stack],
        tokenizer: Any,
        timings: PolicyTimings,
        errors: ErrorScope,
        *,
        chunk: int,
        max_tokens_per_forward: int,
    ) -> None:
        self.stacks = [stack for stack in dict.fromkeys(stacks) if stack.implements("probe")]
        self._layers = {
            stack: np.array([other is stack for other in stacks]) for stack in self.stacks
        }
        self._adapter, self._cache, self._tokenizer = adapter, cache, tokenizer
        self._timings, self._errors = timings, errors
        self._chunk, self._max_tokens = chunk, max_tokens_per_forward
        self._likeliest: dict[int, Tensor] = {}  # next token, by slot

    def note(self, sequences: abc.Sequence[Sequence], logits: Tensor) -> None:
        """Note the likeliest next tokens after a forward, for where none is drawn by us.

        Args:
            sequences: The sequences of the forward.
            logits: Logits after their newest tokens, ``[B, V]``.
        """
        if self.stacks:
            slots = [seq.slot for seq in sequences]
            self._likeliest = dict(zip(slots, logits.argmax(dim=-1), strict=True))

    def run(self, sequences: abc.Sequence[Sequence], due: np.ndarray) -> ProbeQueries:
        """The queries that policies want for a compaction.

        Args:
            sequences: Sequences, ``B`` of them.
            due: Which of them are compacted in which layers, bool ``[layers, B]``.
        """
        asked = [
            probe
            for index, seq in enumerate(sequences if self.stacks else ())
            for probe in self._ask(seq, due[:, index])
        ]
        groups: dict[tuple[bool, int], list[_Asked]] = defaultdict(list)
        for probe in asked:
            if probe.sequence.finish_reason is None:
                groups[probe.is_greedy, probe.num_tokens].append(probe)
        found: dict[tuple[int, int], Tensor] = {}
        for (_, num_tokens), group in groups.items():
            width = min(num_tokens, self._chunk)
            most = max(self._max_tokens // width, 1)
            for first in range(0, len(group), most):
                with self._timings.time("probe_s", self._adapter.device):
                    self._probe(group[first : first + most], found)
        return found

    def _ask(self, seq: Sequence, due: np.ndarray) -> abc.Iterator[_Asked]:
        """Ask the policies of each stack for which a sequence is due in some layer."""
        seq_len = int(self._cache.seq_len[seq.slot])
        for stack in self.stacks:
            layers = np.flatnonzero(due & self._layers[stack]).tolist()
            if not layers or seq.finish_reason is not None:
                continue
            answer: Probe | None = None
            with self._errors.covering([seq]), self._timings.time("probe_s", None):
                answer = stack.probe(
                    vocab_size=self._adapter.vocab_size,
                    token_ids=torch.tensor(seq.token_ids(0, seq_len)),
                    seq_len=seq_len,
                    prompt_len=len(seq.prompt),
                    tokenizer=self._tokenizer,
                    memory=Memory([seq.memory]),
                )
            num_tokens = 0 if answer is None else min(answer.num_tokens, self._most(seq_len))
            if answer is not None and num_tokens:
                token_ids = answer.token_ids
                if token_ids is None:  # within a prompt, what follows is known
                    token_ids = tuple(seq.token_ids(seq_len, seq_len + num_tokens))
                is_greedy = answer.token_ids is None and len(token_ids) < num_tokens
                if is_greedy:
                    token_ids = self._next_token(seq, seq_len)
                yield _Asked(seq, token_ids[:num_tokens], num_tokens, is_greedy, layers)

    def _most(self, seq_len: int) -> int:
        """Tokens for which the model has positions after so many."""
        most, edge = self._adapter.max_positions, self._adapter.longrope_length
        if edge is not None and seq_len <= edge:
            most = min(most, edge)
        return max(most - seq_len, 0)

    def _next_token(self, seq: Sequence, seq_len: int) -> tuple[int, ...]:
        """The token that comes next: of the prompt, drawn already, or else the likeliest."""
        known = seq.token_ids(seq_len, seq_len + 1)
        return tuple(known) if known else (int(self._likeliest[seq.slot]),)

    def _probe(self, group: list[_Asked], found: dict[tuple[int, int], Tensor]) -> None:
        """Run probes of equally many tokens, and collect their queries."""
        first = group[0]
        slots = [probe.sequence.slot for probe in group]
        layers = sorted({layer for probe in group for layer in probe.layers})
        beside = RowsBeside(first.num_tokens, layers)
        tokens = torch.tensor([probe.token_ids for probe in group])
        if first.is_greedy:
            num_queries = self._run_greedily(slots, beside, tokens)
        else:
            for start in range(0, first.num_tokens, self._chunk):
                self._forward(slots, beside, tokens[:, start : start + self._chunk])
            num_queries = [first.num_tokens] * len(group)
        self._cache.note_copy(beside.num_bytes)
        whole = {
            # A copy: those of a forward in inference mode cannot be checked for changes.
            layer_idx: self._adapter.processes.all_gather(beside.queries[layer_idx].clone())
            for layer_idx in layers
        }
        for row, (probe, num) in enumerate(zip(group, num_queries, strict=True)):
            for layer_idx in probe.layers if num else ():
                found[layer_idx, probe.sequence.slot] = whole[layer_idx][row, :, :num]

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
        step = StepBeside(self._cache, slots, tokens.shape[1], beside)
        logits, _ = self._adapter.forward(ForwardInput(tokens, step))
        return logits
