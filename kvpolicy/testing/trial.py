"""A trial: an engine completes requests with the policy; each request is repeated alone."""

import gc
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.engine.engine import Engine, Run
from kvpolicy.engine.requests.request import Request
from kvpolicy.engine.requests.results import Result
from kvpolicy.engine.reuse.store import PrefixStore
from kvpolicy.engine.snapshots.snapshot import SequenceSnapshot
from kvpolicy.errors import (
    HookError,
    HookResultError,
    KVPolicyError,
    ModelError,
    SnapshotError,
)
from kvpolicy.testing.cases import Environment, PolicyFactory, Setup, plan_of
from kvpolicy.testing.clauses import ConformanceError, Example
from kvpolicy.testing.monitor import CompactedRows, Monitor
from kvpolicy.testing.toy_images import NUM_TOKENS, ShowImages

_MAX_CHUNK = 512

# Looking for leaks may need a garbage collection, and is done in some trials only.
_LEAKS_EVERY = 16

# Cutting a sequence in two takes as long as running it alone, and is done in some trials only.
_CUTS_EVERY = 2

# Prompts are short, and so are the blocks that they share.
_MOST_BLOCK_TOKENS = 4
_STORE_BYTES = 2**30

# Rows whose scores differ by less, relative to the largest score, may change places: batches of
# different shapes sum in different orders.
_ROUNDING = 1e-4

Actions = list[tuple[str, dict[str, int]]]


@attrs.frozen
class Arrival:
    """A request: the number of its prompt, prompt tokens, and new tokens at most."""

    number: int
    prompt: int
    new: int


@attrs.frozen(eq=False)
class RequestTrace:
    """Results of a request: its tokens, and the rows that stay at each compaction."""

    tokens: tuple[int, ...]
    compactions: Sequence[CompactedRows]
    cancelled: bool = False


class BatchDependenceError(ConformanceError):
    """A request has different tokens or rows when run alone; `classify` finds the clause.

    Attributes:
        arrival: The request.
    """

    def __init__(self, arrival: Arrival, expected: str, came: str) -> None:
        super().__init__("neighbours", expected, came)
        self.arrival = arrival


class CutError(BatchDependenceError):
    """A request has different tokens or rows when it is cut and resumed."""


class ReuseError(BatchDependenceError):
    """A request has different tokens or rows when it goes on with a beginning that is stored."""


