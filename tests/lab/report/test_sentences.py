"""Traces cut into thoughts: nothing is lost, and kinds agree with steering."""

from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_reasoner.task import make_problems

from kvpolicy.lab.report.texts import ANSWER, PLAIN, TAG, cut, kinds_of
from kvpolicy.lab.steer.thoughts import Rule, ThoughtRules, find_thoughts, load_rules
from kvpolicy.model.loading import load_model
from kvpolicy.toolkit.paragraphs import Paragraphs

RULES = load_rules("reasoner")
parts = st.sampled_from(
    ["Wait", "Now a", "\n\n", "\n", " ", "<think>", "</think>", "x.", "\n\n\n", ""]
)
texts = st.lists(parts, max_size=14).map("".join) | st.text(max_size=30)


@given(texts, texts)
def test_pieces_make_up_the_text(text: str, prompt: str) -> None:
    assert "".join(piece.text for piece in cut(text, prompt, RULES)) == text


@given(texts, texts)
def test_every_piece_is_of_a_known_kind_and_none_is_empty(text: str, prompt: str) -> None:
    for kind, part in cut(text, prompt, RULES):
        assert part
        assert kind in {*kinds_of(RULES), TAG, ANSWER, PLAIN}
        assert (kind == PLAIN) == (not part.strip())


def kinds(text: str, prompt: str = "<think>") -> list[tuple[str, str]]:
    return [(kind, part.strip()) for kind, part in cut(text, prompt, RULES)]


def test_text_after_the_thinking_part_is_answer() -> None:
    text = "First a.\n\nWait, b.\n\n</think>\n\nit is 3.\n\nWait"
    actual = [
        ("execution", "First a."),
        ("reflection", "Wait, b."),
        (TAG, "</think>"),
        (ANSWER, "it is 3.\n\nWait"),
    ]
    assert kinds(text) == actual
    assert kinds(text, prompt="no tag") == actual  # what a tag closes was open
    assert kinds("it is 3.", prompt="<think></think>") == [(ANSWER, "it is 3.")]


def test_without_tags_all_of_a_text_is_thinking() -> None:
    assert kinds("Now a.\n\nAlternatively b.", prompt="") == [
        ("execution", "Now a."),
        ("transition", "Alternatively b."),
    ]
    assert kinds("so <think>Wait", prompt="") == [
        (ANSWER, "so"),
        (TAG, "<think>"),
        ("reflection", "Wait"),
    ]


def test_kinds_agree_with_the_thoughts_of_steering() -> None:
    """On the reasoner's own traces, cut by its tokenizer: the same thoughts, the same kinds."""
    _, tokenizer = load_model("reasoner")
    everywhere = ThoughtRules(RULES.rules, name="everywhere")
    for problem in make_problems(6, seed=5):
        text = problem.trace
        prompt_ids = tokenizer(problem.prompt, add_special_tokens=False).input_ids
        ids = prompt_ids + tokenizer(text, add_special_tokens=False).input_ids
        paragraphs = Paragraphs.of(tokenizer)
        thoughts = find_thoughts(ids, len(prompt_ids), tokenizer, paragraphs, everywhere)
        ours = [(k, t.strip()) for k, t in cut(text, problem.prompt, RULES) if k in kinds_of(RULES)]
        # Before the first delimiter that was generated nothing could be steered.
        assert [kind for kind, _ in ours[1:]] == [thought.kind for thought in thoughts]


def test_kinds_are_unique_with_execution_first() -> None:
    rules = ThoughtRules((Rule("doubt"), Rule("execution"), Rule("doubt"), Rule("joy")))
    assert kinds_of(rules) == ["execution", "doubt", "joy"]
