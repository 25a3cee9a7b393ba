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
from typing import Any, Self

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
from kvpolicy.engine.request import Request, Sampling
from kvpolicy.engine.results import Result, RunReport
from kvpolicy.errors import KVPolicyError, ModelError, PlanError, RequestError, TaskError
from kvpolicy.lab.lm_eval.loglikelihood import Continuation, Score, Scoring
from kvpolicy.lab.models import fingerprint
from kvpolicy.model.loading import load_model
from kvpolicy.plan.plan import Plan

# Passes results on as they come, to show progress; also given: the kind of request, and how many
# results there will be.
Follow = Callable[[Iterable[Result], str, int], Iterator[Result]]

_LOADING_OPTIONS = ("dtype", "device", "trust_remote_code")
_PLAN_OPTIONS = ("budget", "buffer", "length")
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
        peak_bytes: The most bytes of keys and values one sequence held, summed over layers.
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
        """Count one sequence.

        Args:
            result: Its result.
            truncated: Whether the generation reached the maximum of new tokens.
            shortened: Whether its prompt lost its beginning.
        """
        self.num_sequences += 1
        self.prompt_tokens += result.prompt_len
        self.new_tokens += len(result.tokens)
        self.num_cut_off += truncated
        self.num_shortened += shortened
        self.compactions += result.compactions
        self.rows_evicted += result.rows_evicted
        self.peak_rows = max(self.peak_rows, result.peak_rows)
        self.peak_bytes = max(self.peak_bytes, result.peak_bytes)


@register_model("kvpolicy")
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
            "model_fingerprint": fingerprint(model),
        }
        self._seed = seed
        self._follow = follow or (lambda results, _kind, _total: iter(results))
        self._tasks: list[str] = []

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> Self:
        """As `create_from_arg_obj`, from ``key=value,...``."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> Self:
        """Build model and engine from what the harness calls ``model_args``.

        Args:
            arg_dict: ``pretrained``, ``dtype``, ``device`` and ``trust_remote_code`` choose the
                model; ``plan`` (a file) or ``policy`` (names with ``+`` between them), with
                ``budget``, ``buffer`` and ``length``, the plan; the rest are arguments of
                `PolicyLM`.
            additional_config: ``batch_size`` is the number of slots (``auto``: the engine's
                default), ``device``.

        Raises:
            KVPolicyError: The model or the plan cannot be loaded.
        """
        given = {k: v for k, v in (additional_config or {}).items() if v is not None}
        options = {**arg_dict, **given}
        options.pop("max_batch_size", None)
        batch_size = str(options.pop("batch_size", "auto"))
        plan = _plan_of(options)
        loading = {key: options.pop(key) for key in _LOADING_OPTIONS if key in options}
        if "pretrained" not in options:
            msg = "model_args names no model; write for example pretrained=FOLDER"
            raise ModelError(msg)
        model, tokenizer = load_model(options.pop("pretrained"), **loading)
        slots = DEFAULT_SLOTS if batch_size.startswith("auto") else int(batch_size)
        return cls(Engine(model, tokenizer, plan, slots=slots), **options)

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
            ids = self.tok_encode(one.args[0])
            for window in get_rolling_token_windows(
                ids, self.prefix_token_id, self.max_length, context_len=1
            ):
                given, scored = make_disjoint_window(window)
                windows.append(Continuation(tuple(given), tuple(scored), one.task_name or ""))
                owners.append(owner)
        missing, totals = Counter(owners), [0.0] * len(requests)
        for index, score in self._scores(windows, "loglikelihood_rolling"):
            owner = owners[index]
            totals[owner] += score.log_likelihood
            missing[owner] -= 1
            if not missing[owner]:
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
                seed = _seed_of(self._seed, *which, attempts[which])
                settings.setdefault("seed", seed)
                attempts[which] += 1
            prepared.append(replace(one, arguments=(context, settings)))
        return prepared

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        tasks = self._tasks or [""] * len(requests)
        self._tasks = []
        continuations = []
        for (_, given, scored), task in zip(requests, tasks, strict=True):
            limit = self._prompt_limit(len(scored), task)
            context = tuple(given or [self.prefix_token_id])  # spaces alone are no context
            continuations.append(Continuation(context[-limit:], tuple(scored), task))
        scores: list[tuple[float, bool]] = [Score(0.0, True)] * len(requests)
        shortened = {
            index
            for index, (request, one) in enumerate(zip(requests, continuations, strict=True))
            if len(request[1]) > len(one.given)
        }
        for index, score in self._scores(continuations, "loglikelihood", shortened):
            scores[index] = score
            key = requests[index][0]
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, tuple(score))
        return scores

    def _scores(
        self,
        continuations: Sequence[Continuation],
        kind: str,
        shortened: "set[int] | frozenset[int]" = frozenset(),
    ) -> Iterator[tuple[int, Score]]:
        """Index and score of each continuation that is not empty, as they come."""
        scoring = Scoring(self.engine, continuations)
        for result in self._results(scoring.run, kind):
            branch = scoring.branches[result.id]
            indices = [index for index, _ in branch.ends]
            self.costs[branch.task].add(result, shortened=not shortened.isdisjoint(indices))
            for index in indices:
                yield index, scoring.scores[index]

    def _results(self, run: Run, kind: str) -> Iterator[Result]:
        for result in self._follow(run, kind, len(run.requests)):
            self.reports[kind] = run.report
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
        ends = {*self.engine.adapter.stop_ids, *map(self._special_token, until), self.eot_token_id}
        sampling = Sampling(
            settings["temperature"],
            settings["top_k"],
            settings["top_p"],
            settings.get("seed", 0),
        )
        return Request(
            prompt,
            settings["max_gen_toks"],
            sampling,
            # While a model thinks, line breaks and the like do not end its answer.
            () if self.think_end_token is not None else tuple(until),
            tuple(sorted(end for end in ends if end is not None)),
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
        text = text if think_end is None else text.lstrip()
        return str(postprocess_generated_text(text, stop, None))

    def _special_token(self, text: str) -> int | None:
        """Id of a text that is a special token, which decoded texts do not show."""
        ids = self.tok_encode(text, add_special_tokens=False)
        hidden = len(ids) == 1 and not self.tok_decode(ids)
        return ids[0] if hidden else None


def read_settings(generation: Mapping[str, Any], task: str | None) -> dict[str, Any]:
    """Express ``generation_kwargs`` of a task in the engine's terms.

    Args:
        generation: ``until``, ``max_gen_toks`` and its other names, ``do_sample``,
            ``temperature``, ``top_p``, ``top_k``, ``seed``.
        task: Name of the task, for messages.

    Returns:
        ``until``, ``max_gen_toks``, ``temperature`` (0: greedy), ``top_k`` (0: off), ``top_p``,
        and ``seed`` if it was given.

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
        if "seed" in given:
            settings["seed"] = given.pop("seed")
        Sampling(*(settings[key] for key in ("temperature", "top_k", "top_p")))
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


def _plan_of(options: dict[str, Any]) -> Plan:
    """Take the plan out of ``model_args``."""
    numbers = [f"{key}={options.pop(key)}" for key in _PLAN_OPTIONS if key in options]
    file, policy = options.pop("plan", None), options.pop("policy", None)
    if (file is None) == (policy is None):
        msg = "model_args needs either policy=NAME or plan=FILE"
        raise PlanError(msg)
    if file is not None:
        return Plan.load(file, numbers)
    return Plan.from_dict({"stack": str(policy).split("+")}, numbers, name="model_args")


def _seed_of(seed: int, *which: object) -> int:
    text = f"{seed} {which}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())