class Trial:
    """One policy in one engine: requests arrive, are decoded for some steps, and cancelled.

    ``finish`` completes the requests that are left and compares each with the same request alone,
    with a new policy. Whatever breaks the contract raises `ConformanceError`.

        trial = Trial(MyPolicy, budget=4, buffer=2, slots=2)
        trial.arrive(prompt=9, new=5)
        trial.go(3)
        trial.finish()

    Attributes:
        setup: Its sizes.
        actions: The calls of its methods so far.
        checked: Counts the checks of each clause.
    """

    def __init__(
        self,
        policy: Any,
        knobs: dict[str, Any] | None = None,
        *,
        environment: Environment | None = None,
        checked: Counter[str] | None = None,
        **setup: Any,
    ) -> None:
        """Set up an engine.

        Args:
            policy: A policy class, a function that builds one, or the name of a policy.
            knobs: Knobs of a policy given by name.
            environment: Tokenizer and model sizes.
            checked: Counts the checks of each clause.
            setup: The fields of `Setup`.
        """
        self.factory = PolicyFactory.of(policy, knobs)
        self.environment = Environment.of() if environment is None else environment
        self.setup = Setup(**setup)
        self.actions: Actions = []
        self.checked: Counter[str] = Counter() if checked is None else checked
        self._model = self.environment.model(self.setup)
        self._monitor, self._engine = self._new_engine(self.setup, self.checked)
        self._run: Run | None = None
        self._queue: list[Arrival] = []
        self._requests: list[Arrival] = []  # of the current run
        self._open: set[int] = set()
        self._finished: list[tuple[Arrival, RequestTrace]] = []
        self._compactions: list[list[CompactedRows]] = []
        self._memories: list[weakref.ref[Any]] = []
        self._num_arrived = 0

    @property
    def policy(self) -> object:
        """The policy of the engine."""
        return self._monitor.policy

    @property
    def block_tokens(self) -> int:
        """Tokens of the blocks by which prompts share their beginnings."""
        return 1 + self.setup.seed % _MOST_BLOCK_TOKENS

    @property
    def _replaces_rows(self) -> bool:
        """Whether a policy may store other keys and values than those of the model."""
        return any(stack.implements("evict") for stack in self._engine.stacks)

    @property
    def unanswered(self) -> list[int]:
        """Requests of the current run without a result, in order of arrival."""
        return sorted(self._open)

    def arrive(self, *, prompt: int, new: int) -> None:
        """Add a request with ``prompt`` tokens, for at most ``new`` new ones.

        It is part of the run that starts with the next ``go``, with all other waiting requests.
        """
        self.actions.append(("arrive", {"prompt": prompt, "new": new}))
        self._queue.append(Arrival(self._num_arrived, prompt, new))
        self._num_arrived += 1

    def go(self, steps: int) -> None:
        """Run so many engine steps."""
        self.actions.append(("go", {"steps": steps}))
        self._start()
        for _ in range(steps):
            if self._run is not None:
                self._step()

    def cancel(self, request: int) -> None:
        """Cancel a request of the current run, counted from 0."""
        self.actions.append(("cancel", {"request": request}))
        if request in self.unanswered:
            assert self._run is not None
            self._run.cancel(request)

    def finish(self) -> None:
        """Complete the requests that are left, and compare each with itself alone."""
        self.actions.append(("finish", {}))
        while self._queue or self._run is not None:
            self._start()
            self._step()
        self.checked.update(self._sizes())
        if self.setup.dtype == "float64":  # with less precision, rounding would decide
            # In reversed order, so that a policy with state does not see the same sequence.
            alone = self.alone([arrival for arrival, _ in reversed(self._finished)])
            for (arrival, trace), other in zip(self._finished, reversed(alone), strict=True):
                self._compare(arrival, trace, other)
            if self.setup.seed % _CUTS_EVERY == 0:
                self._cut_one(list(reversed(alone)))
                self._reuse_one(list(reversed(alone)))

    def alone(
        self,
        arrivals: Sequence[Arrival],
        *,
        copies: int = 1,
        chunk: int = _MAX_CHUNK,
        folds: bool = False,
    ) -> list[RequestTrace]:
        """Run requests one after the other with a new policy.

        Args:
            arrivals: The requests.
            copies: Copies of each request in a batch.
            chunk: The most tokens of a prompt in one forward.
            folds: Whether layers that the policies treat alike are asked together.
        """
        setup = attrs.evolve(self.setup, slots=copies, chunk=chunk)
        monitor, engine = self._new_engine(setup, Counter())
        for stack in engine.stacks:
            stack.layers_alike &= folds
        traces = []
        for arrival in arrivals:
            run = engine.generate([self._request(arrival)] * copies)
            compactions = self._follow(monitor, run, [arrival] * copies)
            results = zip(run.results(), compactions, strict=True)
            traces += [RequestTrace(result.tokens, kept) for result, kept in results]
        return traces

    def cut(self, arrival: Arrival, num_tokens: int) -> RequestTrace:
        """Run a request, take it out after some tokens, write, read and resume it.

        Raises:
            SnapshotError: If it cannot be taken, written or resumed.
        """
        setup = attrs.evolve(self.setup, slots=1)
        monitor, engine = self._new_engine(setup, Counter())
        for stack in engine.stacks:
            stack.layers_alike = False
        request = self._request(arrival)
        run = engine.generate([request])
        (compactions,) = self._follow(monitor, run, [arrival])
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            tokens += [token for _, token in run.step().tokens]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "sequence.safetensors"
            run.snapshot(0).save(path)
            snapshot = SequenceSnapshot.load(path)
        rest = attrs.evolve(
            request, prompt=(), max_new_tokens=arrival.new - len(tokens), resume=snapshot
        )
        resumed = engine.generate([rest])
        (more,) = self._follow(monitor, resumed, [arrival])
        (result,) = resumed.results()
        return RequestTrace((*tokens, *result.tokens), [*compactions, *more])

    def reuse(self, arrival: Arrival) -> tuple[RequestTrace, int]:
        """Run a request whose prompt begins as that of another one, which is stored.

        Returns:
            What it does, and how many tokens it has not computed.
        """
        setup, request = attrs.evolve(self.setup, slots=1), self._request(arrival)
        block = self.block_tokens
        store = PrefixStore(_STORE_BYTES, block_tokens=block, conversations=False)
        monitor, engine = self._new_engine(setup, Counter(), store)
        for stack in engine.stacks:
            stack.layers_alike = False
        prompt = self._prompt(arrival)
        other = [*prompt[:-1], *prompt[: 2 + arrival.number % 3]]  # a longer one
        engine.generate([attrs.evolve(request, prompt=other)]).results()
        run = engine.generate([request])
        (compactions,) = self._follow(monitor, run, [arrival])
        (result,) = run.results()
        return RequestTrace(result.tokens, compactions), result.reused_tokens

    def repeat(
        self, change: Callable[[Actions], Actions] = list, **sizes: Any
    ) -> ConformanceError | None:
        """Run the same actions in a new trial, and return its error.

        Args:
            change: Applied to the actions before.
            sizes: Fields of `Setup` that differ.
        """
        setup = attrs.asdict(self.setup) | sizes
        trial = Trial(self.factory, environment=self.environment, **setup)
        try:
            for name, arguments in change(self.actions):
                if name != "finish":
                    getattr(trial, name)(**arguments)
            trial.finish()
        except ConformanceError as error:
            return error
        return None

    def source(self) -> str:
        """Lines of Python that run this trial to its end."""
        lines = ["from kvpolicy.testing import Trial", ""]
        lines.append(f"trial = Trial({self.factory.source}, {self.setup.source()})")
        for name, arguments in self.actions:
            values = ", ".join(f"{key}={value}" for key, value in arguments.items())
            lines.append(f"trial.{name}({values})")
        if not self.actions or self.actions[-1][0] != "finish":
            lines.append("trial.finish()")
        return "\n".join(lines)

    def _new_engine(
        self, setup: Setup, checked: Counter[str], prefix_store: PrefixStore | None = None
    ) -> tuple[Monitor, Engine]:
        """An engine with a new policy, and its monitor."""
        try:
            policy = self.factory.build()
        except KVPolicyError as error:
            expected = "a new policy each time"
            raise ConformanceError(clause="building", expected=expected, came=str(error)) from error
        monitor = Monitor(policy, self.factory.hooks, checked)
        layers = self._model.attention_layers
        plan = plan_of(monitor.policy, self.factory.hooks, setup, layers)
        tokenizer = self.environment.tokenizer
        try:
            engine = Engine(
                self._model,
                tokenizer,
                plan,
                slots=setup.slots,
                chunk=setup.chunk,
                prefix_store=prefix_store,
                extensions=[self._show_images] if self._model.image_ids else [],
            )
        except HookError as error:  # of `bind`
            wrong = isinstance(error, HookResultError)
            clause, expected = ("weights", "weights as they were") if wrong else ("answers", "any")
            raise ConformanceError(clause, expected, str(error)) from error
        checked["weights"] += "bind" in self.factory.hooks
        for stack in dict.fromkeys([*engine.stacks, engine.scheduling]):
            monitor.attach(stack)
        return monitor, engine

    def _prompt(self, arrival: Arrival) -> list[int]:
        return self.environment.prompt(self.setup, arrival.number, arrival.prompt)

    def _images(self, arrival: Arrival) -> list[int]:
        """Positions of the tokens of images in a prompt."""
        ids = self._model.image_ids
        return [place for place, token in enumerate(self._prompt(arrival)) if token in ids]

    def _request(self, arrival: Arrival) -> Request:
        return Request(self._prompt(arrival), max_new_tokens=arrival.new, stop_ids=())

    def _follow(
        self, monitor: Monitor, run: Run, arrivals: Sequence[Arrival]
    ) -> list[list[CompactedRows]]:
        """The compactions of the requests of a run, which grow with them."""
        pairs = zip(run.waiting, arrivals, strict=True)
        return [monitor.follow(seq.memory, self._images(arrival)) for seq, arrival in pairs]

    def _show_images(self) -> ShowImages:
        # The same for a request alone, in whatever chunks.
        fits = min(self.setup.chunk, self.setup.buffer) >= NUM_TOKENS
        return ShowImages(self._model, both_ways=fits and self.setup.seed % 2 == 1)

    def _cut_one(self, alone: list[RequestTrace]) -> None:
        """Compare a request that is cut and resumed with the same request alone."""
        whole = [
            (arrival, other)
            for (arrival, trace), other in zip(self._finished, alone, strict=True)
            if not trace.cancelled and len(other.tokens) > 2
        ]
        for arrival, other in whole[:1]:
            self.checked["snapshots"] += 1
            # The first step brings two tokens.
            after = 2 + (self.setup.seed + arrival.number) % (len(other.tokens) - 2)
            try:
                trace = self.cut(arrival, after)
            except SnapshotError as error:
                expected = "a sequence that can be taken out, written and resumed"
                came = str(error)
                raise ConformanceError("snapshots", expected, came) from error  # noqa: EM101
            difference = find_difference(trace, other)
            if difference is not None:
                expected, came = difference
                raise CutError(arrival, expected, f"{came}, cut after {after} new tokens")

    def _reuse_one(self, alone: list[RequestTrace]) -> None:
        """Compare a request that goes on with a stored beginning with the same request alone."""
        if not all(one.cuts_prompts for stack in self._engine.stacks for one in stack.declared):
            return
        whole = [
            (arrival, other)
            for (arrival, trace), other in zip(self._finished, alone, strict=True)
            # A store goes by tokens, and serves an engine, whose requests have no images.
            if not trace.cancelled and arrival.prompt > 1 and not self._images(arrival)
        ]
        for arrival, other in whole[:1]:
            try:
                trace, num_reused = self.reuse(arrival)
            except ConformanceError:  # of the other prompt: found where it is part of a trial
                return
            self.checked["prefixes"] += num_reused > 0
            compactions = [one for one in other.compactions if one.seq_len >= num_reused]
            expected = attrs.evolve(other, compactions=compactions)
            difference = find_difference(trace, expected)
            if difference is not None:
                after = f", after {num_reused} tokens of another prompt"
                raise ReuseError(arrival, difference[0], difference[1] + after)

    def _start(self) -> None:
        """Start a run with the waiting requests, if none is in progress."""
        if self._run is not None or not self._queue:
            return
        self._requests, self._queue = self._queue, []
        self._open = set(range(len(self._requests)))
        self._run = self._engine.generate([self._request(one) for one in self._requests])
        self._compactions = self._follow(self._monitor, self._run, self._requests)
        self._memories = [weakref.ref(sequence.memory) for sequence in self._run.waiting]
        if self._finished:
            self.checked["memory"] += 1

    def _step(self) -> None:
        assert self._run is not None
        for result in self._run.step().results:
            self._collect(result)
        _check_cache(self._run.cache)
        if self.setup.model == "latent" and not self._replaces_rows:
            _check_latents(self._run.cache)
        if self._monitor.chooses:
            self.checked.update(["budget", "order"])
        if self._run.done:
            self._run = None
            if self.setup.seed % _LEAKS_EVERY == 0:
                self._check_leaks()

    def _collect(self, result: Result) -> None:
        is_cancelled = result.finish_reason == "cancelled"
        trace = RequestTrace(result.tokens, self._compactions[result.id], is_cancelled)
        self._finished.append((self._requests[result.id], trace))
        self._open.remove(result.id)
        self.checked["cancellation"] += is_cancelled

    def _check_leaks(self) -> None:
        """Check that nothing holds the memory of sequences that have ended."""
        self.checked["memory"] += 1
        if any(memory() is not None for memory in self._memories):
            gc.collect()
        held = sum(memory() is not None for memory in self._memories)
        if held:
            expected = "no reference to the memory of a sequence that has ended"
            came = f"references to the memory of {held} such sequences"
            raise ConformanceError(clause="memory", expected=expected, came=came)

    def _sizes(self) -> list[str]:
        """The clauses about sizes and dtypes that this trial checks."""
        setup = self.setup
        edges = {1, setup.budget, setup.budget + 1}
        is_small = 1 in (setup.kv_heads, setup.slots)
        is_small |= any(arrival.prompt in edges for arrival, _ in self._finished)
        found = {
            "sizes": is_small,
            "grouped_queries": setup.group > 1 or setup.readers > 1,
            "prompts": setup.prompt == "keep",
            setup.model: setup.model != "attention",
            "precision": setup.dtype != "float32",
        }
        return [clause for clause, holds in found.items() if holds]

    def _compare(self, arrival: Arrival, trace: RequestTrace, alone: RequestTrace) -> None:
        compared = ["determinism", "neighbours"]
        compared += ["chunks"] if self.setup.chunk < arrival.prompt else []
        compared += ["slots"] if self.setup.slots > 1 else []
        compared += ["layers"] if self._monitor.has_folded else []
        self.checked.update(compared)
        difference = find_difference(trace, alone)
        if difference is not None:
            raise BatchDependenceError(arrival, *difference)


