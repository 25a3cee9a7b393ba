"""Retained attention and output error: what the rows that a plan holds are worth.

The model with the full cache answers greedily, and the engine under the plan is led along that
answer. What is compared is the attention of the full cache: once over all rows, and once over the
rows that the plan holds at the same step. Queries, keys and values are those of the full cache in
both, so a sample says what the choice of rows costs and nothing of what follows from it: errors do
not add up from layer to layer or from step to step.
"""

from collections import abc
from typing import TYPE_CHECKING

import attrs

from kvpolicy.lab.tasks.derived import DEFAULT_TASK, DerivedTask, derived
from kvpolicy.lab.tasks.task import Column, EvalRequest, Evaluation, mean_of

if TYPE_CHECKING:
    from kvpolicy.engine.engine import Engine

# Values of an outcome.
RETAINED = "retained_attention"
ERROR = "output_error"


def attention(of: str | None = DEFAULT_TASK) -> DerivedTask:
    """Attention of the full cache on the rows that a plan holds, along the full cache's answers."""
    return derived("attention", of, HeldAttention())


@attrs.frozen
class HeldAttention:
    """What the rows that a plan holds are worth to the queries of the full cache.

    Of each query of a decode step, in each layer and head:

    * ``output_error``: ``|o_held - o_full| / |o_full|``, where ``o_full`` is the output of
      attention over all rows, and ``o_held`` that over the rows held, with weights normalised
      over these;
    * ``retained_attention``: the share of the weights over all rows that falls on the rows held.

    Held are the rows that the KV head of the query has in that step under the plan, the row of
    the query's own token included. Both are means over heads, layers and the decode steps from
    the first compaction of the sequence on, in whichever layer it was. If nothing is compacted,
    they are 0 and 1. An answer of one token has no decode step, and neither value.

    The full cache is computed in step with each cell, and its keys and values are kept until the
    plan's engine has finished the sequence, with the queries of the answer.
    """

    name: str = attrs.field(default="attention", init=False)
    reads_reference: bool = attrs.field(default=False, init=False)
    runs_code: bool = attrs.field(default=False, init=False)

    @property
    def columns(self) -> abc.Sequence[Column]:
        """Output error and retained attention."""
        return (
            mean_of(ERROR, "output error", "Relative error of the attention output"),
            mean_of(RETAINED, "attention kept", "Attention on the rows held", is_share=True),
        )

    def begin(self, engine: "Engine", requests: abc.Sequence[EvalRequest]) -> Evaluation:
        """Lead every sequence along the full cache's answer."""
        from kvpolicy.engine.requests.request import Sampling
        from kvpolicy.lab.tasks.held_attention import HeldAttentionEvaluation

        greedy = [attrs.evolve(one.request, sampling=Sampling()) for one in requests]
        return HeldAttentionEvaluation(engine, greedy, (ERROR, RETAINED))
