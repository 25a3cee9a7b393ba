"""From traces to vectors: thoughts, rules, states, the contrast of means."""

import re
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_reasoner.task import make_problems, split_of
from tiny import bpe_tokenizer

from kvpolicy.errors import KVPolicyError, TaskError
from kvpolicy.lab.steer import hidden_states as states_module
from kvpolicy.lab.steer.calibrate import (
    CalibrationSource,
    Trace,
    choose_layers,
    contrast_layers,
    count_thoughts,
    describe,
    mark,
    pick,
    write_traces,
)
from kvpolicy.lab.steer.hidden_states import MarkedTrace, states_before_thoughts
from kvpolicy.lab.steer.thoughts import find_thoughts, load_rules, rules_for
from kvpolicy.lab.tasks.task import Example, Graded, GradeError, Split, load_task
from kvpolicy.model.loading import load_model
from kvpolicy.toolkit.paragraphs import Paragraphs
from kvpolicy.toolkit.steering_vectors import (
    SteeringVector,
    load_steering_vectors,
    save_steering_vectors,
)

EVERYTHING = load_rules("published")  # has no scope


# Rules


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Wait, is that right?", "reflection"),
        ("wait a minute", "reflection"),
        ("So x = 3. Let me VERIFY this.", "reflection"),
        ("I should make sure.", "reflection"),
        ("That's correct.", "reflection"),
        ("Wait, maybe there is another way.", "reflection"),  # the first rule wins
        ("Alternatively, use induction.", "transition"),
        ("There is another approach, I think.", "transition"),
        ("I should think differently.", "execution"),  # only the misspelt word is looked for
        ("We cannot wait.", "execution"),
        ("So x = 3.", "execution"),
    ],
)
def test_the_published_rules_match_those_of_seal(text: str, kind: str) -> None:
    assert EVERYTHING.kind_of(text) == kind


def test_the_reasoner_rules_match_every_recheck() -> None:
    rules = load_rules("reasoner")
    traces = [problem.trace.partition("</think>")[0] for problem in make_problems(40, seed=0)]
    thoughts = [one for trace in traces for one in trace.split("\n\n") if one]
    rechecks = [one for one in thoughts if not one.startswith(("First ", "And ", "Now ", "So "))]
    assert len(rechecks) > 100
    assert all(rules.kind_of(one) != "execution" for one in rechecks)
    assert rules.kind_of("Now tea = oak + 3, so tea is 4.") == "execution"
    assert rules.kind_of("So the answer is 4.") == "execution"


def test_the_reasoner_rules_compare_thoughts_between_plan_and_recapitulation() -> None:
    texts = ["First a", "And b", "Now c", "Wait d", "Now e", "Just f", "Again g", "So h"]
    assert [texts[i] for i in load_rules("reasoner").scope.within(texts)] == texts[3:6]
    assert list(load_rules("reasoner").scope.within(texts[:2])) == []
    assert list(EVERYTHING.scope.within(texts)) == list(range(8))


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("reasoner",), "reasoner"),
        (("some-other-task",), "published"),
        (("reasoner:level=hard", "x"), "reasoner"),
        (("needle", "reasoner"), "reasoner"),
        (("gsm8k", "deepseek-ai/some"), "published"),
    ],
)
def test_rules_are_found_by_task_or_model(names: tuple[str, ...], found: str) -> None:
    assert rules_for(*names) == found


