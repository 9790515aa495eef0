"""``kvoffd-cli stats``, ``health`` and ``events``: what the daemon does, and whether it works."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import typer
from rich.live import Live

from kvoffd_client.cli.console import make_console, print_line, print_page
from kvoffd_client.cli.json_output import print_json
from kvoffd_client.cli.stats_page import StatsPage
from kvoffd_client.cli.target import OPERATOR_WAIT_S, CliError, open_admin
from kvoffd_client.errors import DaemonUnavailable, RequestTimeout
from kvoffd_proto.stats import DaemonStats
from kvoffd_proto.units import UnitError, format_duration, parse_duration

WATCH_WAIT_S = 2.0
"""What follows the first page says so when it is late by so much; the next question waits longer."""
MIN_INTERVAL_S = 0.1
"""With a shorter interval the counters would show mostly the requests for them."""
HASH_DIGITS = 12
EVENT_CELLS, SPAN_CELLS = 80, 97
"""Width of an event's line without the label of its namespace, with one hash and with two."""


def watch(context: typer.Context, directory: Path | None, interval: str, *, json: bool) -> int:
    """Repeat the page."""
    interval_s = _interval_s(interval)
    with open_admin(context, directory) as admin:

        def read_stats(timeout_s: float) -> DaemonStats:
            admin.timeout_s = timeout_s
            return admin.stats()

        _watch(read_stats, interval_s, as_json=json)
    return 0


def _interval_s(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except UnitError as error:
        raise CliError(f"--interval: {error}.") from error
    if seconds < MIN_INTERVAL_S:
        raise CliError(f"--interval {text} is too short; give at least {MIN_INTERVAL_S:g} seconds.")
    return seconds


def _watch(read_stats: Callable[[float], DaemonStats], interval_s: float, *, as_json: bool) -> None:
    """Print statistics until Ctrl-C: on a terminal one page that redraws itself, in a pipe one page after the other."""
    console = make_console()
    pages = stats_pages(read_stats, interval_s)
    if as_json:
        for page in pages:
            if not page.notice:  # The daemon answered: this is a new sample.
                print_json(page.now)
    elif not console.is_terminal:
        for index, page in enumerate(pages):
            if index:
                print_line("")
            print_page(page, console)
    else:
        first = _page_for_screen(next(pages), interval_s, console.height)
        # On a screen of its own, drawn over and never cleared: nothing flickers, and the scrollback stays clean.
        live = Live(first, console=console, screen=True, auto_refresh=False)
        try:
            live.start(refresh=True)
            for page in pages:
                live.update(_page_for_screen(page, interval_s, console.height), refresh=True)
        finally:
            live.stop()  # also where Ctrl-C came while the first page was drawn


def stats_pages(
    read_stats: Callable[[float], DaemonStats],
    interval_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[StatsPage]:
    """Yield a page now and at every interval. While the daemon is away the last page is repeated with a notice.

    ``read_stats`` is told how many seconds it may wait: fewer while the daemon answers, so that a hung one shows soon.

    Raises:
        DaemonUnavailable, RequestTimeout: there was no daemon in the first place.
    """
    page = StatsPage(read_stats(OPERATOR_WAIT_S))
    wait_s = WATCH_WAIT_S
    answered_at = time.strftime("%H:%M:%S")
    due_at = clock()
    while True:
        yield page
        due_at = max(due_at + interval_s, clock())
        sleep(max(0.0, due_at - clock()))
        try:
            page = StatsPage(read_stats(wait_s))
            wait_s = WATCH_WAIT_S
            answered_at = time.strftime("%H:%M:%S")
        except (DaemonUnavailable, RequestTimeout) as error:
            wait_s = min(2 * wait_s, OPERATOR_WAIT_S)
            page = replace(page, notice=f"{error} Trying again; these numbers are of {answered_at}.")


def _page_for_screen(page: StatsPage, interval_s: float, lines: int) -> StatsPage:
    """Return the page with a dated footnote, for a screen of ``lines`` lines."""
    footnote = f"{time.strftime('%H:%M:%S')}, every {format_duration(interval_s)}; Ctrl-C ends"
    return replace(page, footnote=footnote, lines=lines)
