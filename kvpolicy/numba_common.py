"""What Numba kernels of several packages share: threads, and which sums may be reordered.

Importing it needs the extra ``cpu``. Tasks run on the threads of OpenMP that torch uses.
"""

import os
from functools import cache
from importlib.util import find_spec

import numba
import torch

# Sums may be reordered, which vector instructions need. Infinities and NaN keep their meaning.
FASTMATH = {"contract", "reassoc", "arcp", "nsz"}


@cache
def can_run() -> bool:
    """Whether Numba runs with the threads of OpenMP.

    Its other threading layers would add threads beside those of torch, and the default one ends
    the process where two threads call it; a process that has started one keeps it.
    """
    try:
        return bool(numba.threading_layer() == "omp")
    except ValueError:  # it has not started any
        numba.config.THREADING_LAYER = "omp"
        return find_spec("numba.np.ufunc.omppool") is not None


def start_threads() -> None:
    """Start Numba's threads, and let torch have as many as before: they share a setting."""
    global _process
    if _process is None:
        num_threads = torch.get_num_threads()
        numba.set_num_threads(1)
        torch.set_num_threads(num_threads)
        _process = os.getpid()


def is_forked() -> bool:
    """Whether this process was forked after threads were started.

    The threads of OpenMP do not survive it: Numba ends a process that asks for them.
    """
    return _process != os.getpid()


def take_threads() -> None:
    """Let what this thread calls next have as many threads as torch has."""
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))


_process: int | None = None  # that has started threads
