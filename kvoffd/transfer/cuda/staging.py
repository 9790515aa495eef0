"""Small pieces by way of a buffer on the GPU: a kernel gathers or scatters them there, large copies do the rest.

Never run on a GPU, and off unless ``cuda_gather`` says otherwise: what a driver's CPU time for each piece costs must be
weighed against kernels that take turns with the engine's.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from kvoffd.transfer.cuda.driver import CudaDriver

KERNEL = Path(__file__).with_name("copy_pieces.ptx")
KERNEL_NAME = "copy_pieces"

# Below this a piece costs a driver's CPU more time than PCIe 5 takes to move it.
STAGED_BYTES = 32 << 10

# Destination, source and size.
_ENTRY_BYTES = 3 * 8


class Staging:
    """What one copy thread stages with: memory of the GPU for a step, and a table for the kernel for each in flight.

    All calls need the GPU's context. Raises CudaError, and then has nothing.

    Attributes:
        kernel: the driver's handle of the kernel.
        buffer: address of ``step_bytes`` of the GPU's memory.
        tables: where the first step's table begins, in host memory that the GPU reads; each is of ``step_pieces``.
    """

    def __init__(self, driver: CudaDriver, steps: int, step_bytes: int, step_pieces: int) -> None:
        with ExitStack() as undo:
            module, self.kernel = driver.load_kernel(KERNEL.read_text(), KERNEL_NAME)
            undo.callback(driver.unload, module)
            self.buffer = driver.allocate(step_bytes)
            undo.callback(driver.free, self.buffer)
            self.tables = driver.allocate_pinned(steps * step_pieces * _ENTRY_BYTES)
            undo.callback(driver.free_pinned, self.tables)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Free the memory; no copy may be under way. Raises CudaError."""
        self._undo.close()
