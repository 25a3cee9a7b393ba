"""A model under a plan, as a model of lm-evaluation-harness.

`PolicyLM` is the harness's own Hugging Face model with another way to compute: generations and
log-likelihoods go through the engine with continuous batching. Tokenization, chat templates and
stop strings are the harness's, so results equal those of its ``hf`` model where nothing is
evicted.
"""

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import attrs
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from kvpolicy.engine.engine import DEFAULT_SLOTS, Engine, Run
from kvpolicy.engine.requests.request import Request, Sampling
from kvpolicy.engine.requests.results import Result, RunReport
from kvpolicy.errors import KVPolicyError, ModelError, PlanError, RequestError, TaskError
from kvpolicy.lab.lm_eval.loglikelihood import Continuation, Score, Scoring
from kvpolicy.lab.models import fingerprint
from kvpolicy.model.loading import load_model
from kvpolicy.model.weight_forms import CpuWeights
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.toml import Override, parse_value

# Passes results on as they come, to show progress; also given: the kind of request, and how many
# results there will be.
Follow = Callable[[Iterable[Result], str, int], Iterator[Result]]

# Settings that change what is drawn, where a task names them; `Sampling` has them by these names.
_PENALTIES = ("min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
# Tokens before which a generation does not end, as transformers and as vLLM call them.
_LEAST_TOKENS = ("min_new_tokens", "min_tokens")
# Settings of transformers' generate() whose default changes nothing.
_WITHOUT_EFFECT = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}


@attrs.define
class Cost:
    """What the sequences of one task have cost.

    Attributes:
        num_sequences: Sequences that went through the engine. Continuations that differ in their
            last token only are scored by one.
        prompt_tokens: Tokens of their prompts.
        new_tokens: Tokens generated or scored.
        num_cut_off: Truncated generations: they reached the maximum of new tokens.
        num_shortened: Prompts that lost their beginning so that the generation fits into the
            model's positions.
        compactions: Times at which at least one layer of a sequence was compacted.
        rows_evicted: Evicted rows, summed over layers and counted per KV head.
        peak_rows: The most rows any layer held for one sequence.
        peak_bytes: The most bytes of keys, values and states one sequence held, summed over layers.
    """

    num_sequences: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    num_cut_off: int = 0
    num_shortened: int = 0
    compactions: int = 0
    rows_evicted: int = 0
    peak_rows: int = 0
    peak_bytes: int = 0

    def add(self, result: Result, *, truncated: bool = False, shortened: bool = False) -> None:
        """Count one sequence, and whether it was truncated or its prompt shortened."""
        self.num_sequences += 1
        self.prompt_tokens += result.prompt_len
        self.new_tokens += len(result.tokens)
        self.num_cut_off += truncated
        self.num_shortened += shortened
        self.compactions += result.compactions
        self.rows_evicted += result.rows_evicted
        self.peak_rows = max(self.peak_rows, result.peak_rows)
        self.peak_bytes = max(self.peak_bytes, result.peak_bytes)


