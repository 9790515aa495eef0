"""A GPU that computes as one does that decodes: kernel after kernel reads and writes much more than its cache holds.

Where such a loop does not feel the daemon's copies, which take their share of the same memory's bandwidth, an engine
will not either.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from kvoffd_client.bench.gpu_driver import BenchDriver

BUFFER_BYTES = 256 << 20
KERNELS = 16
"""In a step, which is waited for: some milliseconds."""
_BLOCKS, _THREADS = 1024, 256
_WORD_BYTES = 16
_SWEEP = """
.version 6.0
.target sm_60
.address_size 64

// Every 16 bytes, as four floats f, become 0.5 f + 1.
.visible .entry sweep(.param .u64 data, .param .u64 words)
{
    .reg .pred %done;
    .reg .b32 %block, %blocks, %threads, %thread;
    .reg .b64 %base, %words, %word, %step, %at;
    .reg .f32 %a, %b, %c, %d;

    ld.param.u64 %base, [data];
    ld.param.u64 %words, [words];
    cvta.to.global.u64 %base, %base;
    mov.u32 %block, %ctaid.x;
    mov.u32 %blocks, %nctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mul.wide.u32 %step, %blocks, %threads;
    mul.wide.u32 %word, %block, %threads;
    cvt.u64.u32 %at, %thread;
    add.u64 %word, %word, %at;
NEXT:
    setp.ge.u64 %done, %word, %words;
    @%done bra END;
    shl.b64 %at, %word, 4;
    add.u64 %at, %base, %at;
    ld.global.v4.f32 {%a, %b, %c, %d}, [%at];
    fma.rn.f32 %a, %a, 0f3F000000, 0f3F800000;
    fma.rn.f32 %b, %b, 0f3F000000, 0f3F800000;
    fma.rn.f32 %c, %c, 0f3F000000, 0f3F800000;
    fma.rn.f32 %d, %d, 0f3F000000, 0f3F800000;
    st.global.v4.f32 [%at], {%a, %b, %c, %d};
    add.u64 %word, %word, %step;
    bra NEXT;
END:
    ret;
}
"""


class Compute:
    """Buffer and kernel on GPU number ``ordinal``; a first step is done. Raises KvoffdClientError."""

    def __init__(self, ordinal: int) -> None:
        self._driver = driver = BenchDriver()
        device = driver.device(ordinal)
        with ExitStack() as undo:
            undo.enter_context(driver.context(device))
            self._kernel = driver.load_kernel(_SWEEP, "sweep")
            self._buffer = driver.allocate(BUFFER_BYTES)
            undo.callback(driver.free, self._buffer)
            self._stream = driver.create_stream()
            undo.callback(driver.destroy_stream, self._stream)
            self.step()
            self._undo = undo.pop_all()

    def step(self) -> None:
        """Compute, and wait for the end."""
        for _ in range(KERNELS):
            arguments = (self._buffer, BUFFER_BYTES // _WORD_BYTES)
            self._driver.launch(self._kernel, _BLOCKS, _THREADS, arguments, self._stream)
        self._driver.wait_stream(self._stream)

    def close(self) -> None:
        """Give everything back."""
        self._undo.close()

    def __enter__(self) -> Compute:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
