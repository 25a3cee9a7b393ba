r"""Traces cut into thoughts, as SEAL cuts them.

Inside the thinking part, a token whose text contains ``"\n\n"`` ends a thought and announces
the next: the state at this token stands for the thought that follows, because it is where
steering would have to change the model's mind.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from kvpolicy.lab.steer.rules import ThoughtRules
from kvpolicy.toolkit.paragraphs import Paragraphs, look_up


@attrs.frozen
class Thought:
    """One thought of a trace.

    Attributes:
        place: Index of the delimiter token before it, prompt included.
        kind: ``"execution"``, or what the rules call it.
        text: Its text, without white space around it.
    """

    place: int
    kind: str
    text: str


def find_thoughts(
    token_ids: Sequence[int],
    prompt_len: int,
    tokenizer: Any,
    paragraphs: Paragraphs,
    rules: ThoughtRules,
) -> list[Thought]:
    """Cut a trace into thoughts, and tell what kinds they are.

    Only delimiters that were generated count, for only they could be steered; so what comes
    before the first of them is no thought. Empty thoughts are none either.

    Args:
        token_ids: Prompt and generation.
        prompt_len: Tokens of the prompt.
        tokenizer: The tokenizer.
        paragraphs: Its delimiters and tags, on the CPU.
        rules: Which thoughts are compared, and what kinds there are.

    Returns:
        The thoughts that are compared, in order.
    """
    found = []
    for place, end in _spans(token_ids, prompt_len, paragraphs):
        text = tokenizer.decode(token_ids[place + 1 : end], skip_special_tokens=True).strip()
        if text:
            found.append(Thought(place, rules.kind_of(text), text))
    return [found[i] for i in rules.scope.within([thought.text for thought in found])]


def _spans(
    token_ids: Sequence[int], prompt_len: int, paragraphs: Paragraphs
) -> list[tuple[int, int]]:
    """For each thought, the delimiter before it and where it ends."""
    ids = torch.tensor(token_ids)
    delimiters = look_up(paragraphs.delimiters, ids).tolist()
    inside = torch.tensor([float(paragraphs.thinking_after(ids[:prompt_len]))])
    spans: list[tuple[int, int]] = []
    place: int | None = None
    for position in range(prompt_len, len(token_ids)):
        paragraphs.update(inside, ids[position : position + 1])
        is_inside = bool(inside)
        if place is not None and (delimiters[position] or not is_inside):
            spans.append((place, position + delimiters[position]))
            place = None
        if is_inside and delimiters[position]:
            place = position
    return spans if place is None else [*spans, (place, len(token_ids))]
