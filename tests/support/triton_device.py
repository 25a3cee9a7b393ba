"""Where Triton's kernels run in tests: in its interpreter on the CPU, or on a GPU.

A module of tests that imports this is skipped where they can run nowhere.
"""

import pytest
import torch

triton = pytest.importorskip("triton", reason="the extra 'kernels' is not installed")

INTERPRETED = bool(triton.knobs.runtime.interpret)
if not INTERPRETED and not torch.cuda.is_available():
    reason = "without a GPU, kernels run if TRITON_INTERPRET=1 is set before the process starts"
    pytest.skip(reason, allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