class PolicyLM(HFLM):
    """A model under a plan.

    Attributes:
        engine: The engine.
        costs: What each task has cost so far.
        reports: What each kind of request has cost so far.
        identity: Digest of the plan and fingerprint of the model.
    """

    def __init__(
        self, engine: Engine, *, seed: int = 0, follow: Follow | None = None, **options: Any
    ) -> None:
        """Answer the harness's requests with an engine.

        Args:
            engine: An engine with a tokenizer.
            seed: Random seed for tasks that sample.
            follow: Passes results on as they come, to show progress.
            options: Those of the harness's ``hf`` model that concern text: ``think_end_token``,
                ``enable_thinking``, ``chat_template_args``, ``add_bos_token``,
                ``prefix_token_id``, ``max_length``.

        Raises:
            ModelError: The tokenizer has neither a first nor a last token.
        """
        tokenizer = engine.tokenizer
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            msg = (
                "this model's tokenizer has no token that begins or ends a text, so a text "
                "without a context cannot be scored or continued"
            )
            raise ModelError(msg)
        # The engine counts the token sampled last among the positions, too.
        options = {"max_length": engine.adapter.max_positions - 1} | options
        model, logger = engine.adapter.model, logging.getLogger(HFLM.__module__)
        was_disabled, logger.disabled = logger.disabled, True  # warns about every loaded model
        try:
            super().__init__(
                model, backend="causal", tokenizer=tokenizer, batch_size=engine.num_slots, **options
            )
        finally:
            logger.disabled = was_disabled
        self.engine = engine
        self.costs: dict[str, Cost] = defaultdict(Cost)
        self.reports: dict[str, RunReport] = {}
        self.identity = {
            "plan_digest": engine.plan.digest(),
            "model_fingerprint": fingerprint(
                model, engine.tokenizer, compiled=engine.compiled is not None
            ),
        }
        self._seed = seed
        self._follow = follow or (lambda results, _kind, _total: iter(results))
        self._tasks: list[str] = []

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[str]:
        """Continue contexts, each with its own settings.

        Args:
            requests: Their arguments are a context and what the harness calls
                ``generation_kwargs``.
            disable_tqdm: Ignored; `follow` shows progress.

        Returns:
            The texts, in the order of the requests.

        Raises:
            TaskError: A task needs a setting that the engine does not have.
            RequestError: A context cannot be continued.
        """
        requests = self.with_engine_settings(requests)
        encoded, shortened = [], []
        for one in requests:
            context, settings = one.args
            limit = self._prompt_limit(settings["max_gen_toks"], one.task_name)
            prompt = self.tok_encode(context) or [self.prefix_token_id]
            shortened.append(len(prompt) > limit)
            encoded.append(self._request(prompt[-limit:], settings))
        texts = [""] * len(requests)
        for result in self._results(self.engine.generate(encoded), "generate_until"):
            one = requests[result.id]
            text = texts[result.id] = self._text_of(result, one.args[1]["until"])
            self.costs[one.task_name].add(
                result,
                truncated=result.finish_reason == "length",
                shortened=shortened[result.id],
            )
            self.cache_hook.add_partial("generate_until", one.args, text)
        return texts

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Score continuations of contexts.

        Args:
            requests: Their arguments are a context and a continuation.
            disable_tqdm: Ignored.

        Returns:
            Log-likelihoods in nats, and whether greedy decoding gives the same tokens, in the
            order of the requests.
        """
        # The harness passes tokens on to `_loglikelihood_tokens`, without names of tasks.
        self._tasks = [one.task_name or "" for one in requests]
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return scores

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        tasks = self._tasks or [""] * len(requests)
        self._tasks = []
        continuations = []
        for (_, given, scored), task in zip(requests, tasks, strict=True):
            limit = self._prompt_limit(len(scored), task)
            context = tuple(given or [self.prefix_token_id])  # spaces alone are no context
            continuations.append(
                Continuation(context[-limit:], tuple(scored), task, len(context) > limit)
            )
        scores: list[tuple[float, bool]] = [Score(0.0, True)] * len(requests)
        for index, score in self._scores(continuations, "loglikelihood"):
            scores[index] = score
            texts = requests[index][0]
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, tuple(score))
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Score whole texts, in windows if they are longer than the model's positions.

        Args:
            requests: Their argument is a text.
            disable_tqdm: Ignored.

        Returns:
            Log-likelihoods in nats, in the order of the requests.
        """
        windows, owners = [], []
        for owner, one in enumerate(requests):
            for window in get_rolling_token_windows(
                self.tok_encode(one.args[0]), self.prefix_token_id, self.max_length, context_len=1
            ):
                given, scored = make_disjoint_window(window)
                windows.append(Continuation(tuple(given), tuple(scored), one.task_name or ""))
                owners.append(owner)
        num_missing, totals = Counter(owners), [0.0] * len(requests)
        for index, score in self._scores(windows, "loglikelihood_rolling"):
            owner = owners[index]
            totals[owner] += score.log_likelihood
            num_missing[owner] -= 1
            if not num_missing[owner]:
                text = requests[owner].args
                self.cache_hook.add_partial("loglikelihood_rolling", text, totals[owner])
        return totals

    def with_engine_settings(self, requests: Sequence[Instance]) -> list[Instance]:
        """Express settings of generations in the engine's terms; applied twice, it changes nothing.

        A request that samples gets a random seed of its own, so that repeated attempts at a
        question differ and do not depend on the order in which requests are answered.

        Raises:
            TaskError: A task needs a setting that the engine does not have.
        """
        attempts: Counter[object] = Counter()
        prepared = []
        for one in requests:
            context, generation = one.args
            settings = read_settings(generation, one.task_name)
            if settings["temperature"]:
                which = one.task_name, one.doc_id, one.idx
                text = f"{self._seed} {(*which, attempts[which])}"
                seed = hashlib.blake2b(text.encode(), digest_size=6).digest()
                settings.setdefault("seed", int.from_bytes(seed))
                attempts[which] += 1
            prepared.append(replace(one, arguments=(context, settings)))
        return prepared

    def _scores(
        self, continuations: Sequence[Continuation], kind: str
    ) -> Iterator[tuple[int, Score]]:
        """Index and score of each continuation that is not empty, as they come."""
        scoring = Scoring(self.engine, continuations)
        for result in self._results(scoring.run, kind):
            branch = scoring.branches[result.id]
            self.costs[branch.task].add(result, shortened=branch.shortened)
            for index, _ in branch.ends:
                yield index, scoring.scores[index]

    def _results(self, run: Run, kind: str) -> Iterator[Result]:
        for result in self._follow(run, kind, len(run.requests)):
            if result.error is not None:
                raise RequestError(result.error)
            yield result
        self.reports[kind] = run.report

    def _prompt_limit(self, num_new: int, task: str | None) -> int:
        """The most tokens of a prompt; the last token generated or scored is not fed."""
        limit: int = self.max_length + 1 - num_new
        if limit < 1:
            msg = (
                f"task '{task}' needs {num_new} new tokens, and the model has positions for "
                f"{self.max_length + 1}, the prompt included; give a smaller --max-new-tokens"
            )
            raise RequestError(msg)
        return limit

    def _request(self, prompt: list[int], settings: Mapping[str, Any]) -> Request:
        until = settings["until"]
        own = settings.get("eos_token_id", self.engine.adapter.stop_ids)
        ends = {*own, *settings.get("stop_token_ids", ())}
        ends |= {*map(self._special_token, until), self.eot_token_id}
        return Request(
            prompt,
            settings["max_gen_toks"],
            _sampling(settings),
            # While a model thinks, line breaks and the like do not end its answer.
            () if self.think_end_token is not None else tuple(until),
            tuple(sorted(end for end in ends if end is not None)),
            min_new_tokens=settings.get("min_new_tokens"),
        )

    def _text_of(self, result: Result, until: Sequence[str]) -> str:
        tokens, think_end = list(result.tokens), self.think_end_token
        mark = self._special_token(think_end) if isinstance(think_end, str) else think_end
        if mark in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(mark) :]
        text = self.tok_decode(tokens)
        # The last token need not be a special one; then it is part of the text.
        eos = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        stop = handle_stop_sequences(list(until), eos)
        if isinstance(think_end, str):
            return str(postprocess_generated_text(text, stop, think_end))
        return str(
            postprocess_generated_text(text if think_end is None else text.lstrip(), stop, None)
        )

    def _special_token(self, text: str) -> int | None:
        """Id of a text that is a special token, which decoded texts do not show."""
        ids = self.tok_encode(text, add_special_tokens=False)
        hidden = len(ids) == 1 and not self.tok_decode(ids)
        return ids[0] if hidden else None


