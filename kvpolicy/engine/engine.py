"""The engine: continuous batching of sequences whose caches are evicted under a plan."""

from collections import abc
from typing import Any, ClassVar

from kvpolicy.engine.core import EngineCore
from kvpolicy.engine.open_run import OpenRun
from kvpolicy.engine.requests.isolation import OnHookError
from kvpolicy.engine.requests.request import Request, Sampling, samplings_of
from kvpolicy.engine.run import Run
from kvpolicy.engine.stream import Stream
from kvpolicy.errors import KVPolicyError


class Engine(EngineCore):
    """Serves requests with a model, a plan, and a number of slots.

    `EngineCore` has the arguments and attributes.
    """

    chooses_tokens: ClassVar[bool] = True

    def generate(
        self,
        prompts: abc.Iterable[str | abc.Sequence[int] | Request],
        *,
        max_new_tokens: int = 256,
        sampling: Sampling | abc.Sequence[Sampling] = Sampling(),  # noqa: B008 - frozen
        stop: str | abc.Iterable[str] = (),
        stop_ids: abc.Iterable[int] | None = None,
        min_new_tokens: int | None = None,
    ) -> Run:
        """Continue prompts.

        Args:
            prompts: Texts, token ids, or requests, to which the other arguments do not apply.
            max_new_tokens: The most tokens to generate for each.
            sampling: How tokens are sampled, for all prompts or one for each.
            stop: Texts that end a generation.
            stop_ids: Tokens that end a generation; ``None`` means the model's own.
            min_new_tokens: Tokens before which ``stop_ids`` are not drawn; ``None``: as the
                model's generation config says.

        Returns:
            A run: iterate over it for results as they finish. Nothing is computed before.
        """
        if isinstance(prompts, (str, Request)):
            msg = f"generate() was given one prompt, {prompts!r:.60}; give a list of prompts"
            raise KVPolicyError(msg)
        if isinstance(prompts, (bytes, abc.Mapping)) or not isinstance(prompts, abc.Iterable):
            msg = f"prompts were given as {prompts!r:.60}; give a list of prompts"
            raise KVPolicyError(msg)
        prompts = list(prompts)
        samplings = samplings_of(sampling, len(prompts))
        requests = [
            prompt
            if isinstance(prompt, Request)
            else Request(prompt, max_new_tokens, one, stop, stop_ids, min_new_tokens=min_new_tokens)
            for prompt, one in zip(prompts, samplings, strict=True)
        ]
        return Run(self, requests)

    def open_run(
        self,
        *,
        max_len: int | None = None,
        max_prompt_len: int | None = None,
        kv_memory: int | None = None,
        max_waiting: int | None = None,
        on_hook_error: OnHookError | None = None,
    ) -> OpenRun:
        """A run to which requests may be submitted at any time; slabs are allocated now.

        Args:
            max_len: The most tokens of a sequence, prompt and generation together; ``None``: the
                model's positions. Slabs of layers without a budget have so many rows.
            max_prompt_len: The most tokens of a prompt, which matters where a plan keeps the rows
                of prompts; ``None``: ``max_len``.
            kv_memory: The most bytes of the slabs of all slots, of all else that belongs to slots,
                and of the copy of a layer that a compaction makes. It says how many slots there
                are; ``None``: as many as the engine has. Attention in prefill takes more for a
                moment in layers with a sliding window, and where heads share rows; see
                `RunReport.peak_kv_bytes`.
            max_waiting: Requests that may wait while all slots are in use; ``None``: any number.
            on_hook_error: What happens if a policy fails, see `Engine`; ``None``: as there.

        Raises:
            KVPolicyError: If a limit is invalid, or ``kv_memory`` has no room for one sequence.
        """
        return OpenRun(
            self,
            max_len=max_len,
            max_prompt_len=max_prompt_len,
            kv_memory=kv_memory,
            max_waiting=max_waiting,
            on_hook_error=on_hook_error,
        )

    def stream(self, prompt: str | abc.Sequence[int] | Request, **options: Any) -> Stream:
        """Continue one prompt; iterate over the stream for its text, piece by piece.

        Args:
            prompt: Text, token ids, or a request.
            options: As for `generate`.
        """
        return Stream(self.generate([prompt], **options))