def find_difference(trace: RequestTrace, alone: RequestTrace) -> tuple[str, str] | None:
    """The first difference to the same request alone: expected and actual behaviour."""
    pairs = zip(_by_layer(trace.compactions), _by_layer(alone.compactions), strict=False)
    for came, expected in pairs:
        place = f"in layer {expected.layer_idx} after {expected.seq_len} tokens"
        if (came.layer_idx, came.seq_len) != (expected.layer_idx, expected.seq_len):
            other = f"in layer {came.layer_idx} after {came.seq_len} tokens"
            return f"a compaction {place}", f"one {other}"
        if not torch.equal(came.positions, expected.positions):
            if _is_rounding(came, expected):
                return None
            kept = f"the positions {expected.positions.tolist()} stay {place}"
            return f"{kept}, as when it is run alone", f"{came.positions.tolist()}"
    num, num_alone = len(trace.compactions), len(alone.compactions)
    if not trace.cancelled and num != num_alone:
        return f"{num_alone} compactions, as when it is run alone", f"{num}"
    expected_tokens = alone.tokens[: len(trace.tokens)] if trace.cancelled else alone.tokens
    if trace.tokens != expected_tokens:
        return f"tokens {list(alone.tokens)}, as when it is run alone", f"{list(trace.tokens)}"
    return None


