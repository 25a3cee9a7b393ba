"""Records of a run: the result of each request, and the report of the whole run."""

from typing import Any, Literal

import attrs

from kvpolicy.engine.requests.savings import saved_share
from kvpolicy.engine.snapshots.snapshot import SequenceSnapshot
from kvpolicy.errors import HookError, error_origin
from kvpolicy.hooks.timing import KINDS

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]


@attrs.frozen
class TokenLogprobs:
    """How likely the model found a token, and which tokens it found likeliest at its place.

    They are those of the model itself: temperature, top-k and top-p are left out.

    Attributes:
        token: The token that was taken.
        logprob: Its log-probability, natural logarithm.
        top: The likeliest tokens with their log-probabilities, likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@attrs.frozen
class Result:
    """Result of one request.

    Attributes:
        id: Number of the request in its run, in order of arrival.
        prompt_len: Tokens in the prompt; those of a resumed snapshot are not counted.
        reused_tokens: Of these, those whose rows were copied from a prefix store, and not computed.
        tokens: Generated token ids, including the stop token.
        text: Generated text without special tokens, up to a stop string; ``None`` without a
            tokenizer.
        finish_reason: ``"stop"`` (a stop token or stop string), ``"length"``
            (``max_new_tokens`` or the model's maximum position was reached), ``"cancelled"``,
            ``"deadline"`` (`Request.deadline_s` has passed), or ``"error"``.
        error: If ``finish_reason`` is ``"error"``: what was wrong with the request, or which
            policy failed and how; ``tokens`` are those generated before the error.
        compactions: Number of times that at least one layer was compacted.
        rows_evicted: Evicted rows, summed over layers and counted per KV head.
        peak_rows: Maximum number of rows in any layer, in its slot: without those that lie beside
            the slots while a prompt enters, in memory that all slots share.
        peak_bytes: Bytes of keys and values in those rows, summed over layers, and of the states of
            a hybrid model.
        full_bytes: Bytes that a full cache holds for the same tokens: of keys and values of all
            rows that some query can still attend to, and of the same states.
        prefill_s: Seconds in forwards of this prompt (shared with its prefill group).
        decode_s: Seconds from the first token to the last, without those of compiling.
        snapshot: The sequence at its end, if the request asks for it and there was no error.
        logprobs: Log-probabilities, one entry for each token, if the request asks for them.
        prompt_logprobs: Those of the prompt, one entry for each token but the first.
    """

    id: int
    prompt_len: int = 0
    reused_tokens: int = 0
    tokens: tuple[int, ...] = ()
    text: str | None = None
    finish_reason: FinishReason = "stop"
    error: str | None = None
    compactions: int = 0
    rows_evicted: int = 0
    peak_rows: int = 0
    peak_bytes: int = 0
    full_bytes: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    snapshot: SequenceSnapshot | None = attrs.field(default=None, eq=False, repr=False)
    logprobs: tuple[TokenLogprobs, ...] | None = attrs.field(default=None, repr=False)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = attrs.field(default=None, repr=False)

    @property
    def saved_share(self) -> float:
        """Share of a full cache's bytes that this sequence did not need."""
        return saved_share(self.peak_bytes, self.full_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the snapshot."""
        plain = attrs.filters.exclude(attrs.fields(Result).snapshot)
        derived = {"tokens": list(self.tokens), "saved_share": self.saved_share}
        return attrs.asdict(self, filter=plain) | derived


@attrs.define
class RunReport:
    """Totals of a run; valid at any time during the run.

    Attributes:
        num_requests: Requests finished so far.
        num_errors: Requests that ended with an error.
        prompt_tokens: Prompt tokens of the requests that were prefilled.
        reused_tokens: Of these, those whose rows were copied from a prefix store, and not computed.
        new_tokens: Tokens generated.
        elapsed_s: Seconds since the start of the run, those of compiling included.
        prefill_s: Seconds in prefill; compactions, and copies of stored prefixes and of snapshots,
            included.
        decode_s: Seconds in decode steps, compactions included and compiling not.
        annotate_s: Seconds in `annotate`; within decode steps, host time without device
            synchronization.
        observe_s: Seconds in `observe`.
        lookahead_s: Seconds in `lookahead`, and in the forwards that it asks for.
        score_s: Seconds in `score`, including the computation of its arguments.
        select_s: Seconds in `select`.
        compaction_s: Seconds in `evict`: moving the rows that stay.
        steer_s: Seconds in `steer`, host time without device synchronization.
        decode_policy_s: Seconds of policy work within decode steps, part of `decode_s`.
        compactions: Compactions, summed over sequences and layers.
        rows_evicted: Evicted rows of finished requests, as in `Result`.
        peak_rows: Maximum number of rows in any layer, of finished requests.
        held_bytes: `peak_bytes` of the finished requests, summed.
        full_bytes: What a full cache holds for them, likewise.
        longest_prompt: Tokens of the longest prompt of a finished request.
        note: A sentence if no row was evicted although the plan has a budget, or if rows of a
            prompt were before its end was read; else ``None``.
        peak_kv_bytes: Peak bytes of the cache in this process: keys, values, positions, tracks,
            query windows, registers and unobserved hidden states of all slots, those of rows
            that are not annotated yet, rows beside the slots, and the temporary copy of a
            compaction.
        num_processes: Processes that share the model and its cache.
        path: How decode steps were run: ``"eager: REASON"``, or ``"static"``, followed by
            ``", compiled"``, and on a GPU by ``", fused, in graphs"``,
            ``", in graphs, not fused: REASON"`` or ``", without graphs: REASON"``. Compiled ones
            are ``", in graphs"``. Then ``", prompts not fused: REASON"``, if they are not,
            ``", prompts replayed"``, if chunks of them were, or
            ``", prompts without graphs: REASON"``, if none can be, and
            ``", weights of prompts in torch: REASON"``, if kernels do not compute these. On a CPU
            ``", recorded"``, if some were run from recordings, or ``", not recorded: REASON"``.
        compile_s: Seconds in which decode steps were compiled.
        packed_bytes: Bytes of packed weights, which are beside the plain ones.
        released_bytes: Bytes of plain weights that were freed after packing.
        longest_gap_s: The longest time between two tokens of one sequence within which prompts of
            others were prefilled; 0: there was none.
    """

    num_requests: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    elapsed_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    annotate_s: float = 0.0
    observe_s: float = 0.0
    lookahead_s: float = 0.0
    score_s: float = 0.0
    select_s: float = 0.0
    compaction_s: float = 0.0
    steer_s: float = 0.0
    decode_policy_s: float = 0.0
    compactions: int = 0
    rows_evicted: int = 0
    peak_rows: int = 0
    held_bytes: int = 0
    full_bytes: int = 0
    longest_prompt: int = 0
    note: str | None = None
    peak_kv_bytes: int = 0
    num_processes: int = 1
    path: str = "static"
    compile_s: float = 0.0
    packed_bytes: int = 0
    released_bytes: int = 0
    longest_gap_s: float = 0.0

    def add(self, result: Result) -> None:
        """Count a finished request."""
        self.num_requests += 1
        self.num_errors += result.finish_reason == "error"
        self.rows_evicted += result.rows_evicted
        self.peak_rows = max(self.peak_rows, result.peak_rows)
        self.held_bytes += result.peak_bytes
        self.full_bytes += result.full_bytes
        self.longest_prompt = max(self.longest_prompt, result.prompt_len)

    @property
    def saved_share(self) -> float:
        """Share of the full cache's bytes that the finished requests did not need."""
        return saved_share(self.held_bytes, self.full_bytes)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt_tokens - self.reused_tokens

    @property
    def peak_kv_bytes_in_all(self) -> int:
        """Peak bytes of the caches of all processes, which have equal sizes."""
        return self.num_processes * self.peak_kv_bytes

    @property
    def throughput_tok_s(self) -> float:
        """Generated tokens per second of the whole run."""
        return self.new_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def policy_s(self) -> float:
        """Seconds of policy work: of all hooks, and of what they ask for."""
        return sum(getattr(self, f"{kind}_s") for kind in KINDS)

    @property
    def policy_share(self) -> float:
        """Share of the decode time spent on policies; prefill is not part of either."""
        return self.decode_policy_s / self.decode_s if self.decode_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        derived = {
            "throughput_tok_s": self.throughput_tok_s,
            "policy_s": self.policy_s,
            "policy_share": self.policy_share,
            "saved_share": self.saved_share,
            "computed_tokens": self.computed_tokens,
            "peak_kv_bytes_in_all": self.peak_kv_bytes_in_all,
        }
        return attrs.asdict(self) | derived


@attrs.frozen
class HookFailure:
    """A hook call that has failed; its requests have ended, with the error if they went on.

    It has nothing of prompts or answers, so it may be logged.

    Attributes:
        requests: Numbers of the requests of the call.
        summary: One sentence: which policy, what, and where.
        policy: Name of the policy.
        hook: Name of the hook.
        layer_idx: The layer, for hooks that are called per layer.
        error: Class of the exception.
        at: The innermost places that it came through, as ``FILE:LINE FUNCTION``.
    """

    requests: tuple[int, ...]
    summary: str
    policy: str | None
    hook: str | None
    layer_idx: int | None
    error: str
    at: tuple[str, ...]

    @classmethod
    def of(cls, error: HookError, requests: tuple[int, ...]) -> "HookFailure":
        """What an error tells, without the error itself, which would keep tensors.

        Args:
            error: What was raised.
            requests: Numbers of the requests of the call.
        """
        origin = error_origin(error)
        return cls(
            requests,
            error.summary,
            error.policy,
            error.hook,
            error.layer_idx,
            origin["error"],
            tuple(origin["at"]),
        )


@attrs.frozen
class Events:
    """What one step has brought.

    Attributes:
        tokens: New tokens, as (request id, token).
        results: Results of requests that have ended.
        logprobs: Log-probabilities of the new tokens of a request, by its id, if it asks for them.
        failures: Hook calls that have failed, if that ends requests and not the run. `observe` may
            fail for a request that has its last token: its result has no error then.
    """

    tokens: list[tuple[int, int]]
    results: list[Result]
    logprobs: dict[int, list[TokenLogprobs]] = attrs.field(factory=dict)
    failures: list[HookFailure] = attrs.field(factory=list)


@attrs.frozen
class EngineStats:
    """What an open run does at one time, and what it has cost so far.

    Attributes:
        waiting: Requests without a slot.
        running: Requests with one.
        slots: Slots.
        rows: Rows held in each layer, counted per KV head and summed over slots.
        held_bytes: Bytes of keys and values in those rows.
        report: Totals so far, seconds of policies among them; ``peak_kv_bytes`` is what the cache
            has taken at most.
    """

    waiting: int
    running: int
    slots: int
    rows: tuple[int, ...]
    held_bytes: int
    report: RunReport
