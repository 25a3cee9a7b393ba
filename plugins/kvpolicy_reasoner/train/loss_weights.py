"""Loss weights of the tokens of a trace."""

from tokenizers import Encoding

from kvpolicy_reasoner.task import Problem
from kvpolicy_reasoner.tokenizer import NEWLINES
from kvpolicy_reasoner.verbose import VerboseProblem, weigh_tokens

# The sentence after a line break is partly random, so no model can predict its first token.
AFTER_NEWLINES_WEIGHT = 0.25


def weigh_after_newlines(problem: Problem, trace: Encoding) -> list[float]:
    """Give the first token of each sentence a lower weight.

    Args:
        problem: A problem whose prompt ends with line breaks.
        trace: Tokens of its trace.

    Returns:
        One weight per token.
    """
    text = NEWLINES + problem.trace
    ends = (start + len(NEWLINES) for start, _ in trace.offsets)
    return [AFTER_NEWLINES_WEIGHT if text[:end].endswith(NEWLINES) else 1.0 for end in ends]


def weigh_pieces(problem: Problem, trace: Encoding) -> list[float]:
    """Give each token the weight of its piece.

    Args:
        problem: A problem of the second task.
        trace: Tokens of its trace.

    Returns:
        One weight per token.
    """
    assert isinstance(problem, VerboseProblem)
    return weigh_tokens(problem.pieces, [start for start, _ in trace.offsets])
