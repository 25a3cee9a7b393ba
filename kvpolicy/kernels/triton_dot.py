"""Products of matrices in Triton kernels, in its interpreter as well."""

import triton
import triton.language as tl

# Whether kernels run in Triton's interpreter, on a CPU (TRITON_INTERPRET=1).
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(left, right):
    """Product of two matrices, in fp32; tensor cores multiply 16-bit types."""
    if INTERPRETED:  # the interpreter multiplies the bits of bf16 as integers
        product = tl.dot(left.to(tl.float32), right.to(tl.float32))
    else:
        product = tl.dot(left, right, input_precision="ieee")
    return product.to(tl.float32)
