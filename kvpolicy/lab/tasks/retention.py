"""Retention: how much of the full cache's attention goes to rows that a plan would still hold.

The model with the full cache answers greedily, and the engine under the plan is led along that
answer. What is compared is the attention of the full cache: once over all rows, and once over the
rows that the plan holds at the same step. Queries, keys and values are those of the full cache in
both, so a sample says what the choice of rows costs and nothing of what follows from it: errors do
not add up from layer to layer or from step to step.
"""

from collections import abc
from typing import TYPE_CHECKING

import attrs

from kvpolicy.lab.shared import Shared
from kvpolicy.lab.tasks.derived import DerivedTask, PassageTask, derived
from kvpolicy.lab.tasks.held_shares import (
    DISTANCE,
    ERROR,
    HEAD,
    LAYER,
    LOOK_BACKS_HELD,
    RETAINED,
    LookBack,
)
from kvpolicy.lab.tasks.prose import PROSE
from kvpolicy.lab.tasks.task import Column, EvalRequest, Evaluation, PlainMetric, mean_of

if TYPE_CHECKING:
    from kvpolicy.engine.engine import Engine


def retention(of: str = PROSE, prompt_tokens: int | None = None) -> DerivedTask | PassageTask:
    """Attention and look-backs of the full cache that fall on rows a plan would still hold."""
    return derived("retention", of, Retention(), prompt_tokens=prompt_tokens)


@attrs.frozen
class Retention(PlainMetric):
    """What the rows that a plan holds are worth to the queries of the full cache.

    Of each query of a decode step, in each layer and head:

    * ``retained_attention``: the share of the weights over all rows that falls on the rows held;
    * ``look_backs_held``: of its strong look-backs, the share whose row is held. A strong look-back
      is a `LookBack`. It is the share of all look-backs of a sequence, and not there where it
      has none;
    * ``output_error``: ``|o_held - o_full| / |o_full|``, where ``o_full`` is the output of
      attention over all rows, and ``o_held`` that over the rows held, with weights normalised
      over these.

    The value ``match`` beside them is that of `Agreement`, from the same run.

    Held are the rows that the KV head of the query has in that step under the plan, the row of
    the query's own token included. The first and the last are means over heads, layers and the
    decode steps from the first compaction of the sequence on, in whichever layer it was. If
    nothing is compacted, they are 1 and 0. An answer of one token has no decode step, and no value.

    Layers with a sliding window are compared within their windows.

    The full cache is computed in step with the first plan, and the keys, values and queries of its
    answers are kept for the others, in the memory of the host; if they take more than
    `kvpolicy.lab.shared.MOST_BYTES`, they are kept until the plan's engine has finished the
    sequence, and computed in step with each plan. Weights are computed for a layer and a few
    queries at a time.

    Attributes:
        look_back: What a strong look-back is.
    """

    name = "retention"
    facets = (LAYER, HEAD, DISTANCE)
    is_greedy = True

    look_back: LookBack = attrs.field(factory=LookBack)

    @property
    def columns(self) -> abc.Sequence[Column]:
        """Retained attention, look-backs held, and output error."""
        return (
            mean_of(RETAINED, "attention held", "Attention on the rows held", is_share=True),
            mean_of(LOOK_BACKS_HELD, "look-backs held", "Look-backs to rows held", is_share=True),
            mean_of(ERROR, "output error", "Relative error of the attention output", least=0),
        )

    def begin(
        self, engine: "Engine", requests: abc.Sequence[EvalRequest], shared: Shared
    ) -> Evaluation:
        """Lead every sequence along the full cache's answer."""
        from kvpolicy.engine.requests.request import Sampling
        from kvpolicy.lab.tasks.held_attention import FullRun, HeldAttention

        greedy = [attrs.evolve(one.request, sampling=Sampling()) for one in requests]
        full = shared.get(
            ("rows of the full cache", engine.num_slots, greedy),
            lambda: FullRun(engine, greedy, keep_bytes=shared.most_bytes),
        )
        return HeldAttention(engine, greedy, self.look_back, full)
