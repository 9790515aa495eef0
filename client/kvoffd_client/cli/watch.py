"""Statistics again and again, for ``kvoffd-cli stats --watch``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from rich.live import Live

from kvoffd_client.cli.json_output import to_json
from kvoffd_client.cli.screen import emit, make_console, show
from kvoffd_client.cli.stats_page import StatsPage
from kvoffd_client.errors import DaemonUnavailable, RequestTimeout
from kvoffd_proto.messages import StatsReply
from kvoffd_proto.units import format_duration


class StatsSource(Protocol):
    """Whoever knows the counters; the AdminClient does."""

    def stats(self) -> StatsReply:
        """All counters. Raises DaemonUnavailable or RequestTimeout."""


def pages(
    source: StatsSource,
    interval_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[StatsPage]:
    """Yield a page now and at every interval. A daemon that went away is told on the page and waited for.

    Raises:
        DaemonUnavailable, RequestTimeout: there was no daemon in the first place.
    """
    page = StatsPage(source.stats())
    seen = time.strftime("%H:%M:%S")
    due_at = clock()
    while True:
        yield page
        due_at = max(due_at + interval_s, clock())
        sleep(max(0.0, due_at - clock()))
        try:
            page = StatsPage(source.stats(), before=page.now)
            seen = time.strftime("%H:%M:%S")
        except (DaemonUnavailable, RequestTimeout) as error:
            page = replace(page, notice=f"{error} Trying again; these numbers are of {seen}.")


def watch(source: StatsSource, interval_s: float, *, as_json: bool) -> None:
    """Show statistics until Ctrl-C: one page that redraws itself, or, into a pipe, one after the other."""
    console = make_console()
    if as_json:
        _print_json(pages(source, interval_s))
    elif not console.is_terminal:
        for index, page in enumerate(pages(source, interval_s)):
            if index:
                emit("")
            show(console, page)
    else:
        upcoming = pages(source, interval_s)
        first = next(upcoming)
        # On a screen of its own, drawn over and never cleared: nothing flickers, and the scrollback stays clean.
        with Live(_fitted(first, interval_s, console.height), console=console, screen=True, auto_refresh=False) as live:
            live.refresh()
            for page in upcoming:
                live.update(_fitted(page, interval_s, console.height), refresh=True)


def _print_json(upcoming: Iterator[StatsPage]) -> None:
    """One line for each new sample; none while the daemon does not answer."""
    for page in upcoming:
        if not page.notice:
            emit(to_json(page.now))


def _fitted(page: StatsPage, interval_s: float, lines: int) -> StatsPage:
    """The page for a screen of ``lines``, dated."""
    footnote = f"{time.strftime('%H:%M:%S')}, every {format_duration(interval_s)}; Ctrl-C ends"
    return replace(page, footnote=footnote, lines=lines)
