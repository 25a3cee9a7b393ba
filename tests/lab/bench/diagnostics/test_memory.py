"""Memory of cache and process over a long text."""

import mmap

from bench_parts import IN_FP32, cells
from tiny import tiny_model

from kvpolicy.lab.bench.diagnostics.memory import measure_memory, resident_bytes


def test_memory_is_constant_while_a_text_grows() -> None:
    model = tiny_model()
    small, full = cells("knorm", "full")
    readings = list(measure_memory(model, small, [1, 2, 3], [20, 40, 80]))
    assert [one.new_tokens for one in readings] == [20, 40, 80]
    assert len({one.kv_bytes for one in readings}) == 1
    row = 2 * 2 * 2 * 8 * IN_FP32
    assert [one.full_bytes for one in readings] == [row * (3 + n) for n in (20, 40, 80)]
    assert all(one.rss_bytes > 1e7 and one.step_ms > 0 for one in readings)
    (reading,) = measure_memory(model, full, [1, 2, 3], [80])
    positions = 2 * 2 * 8
    assert reading.kv_bytes == (row + positions) * (3 + 80 + 1)


def test_resident_bytes_grow_with_touched_pages() -> None:
    # Not a tensor: that may reuse memory that the process has freed but not returned.
    before, size = resident_bytes(), 64 * 2**20
    with mmap.mmap(-1, size) as held:
        for page in range(0, size, mmap.PAGESIZE):
            held[page] = 1
        assert resident_bytes() - before > 0.9 * size