@register_model("kvpolicy")
class LoadedPolicyLM(PolicyLM):
    """A `PolicyLM` that the harness builds from its ``--model_args``."""

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        plan: str | None = None,
        policy: str | None = None,
        budget: int | str | None = None,
        buffer: int | None = None,
        prefill_buffer: int | None = None,
        length: int | None = None,
        dtype: str = "auto",
        device: str | None = None,
        trust_remote_code: bool = False,
        cpu_weights: CpuWeights = "plain",
        compile: bool = False,
        batch_size: int | str = "auto",
        max_batch_size: object = None,
        **options: Any,
    ) -> None:
        """Load the model and build an engine.

        Args:
            pretrained: The model, as for `kvpolicy.model.loading.load_model`.
            plan: A plan file.
            policy: Names of policies, with ``+`` between them, in place of a plan.
            budget: Budget of the plan.
            buffer: Buffer of the plan.
            prefill_buffer: Buffer of the plan while a prompt enters.
            length: Length that a budget in percent refers to.
            dtype: Precision of the model.
            device: Device of the model.
            trust_remote_code: Whether to run code that comes with the model.
            cpu_weights: Form of the model's weights, as for `load_model`.
            compile: Whether decode steps are compiled, as for `Engine`.
            batch_size: Number of slots; ``auto`` is the engine's default.
            max_batch_size: Ignored; the harness passes it to every model.
            options: As for `PolicyLM`.

        Raises:
            KVPolicyError: The model or the plan cannot be loaded.
        """
        if pretrained is None:
            msg = "model_args names no model; write for example pretrained=FOLDER"
            raise ModelError(msg)
        if (plan is None) == (policy is None):
            msg = "model_args needs either policy=NAME or plan=FILE"
            raise PlanError(msg)
        given = {
            "budget": budget,
            "buffer": buffer,
            "prefill_buffer": prefill_buffer,
            "length": length,
        }
        overrides = [
            Override(key, parse_value(str(value)), source=f"{key}={value} of model_args")
            for key, value in given.items()
            if value is not None
        ]
        if plan is not None:
            chosen = Plan.load(plan, overrides)
        else:
            stack = str(policy).split("+")
            chosen = Plan.from_dict({"stack": stack}, overrides, name="model_args")
        model, tokenizer = load_model(
            pretrained,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            cpu_weights=cpu_weights,
        )
        slots = DEFAULT_SLOTS if str(batch_size).startswith("auto") else int(batch_size)
        engine = Engine(model, tokenizer, chosen, slots=slots, compile=compile)
        super().__init__(engine, **options)


