"""``kvoffd-cli stats``, ``health`` and ``events``: what the daemon does, and whether it works."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated

import typer
from rich.live import Live

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.cli.console import PIPE_LIST_CELLS, make_console, print_line, print_page, short_fingerprint
from kvoffd_client.cli.health import health_lines, health_status
from kvoffd_client.cli.json_objects import Event, Events
from kvoffd_client.cli.json_output import print_json
from kvoffd_client.cli.stats_page import StatsPage
from kvoffd_client.cli.target import OPERATOR_WAIT_S, CliError, Directory, Json, local_directory, open_admin
from kvoffd_client.errors import DaemonUnavailable, RequestTimeout
from kvoffd_proto.events import (
    KV_TOPIC_PREFIX,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
)
from kvoffd_proto.stats import StatsReply
from kvoffd_proto.units import UnitError, format_duration, parse_duration, plural, printable

WATCH_WAIT_S = 2.0
"""What follows the first page says so when it is late by so much; the next question waits longer."""
MIN_INTERVAL_S = 0.1
"""With a shorter interval the counters would show mostly the requests for them."""
HASH_DIGITS = 12
EVENT_CELLS, SPAN_CELLS = 80, 97
"""Width of an event's line without the label of its namespace, with one hash and with two."""


def stats(
    context: typer.Context,
    directory: Directory = None,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat the page.")] = False,
    interval: Annotated[
        str, typer.Option("--interval", metavar="DURATION", help="Time between two pages, such as 500ms or 5s.")
    ] = "1s",
    json: Json = False,
) -> int:
    """Show everything the daemon counts.

    The page has pool use, speeds and hit ratios over the last 10, 100 and 1,000 seconds and since the start, copies,
    lookups and their latency, namespaces, and errors. With --watch and --json, each page is one line.

    A key that an engine asks for is a hit of the pool, or of the disk when a disk has it and begins to bring it up,
    or a miss. What a disk could not bring up after all is counted as failed in the row of the disks. Of benches the
    copies and their own namespaces' rows tell, and nothing else.
    """
    interval_s = _interval_s(interval)
    with open_admin(context, directory) as admin:
        if watch:

            def read_stats(timeout_s: float) -> StatsReply:
                admin.timeout_s = timeout_s
                return admin.stats()

            _watch(read_stats, interval_s, as_json=json)
        elif json:
            print_json(admin.stats())
        else:
            print_page(StatsPage(admin.stats()))
    return 0