GOOD = '[[rules]]\nkind = "reflection"\nstarts = ["Wait"]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rules"),
        ("rules = 3", "rules"),
        ("rules = []", "rules"),
        (GOOD + "knid = 1\n", "knid"),
        (GOOD.replace('["Wait"]', '"Wait"'), "list of words"),
        (GOOD.replace('["Wait"]', '[""]'), "list of words"),
        (GOOD + '[scope]\nafter = "(Now"\n', "missing )"),
        (GOOD + '[scope]\nuntil = "Now"\n', "until"),
        ("rules = = 3", "TOML"),
    ],
)
def test_invalid_rules_are_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(KVPolicyError, match=r"mine\.toml") as caught:
        load_rules(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_digest_of_rules_depends_on_what_they_decide(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    digests = set()
    for text in (GOOD, GOOD.replace("Wait", "Hmm"), GOOD + '[scope]\nafter = "x"\n'):
        path.write_text(text, encoding="utf-8")
        digests.add(load_rules(str(path)).digest())
    assert len(digests) == 3
    path.write_text('source = "elsewhere"\n' + GOOD, encoding="utf-8")
    assert load_rules(str(path)).digest() in digests


def test_unknown_rules_are_named() -> None:
    with pytest.raises(KVPolicyError, match="published"):
        load_rules("publised")
    with pytest.raises(KVPolicyError, match=r"none\.toml"):
        load_rules("none.toml")


# Thoughts


def thoughts_of(
    tokenizer: object, prompt: str, trace: str, think: tuple[str, str] | None
) -> list[tuple[str, str]]:
    """The token before each thought, and its text."""
    ids = [tokenizer(text)["input_ids"] for text in (prompt, trace)]
    paragraphs = Paragraphs.of(tokenizer, think=think)
    token_ids = [*ids[0], *ids[1]]
    found = find_thoughts(token_ids, len(ids[0]), tokenizer, paragraphs, EVERYTHING)
    return [(tokenizer.decode([token_ids[one.position]]), one.text) for one in found]


TAGS = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("prompt", "trace", "think", "expected"),
    [
        ("a<think>", "a.\n\nb b.\n\nc", TAGS, [(".\n\n", "b b."), (".\n\n", "c")]),
        ("a<think>\n\n", "a\n\nb</think>\n\nc", TAGS, [("\n\n", "b")]),
        ("a<think>", "a\n\n</think>\n\nb\n\nc", TAGS, []),
        ("a\n\nb", "a\n\nb", TAGS, []),
        ("a", "<think>b\n\nc\n\n", TAGS, [("\n\n", "c")]),
        ("a<think></think>", "b\n\nc", TAGS, []),
        ("a", "b\n\nc\n\nd", None, [("\n\n", "c"), ("\n\n", "d")]),
        ("a<think>", "a\n\n\n\nb).\n\nc\nd", TAGS, [("\n\n", "b)."), (").\n\n", "c\nd")]),
    ],
)
def test_thoughts_are_between_the_delimiters_of_the_thinking(
    prompt: str,
    trace: str,
    think: tuple[str, str] | None,
    expected: list[tuple[str, str]],
) -> None:
    assert thoughts_of(bpe_tokenizer(), prompt, trace, think) == expected


def test_calibration_says_when_no_token_ends_a_paragraph() -> None:
    tokenizer = bpe_tokenizer()
    ids = tokenizer("<think>")["input_ids"] + tokenizer("so.\nWait no.\nso.\n")["input_ids"]
    trace = Trace(0, 1, tuple(ids), is_correct=True)
    rules = load_rules("published")
    with pytest.raises(KVPolicyError, match="--delimiter"):
        mark([trace], tokenizer, rules)
    (marked,) = mark([trace], tokenizer, rules, "\n")
    assert [one.text for one in marked.thoughts] == ["Wait no.", "so."]


def test_the_thoughts_of_a_reference_trace_are_its_sentences() -> None:
    _, tokenizer = load_model("reasoner")
    for problem in make_problems(20, seed=4, split="train"):
        sentences = problem.trace.split("\n\n</think>")[0].split("\n\n")
        found = thoughts_of(tokenizer, problem.prompt, problem.trace, TAGS)
        # What comes before the first delimiter is none.
        assert found == [("\n\n", sentence) for sentence in sentences[1:]]


# States and their contrast


@pytest.fixture(scope="module")
def reasoner() -> CalibrationSource:
    model, tokenizer = load_model("reasoner")
    return CalibrationSource(model, tokenizer, "reasoner", load_task("reasoner"), n=4, seed=2)


@pytest.fixture(scope="module")
def traces(reasoner: CalibrationSource) -> list[Trace]:
    return list(write_traces(reasoner, max_new_tokens=450, slots=4))


@pytest.fixture(scope="module")
def marked(reasoner: CalibrationSource, traces: list[Trace]) -> list[MarkedTrace]:
    return mark(traces, reasoner.tokenizer, load_rules("reasoner"))


@pytest.mark.nightly
def test_traces_answer_the_training_problems(
    reasoner: CalibrationSource, traces: list[Trace]
) -> None:
    in_order = sorted(traces, key=lambda trace: trace.item)
    problems = make_problems(4, seed=2, split="train")
    for trace, problem in zip(in_order, problems, strict=True):
        prompt = reasoner.tokenizer.decode(trace.token_ids[: trace.prompt_len])
        assert prompt == problem.prompt
        assert split_of(prompt) == "train"
        text = reasoner.tokenizer.decode(trace.token_ids[trace.prompt_len :])
        assert trace.is_correct == (f"\\boxed{{{problem.answer}}}" in text)


@attrs.frozen
class Undecided:
    """A task whose grader has no verdict on its second problem."""

    name: str = "undecided"

    def examples(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Example]:
        return load_task("reasoner:level=easy").examples(n, seed=seed, split=split)

    @property
    def metric(self) -> Graded:
        return Graded(self.grade)

    def grade(self, text: str, item: Example) -> bool:
        if item.index == 1:
            raise GradeError("no verdict")
        return True


def test_a_trace_without_a_verdict_is_left_out(reasoner: CalibrationSource) -> None:
    source = attrs.evolve(reasoner, task=Undecided(), n=3)
    found = list(write_traces(source, max_new_tokens=4, slots=3))
    assert sorted(trace.item for trace in found) == [0, 2]


def test_a_task_that_is_not_graded_has_no_traces(reasoner: CalibrationSource) -> None:
    source = attrs.evolve(reasoner, task=load_task("perplexity"))
    with pytest.raises(TaskError, match="no grader"):
        list(write_traces(source, max_new_tokens=4, slots=3))


def test_calibration_uses_no_test_problem() -> None:
    task = load_task("reasoner")
    prompts = [
        {i.prompt for i in task.examples(50, seed=0, split=s)} for s in ("train", "tune", "test")
    ]
    assert not any(a & b for a, b in ((prompts[0], prompts[1]), (prompts[0], prompts[2])))
    assert [i.prompt for i in task.examples(5, seed=0)] == [
        i.prompt for i in task.examples(5, seed=0, split="test")
    ]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("tokens_per_forward", [1, 700, 100_000])
def test_states_equal_the_hidden_states_of_each_trace_alone(
    reasoner: CalibrationSource,
    marked: list[MarkedTrace],
    tokens_per_forward: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(states_module, "_TOKENS_PER_FORWARD", tokens_per_forward)
    found = list(states_before_thoughts(reasoner.model, marked[:3], [0, 2, 3]))
    expected: dict[int, list[torch.Tensor]] = {0: [], 2: [], 3: []}
    kinds = []
    for trace in sorted(marked[:3], key=lambda trace: len(trace.token_ids)):
        ids = torch.tensor([trace.token_ids])
        with torch.inference_mode():
            shown = reasoner.model(ids, output_hidden_states=True).hidden_states
        for thought in trace.thoughts:
            kinds.append(thought.kind)
            for layer, states in expected.items():
                states.append(shown[layer][0, thought.position])
    assert [kind for states in found for kind in states.kinds] == kinds
    assert sum(states.num_traces for states in found) == 3
    for layer, states in expected.items():
        captured = torch.cat([one.by_layer[layer] for one in found])
        # Batches add in another order: float32 over 300 tokens.
        torch.testing.assert_close(captured, torch.stack(states), rtol=1e-4, atol=1e-3)
    assert not reasoner.model.model.layers[2]._forward_pre_hooks, "the model is left as it was"


def test_a_vector_is_the_difference_of_two_means(
    reasoner: CalibrationSource, traces: list[Trace], marked: list[MarkedTrace]
) -> None:
    calibration = describe(reasoner, traces, marked, load_rules("reasoner"))
    (one,) = contrast_layers(reasoner.model, marked, [2], calibration)
    sides: dict[bool, list[list[float]]] = {True: [], False: []}
    for states in states_before_thoughts(reasoner.model, marked, [2]):
        for kind, state in zip(states.kinds, states.by_layer[2].tolist(), strict=True):
            sides[kind == "execution"].append(state)
    means = {side: [sum(c) / len(c) for c in zip(*v, strict=True)] for side, v in sides.items()}
    expected = [a - b for a, b in zip(means[True], means[False], strict=True)]
    torch.testing.assert_close(one.vector, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert one.separation is not None
    assert one.separation == pytest.approx(separation(sides, expected), rel=1e-4)


def separation(sides: dict[bool, list[list[float]]], vector: Sequence[float]) -> float:
    """Distance of two means over the pooled standard deviation, in plain loops."""
    norm = sum(x * x for x in vector) ** 0.5
    lines = [
        [sum(a * b for a, b in zip(s, vector, strict=True)) / norm for s in sides[k]] for k in sides
    ]
    means = [sum(line) / len(line) for line in lines]
    squares = sum((x - m) ** 2 for line, m in zip(lines, means, strict=True) for x in line)
    spread = (squares / (sum(map(len, lines)) - 2)) ** 0.5
    return abs(means[0] - means[1]) / spread


def test_a_calibration_records_its_origin(
    reasoner: CalibrationSource, traces: list[Trace], marked: list[MarkedTrace]
) -> None:
    found = describe(reasoner, traces, marked, load_rules("reasoner"))
    assert (found.model, found.task, found.split, found.seed) == (
        "reasoner",
        "reasoner",
        "train",
        2,
    )
    assert found.num_right + found.num_wrong == 4
    assert found.num_thoughts == count_thoughts(marked)
    assert found.sign == "execution - non_execution"


@pytest.mark.nightly
def test_the_same_seed_makes_the_same_bytes(tmp_path: Path) -> None:
    contents = []
    for run in range(2):
        model, tokenizer = load_model("reasoner")
        source = CalibrationSource(model, tokenizer, "reasoner", load_task("reasoner"), n=5, seed=1)
        rules = load_rules("reasoner")
        # In the order in which they are finished.
        traces = pick(
            list(write_traces(source, max_new_tokens=450, slots=3)),
            max_correct=500,
            max_incorrect=500,
        )
        marked = mark(traces, tokenizer, rules)
        calibration = describe(source, traces, marked, rules)
        vectors = contrast_layers(model, marked, [1, 2, 3], calibration)
        path = tmp_path / f"{run}.safetensors"
        save_steering_vectors(path, vectors, default_layer=2)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]


# Choices


@given(flags=st.lists(st.booleans(), max_size=12), right=st.integers(0, 6), wrong=st.integers(0, 6))
def test_the_first_correct_and_incorrect_traces_are_used(
    flags: list[bool], right: int, wrong: int
) -> None:
    traces = [Trace(i, 1, (i,), flag) for i, flag in enumerate(flags)]
    used = pick(traces[::-1], max_correct=right, max_incorrect=wrong)
    expected = [i for i, flag in enumerate(flags) if flag][:right]
    expected += [i for i, flag in enumerate(flags) if not flag][:wrong]
    assert [trace.item for trace in used] == sorted(expected)


def test_one_side_without_a_thought_is_an_error(
    reasoner: CalibrationSource, traces: list[Trace]
) -> None:
    with pytest.raises(KVPolicyError, match="--n"):
        mark([], reasoner.tokenizer, load_rules("reasoner"))
    only_plans = [
        Trace(t.item, t.prompt_len, t.token_ids[: t.prompt_len + 12], t.is_correct) for t in traces
    ]
    with pytest.raises(KVPolicyError, match="non-execution"):
        mark(only_plans, reasoner.tokenizer, EVERYTHING)


@pytest.mark.parametrize(
    ("words", "num_layers", "expected"),
    [
        ("all", 3, [0, 1, 2]),
        ("half", 4, [1, 3]),
        ("half", 1, [0]),
        ("20", 28, [20]),
        ("3, 1,3", 4, [1, 3]),
    ],
)
def test_layers_are_chosen(words: str, num_layers: int, expected: list[int]) -> None:
    assert choose_layers(words, num_layers) == expected


@pytest.mark.parametrize("words", ["", "1,", "4", "-1", "some", "1.5", "1:3"])
def test_invalid_layers_are_refused(words: str) -> None:
    with pytest.raises(KVPolicyError, match=re.escape(words) or None):
        choose_layers(words, 4)


# The bundled vectors


def test_the_bundled_vectors_belong_to_the_bundled_reasoner(reasoner: CalibrationSource) -> None:
    vectors, default = load_steering_vectors("reasoner")
    assert [one.layer for one in vectors] == [0, 1, 2, 3]
    assert default is not None
    calibration = vectors[0].calibration
    assert (calibration.model, calibration.split) == ("reasoner", "train")
    assert calibration.fingerprint == describe(reasoner, [], [], EVERYTHING).fingerprint
    assert calibration.rules_digest == load_rules("reasoner").digest()


@pytest.mark.nightly
def test_the_bundled_vectors_are_reproducible() -> None:
    model, tokenizer = load_model("reasoner")
    vectors, _ = load_steering_vectors("reasoner")
    calibration = vectors[0].calibration
    source = CalibrationSource(
        model, tokenizer, "reasoner", load_task("reasoner"), n=1000, seed=calibration.seed
    )
    traces = pick(
        list(write_traces(source, max_new_tokens=700, slots=100)),
        max_correct=500,
        max_incorrect=500,
    )
    marked = mark(traces, tokenizer, load_rules("reasoner"))
    again = contrast_layers(model, marked, [1, 2, 3], calibration)

    def cosine(a: SteeringVector, b: SteeringVector) -> float:
        return float(torch.nn.functional.cosine_similarity(a.vector, b.vector, dim=0))

    # Another processor rounds otherwise, and a trace or two may take another turn.
    assert all(cosine(a, b) > 0.99 for a, b in zip(again, vectors[1:], strict=True))
