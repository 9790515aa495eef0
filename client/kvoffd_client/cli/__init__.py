"""The administrator's command line: ``kvoffd-cli``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvoffd_client.cli.text import open_closed_streams, write_any_locale


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``kvoffd-cli`` with ``arguments`` (the process's own where None); return the exit status.

    See ``app.main``. Probes run ``health`` every few seconds: it imports nothing of the rest.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    open_closed_streams()
    write_any_locale()
    if given[:1] == ["health"]:
        from kvoffd_client.cli.health import quick_health

        try:
            status = quick_health(given)
        except BrokenPipeError:
            status = None
        if status is not None:
            return status
    from kvoffd_client.cli.app import main as run

    return run(given)
