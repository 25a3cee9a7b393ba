"""StreamingLLM: keep attention sinks and the most recent tokens."""

import attrs
import torch
from attrs.validators import ge, instance_of
from torch import Tensor

from kvpolicy import hookimpl


@attrs.define(eq=False, kw_only=True)
class Streaming:
    """StreamingLLM: keep the first tokens (attention sinks) and the most recent ones.

    Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024
    (arXiv 2309.17453), section 3.2; code at mit-han-lab/streaming-llm 2e50426 and, as an
    eviction baseline, Zefan-Cai/R-KV d15c976.

    Deviations: keys keep the positions at which they were computed, as in R-KV's code; the
    original rotates them by their index in the cache (see ``rerotate``). The sinks count
    towards the budget, as in R-KV's code, and are the first real tokens of every sequence, also
    in a batch of unequal prompts.

    Attributes:
        n_sink: First tokens of the sequence that always stay.
    """

    n_sink: int = attrs.field(default=4, validator=[instance_of(int), ge(0)])

    @property
    def protects(self) -> tuple[int, int]:
        """The sinks, and at least the newest row."""
        return self.n_sink, 1

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        """Score newer rows higher."""
        newer = torch.arange(positions.shape[2], dtype=torch.float32, device=positions.device)
        return newer.repeat(*positions.shape[:2], 1)
