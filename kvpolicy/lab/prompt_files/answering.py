"""Answering prompts with an engine that is kept full, and what one answer consists of."""

import time
from collections import abc
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, ClassVar, Self

import attrs

from kvpolicy.engine.arrival import Arrivals
from kvpolicy.engine.engine import Engine
from kvpolicy.engine.requests.encoding import encode
from kvpolicy.engine.requests.isolation import OnHookError
from kvpolicy.engine.requests.request import Request
from kvpolicy.engine.requests.results import Result
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.reuse.store import PrefixStore, StoreStats
from kvpolicy.errors import RequestError
from kvpolicy.lab.models import LoadedModel, ModelInfo
from kvpolicy.plan.resolved import ResolvedPlan
from kvpolicy.prompts import Chat, ChatPrompts, Prompt

# Prompts that wait for a slot, in slots: policies of `schedule` choose among them.
_AHEAD = 2

Answer = dict[str, Any]


@attrs.frozen
class Answering:
    """What is done with every prompt of a file, as a value: workers receive it.

    Attributes:
        model: The model.
        plan: The plan, resolved for it.
        plan_digest: Its digest here; a worker with other policies has another one.
        defaults: Limits and sampling of prompts that have none of their own.
        chat: How texts become prompts.
        slots: Prompts that are answered together.
        on_hook_error: What happens if a policy fails, as in `Engine`.
    """

    model: ModelInfo
    plan: ResolvedPlan = attrs.field(eq=False)
    plan_digest: str
    defaults: Request
    chat: Chat
    slots: int
    on_hook_error: OnHookError = "raise"

    def engine(self, loaded: LoadedModel, prefix_store: PrefixStore | None = None) -> Engine:
        """An engine for these answers.

        Args:
            loaded: The model.
            prefix_store: What it reuses, which does not change an answer; ``None``: nothing.

        Raises:
            KVPolicyError: As for `Engine`.
        """
        return loaded.engine(
            self.plan,
            slots=self.slots,
            on_hook_error=self.on_hook_error,
            prefix_store=prefix_store,
        )

    def sequence(self, prompt: Prompt, engine: Engine) -> Sequence:
        """The sequence of a prompt, whose request consists of token ids.

        Whether it can be served depends on the model only, and not on the longest prompts beside
        it, so that its answer is the same in every run.

        Args:
            prompt: The prompt.
            engine: Has model and tokenizer.

        Raises:
            RequestError: The prompt cannot be encoded or served.
            KVPolicyError: It is a chat, and the tokenizer has no chat template.
        """
        whole = _chat_prompts(engine.tokenizer, self.chat).encoded(prompt)
        tokens = encode(whole.content, engine.tokenizer, engine.adapter.vocab_size)
        request = attrs.evolve(whole.request(self.defaults), prompt=tokens)
        arrivals = Arrivals(
            engine.adapter, engine.rules, engine.tokenizer, engine.resuming, engine.clock
        )
        return arrivals.sequence_of(request)

    def identity(self) -> dict[str, Any]:
        """Everything that answers depend on, but the prompts, as plain data."""
        return {
            "fingerprint of the model": self.model.fingerprint,
            "plan": self.plan_digest,
            "max_new_tokens": self.defaults.max_new_tokens,
            "min_new_tokens": self.defaults.min_new_tokens,
            # The seed also where it is greedy: a line may have a temperature of its own.
            **attrs.asdict(self.defaults.sampling),
            "stop": list(self.defaults.stop),
            **attrs.asdict(self.chat),
        }


# Those of the last file: what a template writes is looked up once, and not for every prompt.
_chat_prompts = lru_cache(maxsize=1)(ChatPrompts)


@attrs.frozen
class Longest:
    """The most tokens that prompts, and prompts with their answers, may have.

    Attributes:
        prompt: Tokens of the longest prompt.
        sequence: Tokens of the longest prompt and its answer.
    """

    prompt: int = 1
    sequence: int = 2

    @classmethod
    def of(cls, answering: Answering, engine: Engine, prompts: Iterable[Prompt]) -> Self:
        """Encode prompts to see how long they are. Those that cannot be answered do not count.

        Raises:
            KVPolicyError: A prompt is a chat, and the tokenizer has no chat template.
        """
        longest_prompt, longest = 1, 2
        for prompt in prompts:
            try:
                sequence = answering.sequence(prompt, engine)
            except RequestError:
                continue
            longest_prompt = max(longest_prompt, sequence.num_staying)
            longest = max(longest, sequence.max_len)
        return cls(longest_prompt, longest)


