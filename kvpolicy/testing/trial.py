"""A trial: requests served with a policy by the engine, watched, and served again alone."""

import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs

from kvpolicy.engine.engine import Run
from kvpolicy.engine.request import Request
from kvpolicy.engine.results import Result
from kvpolicy.testing.clauses import ConformanceError
from kvpolicy.testing.maker import Maker
from kvpolicy.testing.setup import Setup, World
from kvpolicy.testing.story import Arrival, BatchDependenceError, Story, check_cache, differs
from kvpolicy.testing.watch import Kept, Watch

_LONGEST_CHUNK = 512

# Looking for leaks may take a collection of all garbage, and so is done now and then.
_LEAKS_EVERY = 16


class Trial:
    """One policy in one engine: requests arrive, go on for some steps, and are cancelled.

    ``finish`` serves what is left and holds every request against itself served alone, by a
    new policy. Whatever breaks the contract on the way raises `ConformanceError`.

        trial = Trial(MyPolicy, budget=4, buffer=2, slots=2)
        trial.arrive(prompt=9, new=5)
        trial.go(3)
        trial.finish()

    Attributes:
        setup: Its sizes.
        actions: What was done so far, as calls of its methods.
        checked: How often each clause was checked.
    """

    def __init__(
        self,
        policy: Any,
        knobs: dict[str, Any] | None = None,
        *,
        world: World | None = None,
        checked: Counter[str] | None = None,
        hooks: frozenset[str] | None = None,
        **setup: Any,
    ) -> None:
        """Set up an engine.

        Args:
            policy: A policy class, a function that builds one, or the name of a policy.
            knobs: Knobs, with a name.
            world: Tokenizer and model sizes that no trial changes.
            checked: Where to count clauses.
            hooks: The hooks that the policy implements, if they are known.
            setup: The fields of `Setup`.
        """
        self.maker = Maker.of(policy, knobs)
        self.world = World.of() if world is None else world
        self.setup = Setup(**setup)
        self.actions: list[tuple[str, dict[str, int]]] = []
        self.checked: Counter[str] = Counter() if checked is None else checked
        self._hooks = self.maker.hooks() if hooks is None else hooks
        self._toy = self.world.toy(self.setup)
        self._watch = self._new_watch(self.checked)
        self._engine = self.world.engine(self._watch, self.setup, self._toy)
        self._run: Run | None = None
        self._queue: list[Arrival] = []
        self._served: list[Arrival] = []
        self._open: set[int] = set()
        self._stories: list[tuple[Arrival, Story]] = []
        self._traces: list[list[Kept]] = []
        self._memories: list[weakref.ref[Any]] = []
        self._num_arrived = 0

    @property
    def policy(self) -> object:
        """The policy that serves."""
        return self._watch.policy

    @property
    def unanswered(self) -> list[int]:
        """Requests of the run under way that have not ended, in order of arrival."""
        return sorted(self._open)

    def arrive(self, *, prompt: int, new: int) -> None:
        """Let a request of so many prompt tokens arrive, for at most so many new ones.

        It is served in the run that begins with the next ``go``, with all others that wait.
        """
        self.actions.append(("arrive", {"prompt": prompt, "new": new}))
        self._queue.append(Arrival(self._num_arrived, prompt, new))
        self._num_arrived += 1

    def go(self, steps: int) -> None:
        """Go round so many times: admit, prefill, decode, compact, release."""
        self.actions.append(("go", {"steps": steps}))
        self._begin()
        for _ in range(steps):
            if self._run is not None:
                self._step()

    def cancel(self, request: int) -> None:
        """Cancel a request of the run under way, counted from 0."""
        self.actions.append(("cancel", {"request": request}))
        if request in self.unanswered:
            assert self._run is not None
            self._run.cancel(request)

    def finish(self) -> None:
        """Serve what is left, and hold every request against itself alone."""
        self.actions.append(("finish", {}))
        while self._queue or self._run is not None:
            self._begin()
            self._step()
        self.checked.update(self._sizes())
        if self.setup.dtype == "float64":  # else noise decides: batches add up in another order
            # The last one first, so that one policy after the other does not see the same.
            alone = self.alone([arrival for arrival, _ in reversed(self._stories)])
            for (arrival, story), twin in zip(self._stories, reversed(alone), strict=True):
                self._compare(arrival, story, twin)

    def alone(
        self, arrivals: Sequence[Arrival], *, copies: int = 1, chunk: int = _LONGEST_CHUNK
    ) -> list[Story]:
        """Serve requests by a new policy, one after the other with nobody else around.

        Args:
            arrivals: The requests.
            copies: How many of each at once, each in a slot of its own.
            chunk: In which chunks of their prompts.
        """
        setup = attrs.evolve(self.setup, slots=copies, chunk=chunk)
        watch = self._new_watch(Counter())
        engine = self.world.engine(watch, setup, self._toy)
        stories = []
        for arrival in arrivals:
            run = engine.generate([self._request(arrival)] * copies)
            traces = [watch.follow(served.memory) for served in run._waiting.values()]
            results = run.results()
            stories += [Story(r.tokens, t, False) for r, t in zip(results, traces, strict=True)]
        return stories

    def _sizes(self) -> list[str]:
        """The clauses about sizes that this trial is an example of."""
        setup = self.setup
        edges = {1, setup.budget, setup.budget + 1}
        is_odd = 1 in (setup.kv_heads, setup.slots)
        is_odd |= any(arrival.prompt in edges for arrival, _ in self._stories)
        found = {
            "sizes": is_odd,
            "grouped_queries": setup.group > 1,
            "precision": setup.dtype != "float32",
        }
        return [clause for clause, holds in found.items() if holds]

    def _new_watch(self, checked: Counter[str]) -> Watch:
        return Watch(self.maker.build(), self._hooks, checked)

    def _request(self, arrival: Arrival) -> Request:
        prompt = self.world.prompt(self.setup, arrival.number, arrival.prompt)
        return Request(prompt, max_new_tokens=arrival.new, stop_ids=())

    def _begin(self) -> None:
        if self._run is not None or not self._queue:
            return
        self._served, self._queue = self._queue, []
        self._open = set(range(len(self._served)))
        self._run = self._engine.generate([self._request(one) for one in self._served])
        memories = [served.memory for served in self._run._waiting.values()]
        self._traces = [self._watch.follow(memory) for memory in memories]
        self._memories = [weakref.ref(memory) for memory in memories]
        if self._stories:
            self.checked["memory"] += 1

    def _step(self) -> None:
        assert self._run is not None
        events = self._run.step()
        for result in events.results:
            self._note(result)
        check_cache(self._run.batch.cache, self._run.batch.active)
        if self._watch.chooses:
            self.checked.update(["budget", "order"])
        if self._run.done:
            self._run = None
            if self.setup.seed % _LEAKS_EVERY == 0:
                self._check_leaks()

    def _note(self, result: Result) -> None:
        story = Story(
            result.tokens, self._traces[result.id], cancelled=result.finish_reason == "cancelled"
        )
        self._stories.append((self._served[result.id], story))
        self._open.remove(result.id)
        self.checked["cancellation"] += story.cancelled

    def _check_leaks(self) -> None:
        """See that nothing holds the memory of sequences that have ended."""
        self.checked["memory"] += 1
        if any(memory() is not None for memory in self._memories):
            gc.collect()
        held = sum(memory() is not None for memory in self._memories)
        if held:
            came = f"the memory of {held} sequences that have ended is still held by someone"
            raise ConformanceError(
                clause="memory", expected="no reference to the memory of a sequence", came=came
            )

    def _compare(self, arrival: Arrival, story: Story, alone: Story) -> None:
        """Hold a request against itself, served alone by a new policy."""
        compared = ["determinism", "neighbours"]
        compared += ["chunks"] if self.setup.chunk < arrival.prompt else []
        compared += ["slots"] if self.setup.slots > 1 else []
        self.checked.update(compared)
        difference = differs(story, alone)
        if difference is not None:
            raise BatchDependenceError(arrival, *difference)
