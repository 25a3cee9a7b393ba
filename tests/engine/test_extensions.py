"""Extensions of users: what they are told, and when."""

from collections import Counter

import pytest
import torch
from tiny import tiny_model
from torch import Tensor

from kvpolicy import Compaction, Drawn, Engine, Extension, Output, Plan, Request, Step
from kvpolicy.engine.requests.sequence import Sequence

PROMPTS = [[5, 7, 9], [11, 3, 8, 2, 1] * 7, [44, 45, 46, 47] * 3]
PLAN = Plan.uniform("h2o", budget=12, buffer=5)


class Recorder(Extension):
    """Records the tokens and states of every step, and how sequences begin and end."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.states: dict[int, list[Tensor]] = {}
        self.calls: Counter[tuple[str, int]] = Counter()

    def admit(self, group: list[Sequence]) -> None:
        """Count sequences that begin."""
        self.calls.update(("admit", seq.id) for seq in group)

    def repeats(self, sequences: list[Sequence]) -> int:
        """It reads the states of every token."""
        return 1

    def before(self, step: Step) -> None:
        """Ask for states."""
        step.wants_states = True

    def after(self, step: Step, output: Output, drawn: Drawn) -> None:
        """Record them."""
        assert output.states is not None
        for seq, new, states in zip(step.sequences, step.tokens, output.states, strict=True):
            self.tokens.setdefault(seq.id, []).extend(new)
            self.states.setdefault(seq.id, []).append(states[-len(new) :].clone())

    def finish(self, seq: Sequence) -> None:
        """Count sequences that end."""
        self.calls["finish", seq.id] += 1


@pytest.mark.parametrize("eager", [False, True])
def test_an_extension_reads_the_tokens_and_the_states_of_every_step(eager: bool) -> None:
    model = tiny_model(dtype=torch.float64)
    plan = Plan.uniform("full")
    engine = Engine(
        model, plan=plan, slots=2, chunk=16, eager=eager, steps_per_read=2, extensions=[Recorder]
    )
    run = engine.generate(PROMPTS, max_new_tokens=9, stop_ids=())
    results = run.results()
    recorder = run.extension(Recorder)
    for result, prompt in zip(results, PROMPTS, strict=True):
        # The last token is never computed.
        text = [*prompt, *result.tokens[:-1]]
        assert recorder.tokens[result.id] == text
        with torch.no_grad():
            states = model.model(torch.tensor([text])).last_hidden_state[0]
        torch.testing.assert_close(torch.cat(recorder.states[result.id]), states)
    assert recorder.calls == {(what, id_): 1 for what in ("admit", "finish") for id_ in range(3)}


class Failing(Extension):
    """Raises at the first selection."""

    def selected(self, compaction: Compaction) -> None:
        """Raise."""
        raise ZeroDivisionError


def test_what_an_extension_raises_ends_the_run_and_blames_no_policy() -> None:
    engine = Engine(tiny_model(), plan=PLAN, slots=3, on_hook_error="answer", extensions=[Failing])
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPTS, max_new_tokens=20, stop_ids=()).results()


def test_each_run_has_an_extension_of_its_own() -> None:
    engine = Engine(tiny_model(), plan=PLAN, slots=3, extensions=[Recorder])
    first, second = (engine.generate([Request(one, 4, stop_ids=())]) for one in PROMPTS[:2])
    first.results(), second.results()
    found = [run.extension(Recorder).tokens[0][:3] for run in (first, second)]
    assert found == [PROMPTS[0], PROMPTS[1][:3]]