def _by_layer(compactions: Sequence[CompactedRows]) -> list[CompactedRows]:
    """Compactions of one sequence, those after the same token by layer."""
    return sorted(compactions, key=lambda one: (one.seq_len, one.layer_idx))


def _is_rounding(came: CompactedRows, expected: CompactedRows) -> bool:
    """Whether only rows of almost equal scores changed places."""
    if not torch.equal(came.before, expected.before):
        return False
    a, b = came.scores.double(), expected.scores.double()
    if torch.equal(a, b) or not torch.equal(a.isinf(), b.isinf()):
        return False
    a, b = a.masked_fill(a.isinf(), 0), b.masked_fill(b.isinf(), 0)
    largest = float(torch.maximum(a.abs().max(), b.abs().max()))
    return bool(((a - b).abs() <= _ROUNDING * largest).all())


def _check_cache(cache: KVCache) -> None:
    """Check that slabs are not over capacity, and that their rows are in order of position."""
    for layer in cache.layers_with_rows:
        layer_idx = layer.index
        for slot in range(cache.num_slots):
            num = int(cache.rows[layer_idx, slot])
            if num > cache.capacity[layer_idx]:
                expected = f"at most {cache.capacity[layer_idx]} rows in layer {layer_idx}"
                raise ConformanceError(clause="budget", expected=expected, came=f"{num} rows")
            heads = layer.held(slot, layer.arena.positions)
            num_filled = int((layer.positions[slot] >= 0).sum())
            if num_filled != sum(map(len, heads)) or not all(map(_is_ordered, heads)):
                expected = f"{num} positions that rise in layer {layer_idx}, then -1"
                came = f"{layer.positions[slot].tolist()}"
                raise ConformanceError(clause="order", expected=expected, came=came)


