"""What Numba kernels of several packages share: threads, reordered sums, the exponential function.

Importing it needs the extra ``cpu``. Tasks run on the threads of OpenMP that torch uses.
"""

import os
from functools import cache
from importlib.util import find_spec

import numba
import numpy as np
import torch
from numba import njit

# Sums may be reordered, which vector instructions need. Infinities and NaN keep their meaning.
FASTMATH = {"contract", "reassoc", "arcp", "nsz"}


@njit(fastmath=FASTMATH, error_model="numpy")
def exp(numbers, most, powers):
    """Replace numbers by ``exp(number - most)`` with vector instructions.

    That of the C library takes one number at a time. The polynomial is that of the Cephes library
    (Moshier), whose error is below 1e-7.

    Args:
        numbers: ``[N]``, one behind another in memory.
        most: What is subtracted. Results are ``exp(88)`` at most, since more is no finite number.
        powers: Integers of 32 bits to compute in, ``[N]``.
    """
    two = powers.view(np.float32)
    for i in range(len(numbers)):
        x = numbers[i] - most
        # Smaller ones are 0 as well as this one is. NaN is neither smaller nor larger.
        x = np.float32(-87) if x < np.float32(-87) else x
        x = np.float32(88) if x > np.float32(88) else x
        n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
        r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
        y = np.float32(1.9875691500e-4)
        y = y * r + np.float32(1.3981999507e-3)
        y = y * r + np.float32(8.3334519073e-3)
        y = y * r + np.float32(4.1665795894e-2)
        y = y * r + np.float32(1.6666665459e-1)
        y = y * r + np.float32(5.0000001201e-1)
        powers[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
        numbers[i] = (y * r * r + r + np.float32(1)) * two[i]


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
