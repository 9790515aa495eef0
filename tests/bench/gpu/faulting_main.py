"""``kvoffd`` that spoils its own context on GPU 0 at SIGUSR1: ``faulting_main.py LIBRARY serve ...``."""

from __future__ import annotations

import signal
import sys
import threading

NOWHERE = 0x10
"""No allocation is there."""


def write_nowhere(library: str) -> None:
    """Run a kernel that writes where nothing is."""
    signal.sigwait({signal.SIGUSR1})
    driver = BenchDriver(library)
    with driver.context(driver.devices()[0]):  # the primary one, which the daemon uses too
        kernel, stream = driver.sweep(), driver.create_stream(urgent=False)
        try:
            driver.launch(kernel, 1, 32, (NOWHERE, 1 << 10), stream)
            driver.wait_stream(stream)
        except CudaError as error:
            print(f"the fault: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    # Not before: threads that these start would take the signal.
    from kvoffd.cli import main
    from kvoffd.config import ServerLimits
    from kvoffd_proto.cuda import CudaError
    from tests.bench.gpu.driver import BenchDriver

    threading.Thread(target=write_nowhere, args=(sys.argv[1],), daemon=True).start()
    sys.exit(main(sys.argv[2:], ServerLimits(pin_linger_s=0)))