def _check_latents(cache: KVCache) -> None:
    """Check that values of rows are the part of their keys that the model has made them of."""
    for layer in cache.layers_with_rows:
        for slot in range(cache.num_slots):
            keys = layer.held(slot, layer.arena.keys)
            values = layer.held(slot, layer.arena.values)
            parts = [rows[:, : layer.shape.value_dim] for rows in keys]
            if not all(map(torch.equal, values, parts)):
                expected = f"values that are a part of their keys in layer {layer.index}"
                raise ConformanceError("latent", expected, came="others")  # noqa: EM101


def _is_ordered(positions: Tensor) -> bool:
    return bool((positions.diff() > 0).all() and (positions >= 0).all())


# The clause of a failed trial


def refusal(error: ConformanceError) -> str | None:
    """The sentence in which a model refuses what a hook wants; ``None``: it is another error."""
    cause = error.__cause__
    return f"refused: {cause}" if isinstance(cause, ModelError) else None


def explain(trial: Trial, error: ConformanceError) -> ConformanceError:
    """The same error with its clause, the policy, and the trial as an example."""
    clause = classify(trial, error)
    example = Example(trial.setup.source(), trial.source())
    return ConformanceError(clause, error.expected, error.came, trial.factory.name, example)


def classify(trial: Trial, error: ConformanceError) -> str:
    """The clause that a failed trial breaks, found by repeating it with other settings."""
    setup = trial.setup
    in_hook = error.clause in ("answers", "nan")
    if in_hook and setup.dtype != "float32" and trial.repeat(dtype="float32") is None:
        return "precision"
    is_grouped = max(setup.group, setup.readers) > 1
    if in_hook and is_grouped and trial.repeat(group=1, readers=1) is None:
        return "grouped_queries"
    if in_hook and setup.prompt == "keep" and trial.repeat(prompt="evict") is None:
        return "prompts"
    if setup.model != "attention" and _passes_with_attention(trial):
        return setup.model
    if isinstance(error, BatchDependenceError):
        return _classify_dependence(trial, error)
    larger = {
        "budget": setup.budget + 8,
        "buffer": setup.buffer + 4,
        "kv_heads": setup.kv_heads + 1,
        "head_dim": 8,
        "slots": 2 * setup.slots,
    }
    if error.clause == "answers" and trial.repeat(_with_long_pairs, **larger) is None:
        return "sizes"
    return error.clause


