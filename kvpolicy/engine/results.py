"""What a run reports: a record for each request, and one for the run."""

from typing import Any, Literal

import attrs

FinishReason = Literal["stop", "length", "cancelled", "error"]


@attrs.frozen
class Result:
    """How one request ended.

    Attributes:
        id: Number of the request in its run, in order of arrival.
        prompt_len: Tokens in the prompt.
        tokens: Generated token ids, the stop token included.
        text: Generated text without special tokens, cut before a stop string; ``None``
            without a tokenizer.
        finish_reason: ``"stop"`` (a stop token or stop string), ``"length"``
            (``max_new_tokens``, or the model's positions are used up), ``"cancelled"``, or
            ``"error"``.
        error: What was wrong with the request, or which policy failed while it was served and
            how, if ``finish_reason`` is ``"error"``; tokens are those generated until then.
        compactions: Times at which at least one layer was compacted.
        rows_evicted: Rows that left, summed over layers and counted per KV head.
        peak_rows: The most rows any layer held for this sequence.
        peak_bytes: Bytes of keys and values in those rows, summed over layers.
        prefill_s: Seconds in forwards of this prompt (shared with its prefill group).
        decode_s: Seconds from the first token to the last.
    """

    id: int
    prompt_len: int = 0
    tokens: tuple[int, ...] = ()
    text: str | None = None
    finish_reason: FinishReason = "stop"
    error: str | None = None
    compactions: int = 0
    rows_evicted: int = 0
    peak_rows: int = 0
    peak_bytes: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return attrs.asdict(self) | {"tokens": list(self.tokens)}


@attrs.define
class RunReport:
    """What a run cost in all; valid at any moment of the run.

    Attributes:
        num_requests: Requests answered so far.
        num_errors: Those of them whose answer is an error.
        prompt_tokens: Prompt tokens prefilled.
        new_tokens: Tokens generated.
        elapsed_s: Seconds since the run began.
        prefill_s: Seconds in prefill, compactions included.
        decode_s: Seconds in decode steps, compactions included.
        observe_s: Seconds in `observe`.
        score_s: Seconds in `score`, the computing of its arguments included.
        select_s: Seconds in `select`.
        compaction_s: Seconds in `evict`: moving the rows that stay.
        steer_s: Seconds in `steer`, by the host's clock alone.
        decode_policy_s: Seconds of all policy work within decode steps, of those in `decode_s`.
        compactions: Compactions of one sequence in one layer, summed over both.
        peak_kv_bytes: Bytes of the cache at its largest: keys, values, positions, tracks,
            query windows, registers and unobserved hidden states of all slots, and the copy
            a compaction needs for a moment; in this process.
        num_processes: Processes that hold the model, and its cache, together.
    """

    num_requests: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    elapsed_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    observe_s: float = 0.0
    score_s: float = 0.0
    select_s: float = 0.0
    compaction_s: float = 0.0
    steer_s: float = 0.0
    decode_policy_s: float = 0.0
    compactions: int = 0
    peak_kv_bytes: int = 0
    num_processes: int = 1

    @property
    def peak_kv_bytes_in_all(self) -> int:
        """Bytes of the caches of all processes, which are alike."""
        return self.num_processes * self.peak_kv_bytes

    @property
    def throughput_tok_s(self) -> float:
        """Generated tokens per second of the whole run."""
        return self.new_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def policy_s(self) -> float:
        """Seconds of policy work: looking, scoring, selecting, compacting, steering."""
        compacting = self.score_s + self.select_s + self.compaction_s
        return self.observe_s + compacting + self.steer_s

    @property
    def policy_share(self) -> float:
        """Part of the decode time spent on policies; what they do in prefill is in neither."""
        return self.decode_policy_s / self.decode_s if self.decode_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        derived = {
            "throughput_tok_s": self.throughput_tok_s,
            "policy_s": self.policy_s,
            "policy_share": self.policy_share,
            "peak_kv_bytes_in_all": self.peak_kv_bytes_in_all,
        }
        return attrs.asdict(self) | derived


@attrs.frozen
class Events:
    """What one round brought: new tokens as (request id, token), and finished results."""

    tokens: list[tuple[int, int]]
    results: list[Result]