def read_settings(generation: Mapping[str, Any], task: str | None) -> dict[str, Any]:
    """Express ``generation_kwargs`` of a task in the engine's terms.

    Args:
        generation: ``until``, ``max_gen_toks`` and its other names, ``do_sample``,
            ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``seed``; ``repetition_penalty``,
            ``frequency_penalty``, ``presence_penalty``; ``min_new_tokens`` or ``min_tokens``;
            ``eos_token_id``, which replaces the model's own, and ``stop_token_ids`` beside them.
        task: Name of the task, for messages.

    Returns:
        ``until``, ``max_gen_toks``, ``temperature`` (0: greedy), ``top_k`` (0: off), ``top_p``,
        and the others if they were given.

    Raises:
        TaskError: A value is not valid, or the engine does not have the setting.
    """
    try:
        given = dict(normalize_gen_kwargs(dict(generation)))
        samples = given.pop("do_sample")
        # transformers' generate() samples at temperature 1 if a task names none.
        temperature = float(given.pop("temperature", 1.0))
        settings = {
            "until": [str(text) for text in given.pop("until") if text],
            "max_gen_toks": given.pop("max_gen_toks"),
            "temperature": temperature if samples else 0.0,
            "top_k": given.pop("top_k", 0) or 0,
            "top_p": given.pop("top_p", 1.0),
        }
        settings |= {name: given.pop(name) for name in ("seed", *_PENALTIES) if name in given}
        for name in _LEAST_TOKENS:
            if name in given:
                settings["min_new_tokens"] = given.pop(name)
        for name in ("eos_token_id", "stop_token_ids"):
            if given.get(name) is not None:
                settings[name] = _ids(given.pop(name))
        Request(
            (),
            settings["max_gen_toks"],
            _sampling(settings),
            min_new_tokens=settings.get("min_new_tokens"),
        )
    except (KVPolicyError, TypeError, ValueError) as error:
        msg = f"task '{task}' has generation_kwargs that are not valid: {error}"
        raise TaskError(msg) from error
    for key, value in given.items():
        if value != _WITHOUT_EFFECT.get(key):
            msg = (
                f"task '{task}' asks for a generation with {key}={value!r}, which the engine "
                "does not have; take it out of the task's generation_kwargs"
            )
            raise TaskError(msg)
    return settings


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    return Sampling(
        settings["temperature"],
        settings["top_k"],
        settings["top_p"],
        settings.get("seed", 0),
        **{name: settings[name] for name in _PENALTIES if settings.get(name) is not None},
    )


def _ids(given: int | Iterable[int]) -> list[int]:
    """One token id or several."""
    ids = Request((), stop_ids=given).stop_ids
    return list(ids or ())