def _passes_with_attention(trial: Trial) -> bool:
    """Whether a trial passes if all layers of the model have attention, with several seeds.

    Rows that stay depend on the model, and a defect of any may show with few of them. These seeds
    cut and reuse the same sequences as that of the trial.
    """
    seeds = range(trial.setup.seed, trial.setup.seed + 4 * _LEAKS_EVERY, _LEAKS_EVERY)
    return all(trial.repeat(model="attention", seed=seed) is None for seed in seeds)


def _classify_dependence(trial: Trial, error: BatchDependenceError) -> str:
    """The clause of a request that differs from itself alone."""
    arrival = error.arrival
    (first,) = trial.alone([arrival])

    def differs(times: int = 1, **options: Any) -> bool:
        again = trial.alone([arrival] * times, **options)
        return any(find_difference(trace, first) for trace in again)

    if differs():
        return "determinism"
    if differs(times=3):
        return "memory"
    if isinstance(error, CutError):
        return "snapshots"
    if isinstance(error, ReuseError):
        if any(differs(chunk=chunk) for chunk in (1, trial.block_tokens)):
            return "chunks"
        ends = range(2, len(first.tokens))
        cut = (find_difference(trial.cut(arrival, end), first) for end in ends)
        return "snapshots" if any(cut) else "prefixes"
    if differs(chunk=trial.setup.chunk):
        return "chunks"
    # Before layers: one that depends on its place in the batch does so there, too.
    if differs(copies=trial.setup.slots):
        return "slots"
    if differs(folds=True):
        return "layers"
    is_cancelled = any(name == "cancel" for name, _ in trial.actions)
    if is_cancelled and trial.repeat(_without_cancelling) is None:
        return "cancellation"
    return "neighbours" if trial.repeat(slots=1) is None else "memory"


def _without_cancelling(actions: Actions) -> Actions:
    return [action for action in actions if action[0] != "cancel"]


def _with_long_pairs(actions: Actions) -> Actions:
    """Two long prompts for each prompt, so that no batch has one row or one sequence."""
    changed: Actions = []
    for name, arguments in actions:
        if name == "arrive":
            longer = {**arguments, "prompt": arguments["prompt"] + 16}
            changed += [(name, longer), (name, longer)]
        else:
            changed.append((name, arguments))
    return changed
