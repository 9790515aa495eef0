"""``make bench``: ``kvoffd-cli bench`` of lookups and of copies, over a daemon of its own."""

from __future__ import annotations

import sys

from kvoffd_client.cli import main
from kvoffd_client.testing import running_daemon

if __name__ == "__main__":
    with running_daemon("1GiB") as directory:
        sys.exit(
            max(main(["bench", what, "--directory", str(directory), *sys.argv[1:]]) for what in ("lookup", "copy"))
        )