def _interval_s(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except UnitError as error:
        raise CliError(f"--interval: {error}.") from error
    if seconds < MIN_INTERVAL_S:
        raise CliError(f"--interval {text} is too short; give at least {MIN_INTERVAL_S:g} seconds.")
    return seconds


def _watch(read_stats: Callable[[float], StatsReply], interval_s: float, *, as_json: bool) -> None:
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
    read_stats: Callable[[float], StatsReply],
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


def health(
    context: typer.Context,
    directory: Directory = None,
    live: Annotated[bool, typer.Option("--live", help="Exit status 0 when the daemon answers at all.")] = False,
    ready: Annotated[bool, typer.Option("--ready", help="Exit status 0 when it takes sessions and jobs.")] = False,
    json: Json = False,
) -> int:
    """Ask whether the daemon works.

    The answer comes through the loop that serves engines, and says ok, or degraded or down with the reasons. --live and
    --ready are for probes: what a restart does not mend must not make a service manager restart the daemon.

    Exit status: 0 ok, 1 degraded, 2 down or not reachable; 0 with --live when it answers, with --ready when it serves.
    """
    if live and ready:
        raise CliError("--live and --ready ask for two things; give one of them.")
    with open_admin(context, directory) as admin:
        reply = admin.health()
    if json:
        print_json(reply)
    else:
        for line in health_lines(reply):
            print_line(line)
    return health_status(reply, live=live, ready=ready)


def events(context: typer.Context, directory: Directory = None, json: Json = False) -> int:
    """Print KV cache events as they happen.

    Blocks are stored in the pool and removed from it, written to a disk and dropped from it. Until Ctrl-C. With --json,
    one object per line; messages that did not arrive are reported on stderr.
    """
    labels: dict[bytes, str] = {}
    last: dict[bytes, int] = {}
    console = make_console(pipe_cells=PIPE_LIST_CELLS)
    with AdminClient(local_directory(context, directory)) as admin:
        admin.health()  # An absent daemon is an error here, not something to wait for.
        for topic, sequence, batch in admin.events():
            if gap := describe_gap(sequence, last.get(topic)):
                print(f"kvoffd-cli: {gap}", file=sys.stderr, flush=True)
            last[topic] = sequence
            if topic_fingerprint(topic) not in labels:
                labels |= {item.namespace: item.label for item in admin.namespaces().namespaces}
            if json:
                print_json(event_object(topic, sequence, batch, labels))
            else:
                for line in event_lines(topic, sequence, batch, labels, console.width):
                    print_line(line)
    return 0


def topic_fingerprint(topic: bytes) -> bytes:
    """Return the namespace's fingerprint in a topic of KV events; empty where there is none."""
    try:
        return bytes.fromhex(topic.removeprefix(KV_TOPIC_PREFIX).decode("ascii"))
    except ValueError:
        return b""


def describe_gap(sequence: int, last: int | None) -> str:
    """Return a sentence where messages between ``last`` and ``sequence`` did not arrive, else an empty string."""
    if last is None or sequence == last + 1:
        return ""
    if sequence <= last:
        return "The daemon was restarted, or the namespace opened anew: its events count from the start again."
    missing = sequence - last - 1
    return f"{missing} event message{plural(missing)} before number {sequence} did not arrive here."


def event_lines(
    topic: bytes, sequence: int, batch: EventBatch, labels: Mapping[bytes, str], cells: int = 1000
) -> Iterator[str]:
    """Yield one line for each event: time, sequence number, namespace, what happened.

    On a screen of few ``cells`` the label is cut or goes, and of the hashes only the first is shown.
    """
    fingerprint = topic_fingerprint(topic)
    label = printable(labels.get(fingerprint, ""))
    span = cells >= SPAN_CELLS
    most = min(max(map(len, labels.values()), default=0), cells - (SPAN_CELLS if span else EVENT_CELLS))
    label = f" {label if len(label) <= most else label[: most - 1] + '…':<{most}}" if most > 1 else ""
    name = f"{short_fingerprint(fingerprint)}{label}".rstrip()
    clock = time.strftime("%H:%M:%S", time.localtime(batch.ts))
    milliseconds = int(batch.ts % 1 * 1000)
    for event in batch.events:
        yield f"{clock}.{milliseconds:03}  {sequence:>8}  {name}  {_event_text(event, span=span)}"


def _event_text(event: KvEvent, *, span: bool) -> str:
    if isinstance(event, AllBlocksCleared):
        return "cleared  all blocks"
    here, below = ("stored ", "written") if isinstance(event, BlockStored) else ("removed", "dropped")
    word = below if event.medium == MEDIUM_STORAGE else here
    hashes = event.block_hashes
    group = f"group {event.group_idx}  "
    first, last = (block_hash.hex()[:HASH_DIGITS] for block_hash in (hashes[0], hashes[-1])) if hashes else ("", "")
    shown = f"{first} to {last}" if span and first != last else first
    return f"{word}  {group}{len(hashes):>6} block{plural(len(hashes)) or ' '}  {shown}".rstrip()


def event_object(topic: bytes, sequence: int, batch: EventBatch, labels: Mapping[bytes, str]) -> Events:
    fingerprint = topic_fingerprint(topic)
    return Events(sequence, batch.ts, fingerprint, labels.get(fingerprint), [_one_event(one) for one in batch.events])


def _one_event(event: KvEvent) -> Event:
    if isinstance(event, AllBlocksCleared):
        return Event("cleared")
    if isinstance(event, BlockRemoved):
        return Event("removed", event.group_idx, event.medium, None, event.block_hashes)
    return Event("stored", event.group_idx, event.medium, event.block_size, event.block_hashes)
