"""The model alone is measured without a cache."""

from tiny import tiny_model

from kvpolicy.lab.bench.contenders.model_alone import model_alone
from kvpolicy.lab.bench.workload import Decode, Text


def test_the_model_alone_has_no_cache() -> None:
    contender = model_alone(tiny_model())
    for work in (Decode(2, 9, 7), Text(2, 2, 4, 7)):
        done = contender.run(work)
        assert (done.kv_bytes, done.read_bytes, done.prefill_s) == (0, 0, None)
        assert len(done.steps_s) == 7
