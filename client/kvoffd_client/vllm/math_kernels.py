"""Has the CPU's math functions choose their kernels in one thread, before several threads call one of them first.

PyTorch computes cosines, roots and the like on x86 with Intel's MKL, which chooses the kernel of a function at its
first call. In oneMKL 2024.2, which is in PyTorch's wheels, that call must not come from two threads at once: one of
them may compute its part with a kernel of low precision (https://github.com/pytorch/pytorch/issues/188792). A model's
table of rotary positions is such a first call, so about one engine in a thousand computed with a table that was off by
up to 1.5e-4, for its whole life. Its KV differs from that of equal engines, and so did its namespace.
"""

from __future__ import annotations

FUNCTIONS = (
    "acos",
    "asin",
    "atan",
    "cos",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "log",
    "log10",
    "log2",
    "sin",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
)
"""What PyTorch has MKL compute (aten/src/ATen/cpu/vml.h, IMPLEMENT_VML_MKL)."""


def choose_math_kernels() -> None:
    """Call each function with one number in each precision. It takes less than a millisecond, and may be repeated."""
    import torch  # here, since who imports the package needs no torch

    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(one)
