"""``make bench``: ``kvoffd-cli bench`` of lookups and of copies, over a daemon of its own; or ``loop``, see there."""

from __future__ import annotations

import sys

from kvoffd_client.cli import main
from kvoffd_client.testing import running_daemon
from tests.bench.loop import main as loop

if __name__ == "__main__":
    if sys.argv[1:2] == ["loop"]:
        sys.exit(loop(sys.argv[2:]))
    with running_daemon("1GiB") as directory:
        sys.exit(
            max(main(["bench", what, "--directory", str(directory), *sys.argv[1:]]) for what in ("lookup", "copy"))
        )
