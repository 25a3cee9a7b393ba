"""Where Triton's kernels run in tests: in its interpreter on the CPU, or on a GPU.

A module of tests that imports this is skipped where they can run nowhere.
"""

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="the extra 'kernels' is not installed")

INTERPRETED = bool(triton.knobs.runtime.interpret)
if not INTERPRETED and not torch.cuda.is_available():
    reason = "without a GPU, kernels run if TRITON_INTERPRET=1 is set before the process starts"
    pytest.skip(reason, allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def _mend_the_interpreter() -> None:
    """Let NumPy 2.5 count with scalars of Triton's interpreter, which are arrays of one number.

    Triton 3.7 does so itself.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: number.handle.data.item())

    interpreter._patch_lang_tensor = patched


if INTERPRETED and triton.__version__.startswith("3.6."):
    _mend_the_interpreter()
