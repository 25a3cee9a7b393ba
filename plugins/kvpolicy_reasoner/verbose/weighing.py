"""How much the loss of each token counts in the second task: as the pieces of the trace say."""

from tokenizers import Encoding

from kvpolicy_reasoner.task import Problem
from kvpolicy_reasoner.verbose.pieces import weigh_tokens
from kvpolicy_reasoner.verbose.task import VerboseProblem


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
