"""Question: the last tokens of a prompt stay."""

import attrs
from attrs.validators import ge, instance_of
from torch import Tensor

from kvpolicy import hookimpl


@attrs.define(eq=False, kw_only=True)
class Question:
    """Add-on: the last tokens of a prompt stay, whatever a policy says.

    They are often the question about the text before them. Which rows they are is known from the
    prompt's length: the hook `protect` names them, and scores remain what they are for the other
    policies of the stack. An example without a paper.

    Attributes:
        size: Tokens at the end of a prompt that stay. If the budget is smaller, the newest stay.
    """

    size: int = attrs.field(default=16, validator=[instance_of(int), ge(0)])

    @hookimpl
    def protect(self, positions: Tensor, prompt_len: Tensor) -> Tensor:
        """Protect the last tokens of the prompt."""
        end = prompt_len.to(positions.device, non_blocking=True)[:, None, None]
        return (positions < end) & (positions >= end - self.size)
