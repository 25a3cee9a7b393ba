"""The limit of the machine, as a contender: what no step can be faster than.

How fast the machine is, is measured in every turn: it is what this machine gives at that time.
"""

from transformers import PreTrainedModel

from kvpolicy.lab.bench.contenders.contender import LIMIT, Contender, Measurement
from kvpolicy.lab.bench.roofline import Machine, ModelSize, least_step_s
from kvpolicy.lab.bench.workload import Decode, Text


def machine_limit(model: PreTrainedModel) -> Contender:
    """The least time of a step with the full cache.

    It is the longer of reading the weights and multiplying with them, and then reading the rows.
    """
    size = ModelSize.of(model)

    def run(work: Decode | Text) -> Measurement:
        machine = Machine.of(model)
        read = _mean_tokens(work) * size.row_bytes
        step_s = least_step_s(machine, size, work.batch, read)
        return Measurement((step_s,), kv_bytes=round(read), read_bytes=read, machine=machine)

    return Contender(LIMIT, run, run, references={}, has_cache=False)


def _mean_tokens(work: Decode | Text) -> float:
    """Tokens that a step attends to, summed over the sequences, the mean over the steps."""
    if isinstance(work, Decode):
        return work.batch * (work.held + (work.steps + 1) / 2)
    return work.batch * _mean_length(work)


def _mean_length(work: Text) -> float:
    return (work.prompt_min + work.prompt_max + work.new_tokens) / 2
