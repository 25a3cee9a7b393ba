"""What Numba keeps of a function is compiled anew where another file that it calls has changed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")
from kvpolicy.attention.numba_backend import kept

OTHER = """from numba import njit

@njit
def number():
    return {number}
"""
MINE = """from kept import kept
from other import number

@kept("int64()")
def doubled():
    return 2 * number()

print(doubled(), sum(doubled.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_a_function_is_compiled_anew_where_what_it_calls_has_changed(tmp_path: Path) -> None:
    def doubled(number: int) -> list[int]:
        (tmp_path / "other.py").write_text(OTHER.format(number=number))
        run = subprocess.run(
            [sys.executable, "-B", str(tmp_path / "mine.py")],
            capture_output=True,
            text=True,
            check=True,
        )
        return [int(word) for word in run.stdout.split()]

    shutil.copy(kept.__file__, tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    assert doubled(3) == [6, 0]
    assert doubled(3) == [6, 1]
    assert doubled(4) == [8, 0]
