"""Weights of the tokens of a trace in the loss."""

from tokenizers import Encoding

from kvpolicy_reasoner.task import Problem
from kvpolicy_reasoner.tokenizer import NEWLINES
from kvpolicy_reasoner.verbose import VerboseProblem, weigh_tokens

# Which sentence comes after a line break is partly drawn at random; no model can predict it.
AFTER_NEWLINES_WEIGHT = 0.25


def weigh_after_newlines(problem: Problem, trace: Encoding) -> list[float]:
    """Weigh the first token of every sentence less than the others.

    Args:
        problem: Makes no difference.
        trace: Its trace as tokens; the prompt before it ends with a line break.

    Returns:
        A weight for each token.
    """
    before = [NEWLINES, *trace.tokens[:-1]]
    return [AFTER_NEWLINES_WEIGHT if token == NEWLINES else 1.0 for token in before]


def weigh_pieces(problem: Problem, trace: Encoding) -> list[float]:
    """Weigh every token as the piece that it stands in.

    Args:
        problem: A problem of the second task.
        trace: Its trace as tokens.

    Returns:
        A weight for each token.
    """
    assert isinstance(problem, VerboseProblem)
    return weigh_tokens(problem.pieces, [start for start, _ in trace.offsets])