@attrs.frozen
class PromptAnswered:
    """One prompt is answered.

    Attributes:
        index: Number of the prompt.
        answer: Its answer.
        reused_tokens: Tokens of the prompt that were not computed. They depend on what was answered
            before, so they are no part of the answer.
    """

    index: int
    answer: Answer
    reused_tokens: int = 0

    @classmethod
    def of(cls, index: int, prompt: Prompt, result: Result) -> Self:
        """A prompt and its result."""
        return cls(index, answer_of(prompt, result), result.reused_tokens)


def answers(
    answering: Answering, engine: Engine, longest: Longest, prompts: Iterable[tuple[int, Prompt]]
) -> Iterator[list[PromptAnswered]]:
    """Answer prompts; the next ones are taken as slots become free.

    Args:
        answering: What is done with each.
        engine: Serves them.
        longest: How long they may be.
        prompts: Number and prompt of each.

    Yields:
        Those that have ended together.

    Raises:
        HookError: A policy has failed, and the engine raises errors.
    """
    run = engine.open_run(max_len=longest.sequence, max_prompt_len=longest.prompt)
    served: dict[int, tuple[int, Prompt]] = {}
    most, waiting = (1 + _AHEAD) * engine.num_slots, iter(prompts)
    while True:
        ended: list[PromptAnswered] = []
        while len(served) + len(ended) < most and (one := next(waiting, None)) is not None:
            try:
                sequence = answering.sequence(one[1], engine)
                served[run.submit(sequence.request)] = one
            except RequestError as error:
                result = Result(0, finish_reason="error", error=str(error))
                ended.append(PromptAnswered.of(*one, result))
        for result in run.step().results if served else ():
            ended.append(PromptAnswered.of(*served.pop(result.id), result))
        if ended:
            yield ended
        elif not served:
            return


def answer_of(prompt: Prompt, result: Result) -> Answer:
    """The answer of a prompt as plain data: a line of the output.

    It has no times, so that it is the same in every run.

    Args:
        prompt: The prompt.
        result: Its result.
    """
    return {
        "id": prompt.id,
        "text": result.text or "",
        "finish_reason": result.finish_reason,
        **({} if result.error is None else {"error": result.error}),
        "prompt_len": result.prompt_len,
        "num_tokens": len(result.tokens),
        "compactions": result.compactions,
        "rows_evicted": result.rows_evicted,
        "peak_rows": result.peak_rows,
        "peak_bytes": result.peak_bytes,
    }


@attrs.frozen
class Answered:
    """Prompts were answered by a worker.

    Attributes:
        worker: Number of the worker, counted from 0.
        host: Name of its machine.
        answers: The prompts and their answers; none: the worker has ended a part of its work.
        busy_s: Seconds that the worker spent on them.
        store: What its prefix store holds then, if it has one and tells.
    """

    worker: int
    host: str
    answers: abc.Sequence[PromptAnswered]
    busy_s: float
    store: StoreStats | None = None


@attrs.frozen
class Shard:
    """Prompts for one worker.

    Attributes:
        samples: Numbers of the prompts to answer.
        prompts: Prompts by number, these among them.
    """

    samples: tuple[int, ...]
    prompts: Mapping[int, Prompt] = attrs.field(eq=False, repr=False)

    noun: ClassVar[str] = "prompts"

    @classmethod
    def of(cls, prompts: abc.Sequence[Prompt], numbers: Iterable[int]) -> Self:
        """Read the prompts with some numbers."""
        chosen = {number: prompts[number] for number in numbers}
        return cls(tuple(chosen), chosen)


@attrs.frozen
class ShardFinished:
    """All prompts of a shard are answered.

    Attributes:
        elapsed_s: Wall time of the shard in seconds.
        store: What the prefix store of the engine holds then, if it has one.
    """

    elapsed_s: float
    store: StoreStats | None = None


def answer_shard(
    answering: Answering, shard: Shard, engine: Engine
) -> Iterator[PromptAnswered | ShardFinished]:
    """Answer the prompts of a shard in this process.

    Args:
        answering: What is done with each.
        shard: The prompts.
        engine: Serves them.

    Yields:
        `PromptAnswered` for each as it ends, then `ShardFinished`.
    """
    begin = time.perf_counter()
    prompts = [(number, shard.prompts[number]) for number in shard.samples]
    longest = Longest.of(answering, engine, [prompt for _, prompt in prompts])
    for ended in answers(answering, engine, longest, prompts):
        for answered in ended:  # noqa: UP028 - Ray sends values in, which a list does not take
            yield answered
    store = None if engine.prefixes is None else engine.prefixes.store.stats
    yield ShardFinished(time.perf_counter() - begin, store)
