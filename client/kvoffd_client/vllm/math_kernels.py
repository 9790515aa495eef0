"""Makes the CPU's math functions choose their kernels in one thread, before several threads call them.

On x86 PyTorch computes cosines, roots and so on by Intel's MKL, which chooses kernels at the first call. In oneMKL
2024.2, which is in PyTorch's wheels, two threads must not make that call at once: one may compute its part with
a kernel of low precision (https://github.com/pytorch/pytorch/issues/188792). In a worker on CPU the first call is the
cosine of the table of rotary positions. With four threads on two busy CPUs, 7 of 13,200 processes computed a part of
such a table with errors of up to 1.5e-4; with two threads none of 4,510 did. The KV of an engine with such a table
differs from that of equal engines, so it would rightly get a namespace of its own.
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
"""Functions that PyTorch computes by MKL (aten/src/ATen/cpu/vml.h, IMPLEMENT_VML_MKL)."""


def choose_math_kernels() -> None:
    """Call each function with one number in each precision: about 60 ms the first time, then less than 1 ms."""
    import torch  # here, because importers of the package may lack torch

    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(one)
