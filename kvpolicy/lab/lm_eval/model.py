"""A model under a plan, as lm-evaluation-harness wants one.

Generations run through the engine with continuous batching, each with its own settings.
Likelihoods come from `kvpolicy.lab.lm_eval.loglikelihood`.
Answers that a journal has are not computed again (`kvpolicy.lab.lm_eval.journal`).
Texts become tokens, and tokens texts, as with the harness's own ``hf`` model, so that answers are
the same where nothing is evicted.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_eval.models.utils import postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from kvpolicy.engine.engine import Engine
from kvpolicy.engine.request import Request
from kvpolicy.engine.results import Result, RunReport
from kvpolicy.errors import RequestError
from kvpolicy.lab.lm_eval.costs import Cost
from kvpolicy.lab.lm_eval.journal import Journal
from kvpolicy.lab.lm_eval.loglikelihood import Continuation, Score, Scoring
from kvpolicy.lab.lm_eval.settings import Settings, read_settings, seed_of
from kvpolicy.lab.lm_eval.tokens import TokenLM
from kvpolicy.lab.lm_eval.work import Generating, Work, recalled, results_of
from kvpolicy.lab.models import fingerprint

# Looks on as results come: what is done, how many there will be, and how many of them, the first,
# are known already.
Follow = Callable[[Iterable[Result], str, int, int], Iterator[Result]]


def _unseen(
    results: Iterable[Result], _what: str, _total: int, _num_known: int
) -> Iterator[Result]:
    yield from results


class PolicyLM(TokenLM):
    """A model under a plan.

    Attributes:
        engine: The engine.
        tokenizer: Its tokenizer.
        costs: What each task has cost so far.
        reports: What each kind of request has cost so far, without what the journal had.
        num_recalled: Answers that the journal had.
        identity: Digest of the plan and fingerprint of the model.
        journal: Answers so far.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        seed: int = 0,
        think_end: str | None = None,
        follow: Follow = _unseen,
        journal: Path | None = None,
    ) -> None:
        """Put the harness's questions to an engine.

        Args:
            engine: An engine with a tokenizer.
            seed: Of the drawing, where a task samples.
            think_end: The text that ends a model's thinking. What comes before it is no part of
                the answer, and no stop string is looked for in it.
            follow: Is given the results as they come, and yields them.
            journal: File in which answers are kept as they come, and are looked for first; of
                this plan, model and version of kvpolicy only.

        Raises:
            OutputError: The file cannot be written, or holds something else.
        """
        super().__init__(engine.tokenizer)
        self.engine = engine
        self.costs: dict[str, Cost] = defaultdict(Cost)
        self.reports: dict[str, RunReport] = {}
        self.num_recalled = 0
        self.identity = {
            "plan_digest": engine.plan.digest(),
            "model_fingerprint": fingerprint(engine.adapter.model),
        }
        self.journal = Journal(journal, {**self.identity, "kvpolicy": version("kvpolicy")})
        self._seed, self._think_end, self._follow = seed, think_end, follow

    # What the harness asks

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Continue contexts, each with its own settings.

        Args:
            requests: Instances of the harness, whose arguments are a context and settings.
            disable_tqdm: Idle; `follow` shows progress.

        Returns:
            The texts, in the order of the requests.

        Raises:
            TaskError: The engine does not have what a task asks for.
            RequestError: A context cannot be continued.
        """
        tries: Counter[object] = Counter()
        asked, all_settings, cut = [], [], []
        for one in requests:
            context, generation = one.args
            settings = read_settings(generation, one.task_name)
            which = one.task_name, one.doc_id, one.idx
            prompt, is_cut = self._prompt(context, settings.max_new_tokens, one.task_name)
            asked.append(self._request(prompt, settings, seed_of(self._seed, *which, tries[which])))
            tries[which] += 1
            all_settings.append(settings)
            cut.append(is_cut)
        texts = [""] * len(asked)
        for result in self._serve(Generating(self.engine, asked), "generate_until"):
            texts[result.id] = self._answer(result, all_settings[result.id])
            self.costs[requests[result.id].task_name].add(
                result, cut_off=result.finish_reason == "length", shortened=cut[result.id]
            )
        return texts

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[Score]:
        """Score continuations of contexts.

        Args:
            requests: Instances of the harness, whose arguments are a context and a continuation.
            disable_tqdm: Idle.

        Returns:
            Log-likelihoods, and whether greedy decoding would say the same, in the order of the
            requests.
        """
        pairs = [self.split(*one.args) for one in requests]
        names = [one.task_name or "" for one in requests]
        return self._scores(pairs, names, "loglikelihood")

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = True
    ) -> list[float]:
        """Score whole texts, in windows if they are longer than the model's positions.

        Args:
            requests: Instances of the harness, whose argument is a text.
            disable_tqdm: Idle.

        Returns:
            Log-likelihoods, in the order of the requests.
        """
        windows, owners = [], []
        for number, one in enumerate(requests):
            for window in get_rolling_token_windows(
                self.tok_encode(one.args[0]), self.prefix_token_id, self.max_length, context_len=1
            ):
                windows.append(make_disjoint_window(window))
                owners.append(number)
        names = [requests[owner].task_name or "" for owner in owners]
        totals = [0.0] * len(requests)
        for owner, score in zip(
            owners, self._scores(windows, names, "loglikelihood_rolling"), strict=True
        ):
            totals[owner] += score.log_likelihood
        return totals

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[Score]:
        """The harness's door for tokens."""
        return self._scores(
            [(given, scored) for _, given, scored in requests], [""] * len(requests), "tokens"
        )

    # Requests and answers

    @property
    def max_length(self) -> int:
        """Tokens that can be fed; the engine counts the one drawn last among the positions, too."""
        return self.engine.adapter.max_positions - 1

    def _prompt(self, context: str, max_new_tokens: int, task: str) -> tuple[list[int], bool]:
        """Tokens of a context, less its beginning if they are too many, and whether they are."""
        num_positions = self.engine.adapter.max_positions
        room = num_positions - max_new_tokens
        if room < 1:
            msg = (
                f"task '{task}' wants up to {max_new_tokens} new tokens, and the model has "
                f"positions for {num_positions}, the prompt included; "
                "give a smaller --max-new-tokens"
            )
            raise RequestError(msg)
        ids = self.tok_encode(context) or [self.prefix_token_id]
        return ids[-room:], len(ids) > room

    def _request(self, prompt: list[int], settings: Settings, seed: int) -> Request:
        marks = [self.eot_token_id, *map(self.special_token, settings.until)]
        ends = {*self.engine.adapter.stop_ids, *(mark for mark in marks if mark is not None)}
        # While a model thinks, line breaks and the like do not end its answer.
        stop = () if self._think_end else settings.until
        return Request(
            prompt,
            settings.max_new_tokens,
            settings.sampling_with(seed),
            stop,
            tuple(sorted(ends)),
        )

    def _answer(self, result: Result, settings: Settings) -> str:
        tokens, think_end = list(result.tokens), self._think_end
        mark = None if think_end is None else self.special_token(think_end)
        if mark in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(mark) :]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        until = list(settings.until)
        if self.eot_token_id is not None:  # it need not be a special token
            until.append(self.tokenizer.decode([self.eot_token_id]))
        return str(postprocess_generated_text(text, until, think_end))

    # The engine

    def _scores(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], names: Sequence[str], what: str
    ) -> list[Score]:
        continuations = []
        for (given, scored), name in zip(pairs, names, strict=True):
            if len(scored) > self.max_length:
                msg = (
                    f"task '{name}' asks how likely {len(scored)} tokens are at once; the model "
                    f"has positions for {self.max_length}"
                )
                raise RequestError(msg)
            room = self.max_length + 1 - len(scored)
            continuations.append(Continuation(tuple(given)[-room:], tuple(scored), name))
        scoring = Scoring(self.engine, continuations)
        for result in self._serve(scoring, what):
            branch = scoring.branches[result.id]
            shortened = any(len(pairs[i][0]) > len(branch.given) for i, _ in branch.ends)
            self.costs[branch.task].add(result, shortened=shortened)
        return scoring.scores

    def _serve(self, work: Work, what: str) -> Iterator[Result]:
        known = recalled(work, self.journal)
        self.num_recalled += len(known)

        def note(report: RunReport) -> None:
            self.reports[what] = report

        results = results_of(work, self.journal, known, note)
        yield from self._follow(results, what, len(work.keys), len(known))
