"""The command ``kvoffd``, also as ``python -m kvoffd``."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run ``kvoffd``; return its exit status."""
    # Ctrl-C ends the process without a traceback while it is still importing. A handler that ignores it stays.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvoffd.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
