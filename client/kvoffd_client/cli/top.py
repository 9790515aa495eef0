"""``kvoffd-cli top``: the daemon's activity on one screen, redrawn every second."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from socket import gethostname
from typing import Annotated, Any, NoReturn
from urllib.parse import urlsplit

import typer
from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvoffd_client.admin_client import read_stats
from kvoffd_client.cli.format import WIDE_CELLS, Line, make_console, table_of, wrapped
from kvoffd_client.cli.show import engine_table, labels_of
from kvoffd_client.cli.stats import (
    answer_time,
    policy_lines,
    pool_bar,
    saved_time,
    sources_of,
    tier_details,
    token_count,
)
from kvoffd_client.cli.target import CliError, Directory, Url, check_one_daemon, open_admin, parse_option
from kvoffd_client.errors import KvoffdClientError
from kvoffd_proto.admin import HealthLevel
from kvoffd_proto.engines import Engine, engines_of
from kvoffd_proto.findings import failing_copies
from kvoffd_proto.stats import DaemonStats, NamespaceStats, Traffic, Window, reason_name
from kvoffd_proto.units import (
    exact_duration,
    format_count,
    format_duration,
    format_rate,
    format_size,
    parse_duration,
    percent,
    plural,
    printable,
)

MIN_INTERVAL_S = 0.1
MAX_SAMPLES = 900
"""Fifteen minutes at the default interval."""
NOW_S = 3.0
"""Period of the averages in ``now``."""
ANSWER_S = 2.0
LATER_ANSWER_S = 10.0
"""Time limit after a missing answer."""
LOOK_S = 0.25
"""Interval at which the terminal's size is checked."""
SHOWN_SIZES = ("0.5", "1", "2", "10")
VIEWS = ("all", "clients", "tiers", "policy")
HELP = (
    "1 all, 2 clients, 3 tiers, 4 policy, h or ? this page",
    "s  sort the namespaces by another column; p  pause; q  quit",
    "",
    "tokens/s   tokens of prompts that engines reported; percentages are of these",
    "computed   computed by the engine",
    "own        in the engine's own prefix cache",
    "pool ...   loaded, by the place from which they came; LOADED: all of these",
    "key        the hash of one block",
    "Missed     keys not found or not loaded, of those asked for;",
    "           `kvoffd-cli stats --misses` has the reasons",
    "now        the last 3 seconds",
    "Found      of the tokens that engines lacked, those in the pool before the",
    "           first gap, without disks and stores; lru: estimates for sizes",
    "pinned     under a lease or a copy: it cannot be evicted",
    "retained   evicted after others, as clients' hints ask",
)
SORTS: dict[str, Callable[[Window], float]] = {
    "TOK/S": lambda now: now.all_prompt_tokens,
    "SIZE": lambda now: 0,
    "COMPUTED": lambda now: now.prompt_tokens.get("computed", 0),
}
"""Sort keys of the namespaces, before their size."""
PAYS = {True: ("OK, paying off", "bold green"), False: ("OK, not paying off", "bold yellow"), None: ("OK", "bold")}
SHORT_SOURCES = {"engine": "own"}
"""Titles of sources of tokens, where they are long: the engines' own caches."""
SPARKS = " ▁▂▃▄▅▆▇█"
CHARTS, MAX_CHART = 2, 8
"""Number of charts, and most lines of one."""
PEAK_CELLS = 28
"""Columns to the right of a chart, for its peak."""
MAX_REASONS = 8
"""Reasons of misses that a high screen shows."""


@dataclass(frozen=True)
class Reading:
    """Statistics of the daemon at one time, with ``engines`` for the view that shows them."""

    stats: DaemonStats
    engines: Sequence[Engine] | None = None
    over_http: bool = False
    """Whether it came over HTTP, which has statistics only."""


Read = Callable[[str, float], Reading]
"""Function that reads the daemon for a view, within a time limit in seconds. Raises KvoffdClientError."""


class History:
    """Samples of the last seconds and rates of the last minutes. A restart of the daemon clears it."""

    def __init__(self) -> None:
        self._latest: deque[DaemonStats] = deque()
        """Samples of the last ``NOW_S``, oldest first, and before them the latest older one, if any."""
        self._before: dict[str, NamespaceStats] = {}
        """Namespaces in the first sample, by id."""
        self.rates: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)
        """Tokens loaded and bytes stored per second, between consecutive samples."""

    def add(self, stats: DaemonStats) -> None:
        """Add a sample. Times are the daemon's: late answers, or repeats over HTTP, change no rate."""
        if self._latest and stats.uptime_seconds < self._latest[-1].uptime_seconds:
            self._latest.clear()
            self.rates.clear()
        if self._latest:
            last, now = self._latest[-1].since_start, stats.since_start
            seconds = stats.uptime_seconds - self._latest[-1].uptime_seconds
            if not seconds:
                return
            tokens, stored = now.loaded_tokens - last.loaded_tokens, now.stored_bytes - last.stored_bytes
            self.rates.append((tokens / seconds, stored / seconds))
        self._latest.append(stats)
        while len(self._latest) > 2 and self._latest[1].uptime_seconds <= stats.uptime_seconds - NOW_S:
            self._latest.popleft()
        self._before = {one.id: one for one in self._latest[0].namespaces}

    def now(self) -> Window:
        return self._gained(self._latest[-1].since_start, self._latest[0].since_start)

    def now_of(self, namespace: NamespaceStats) -> Window:
        return self._gained(namespace, self._before.get(namespace.id, NamespaceStats()))

    def _gained(self, later: Traffic, earlier: Traffic) -> Window:
        """Return the traffic between two samples."""
        counts: dict[str, Any] = {}
        for name in Traffic.__struct_fields__:
            now, before = getattr(later, name), getattr(earlier, name)
            counts[name] = (
                {key: n - before.get(key, 0) for key, n in now.items()} if isinstance(now, dict) else now - before
            )
        # A lookup is counted before its load, so this is negative if loads of earlier lookups ended.
        counts["not_needed_keys"] = max(0, counts["not_needed_keys"])
        counts["asked_keys"] = counts["loaded_keys"] + counts["not_needed_keys"] + sum(counts["misses"].values())
        return Window(seconds=self._latest[-1].uptime_seconds - self._latest[0].uptime_seconds, **counts)


# --- the screen -------------------------------------------------------------------------------------


@dataclass
class Screen:
    """State of the screen: the latest reading, its history, and what keys have selected."""

    interval_s: float
    reading: Reading | None = None
    history: History = field(default_factory=History)
    view: str = VIEWS[0]
    sort: str = "TOK/S"
    paused: bool = False
    no_answer: str = ""
    """Sentence that says since when and why the daemon does not answer; empty while it does."""
    clock: str = ""
    host: str = field(default_factory=gethostname)
    """The daemon's."""

    def page(self, console: Console) -> Layout:
        """Return the whole screen, most important lines first, because low terminals cut the end."""
        assert self.reading is not None
        stats, width = self.reading.stats, console.width
        body: list[RenderableType]
        if self.reading.over_http and self.view == "clients":
            body = [Text(), line("Shown only on the daemon's own machine: HTTP has statistics only.", "dim")]
        elif self.view == "clients" and self.reading.engines is None:
            body = [Text(), Text("Paused." if self.paused else "No answer yet.")]
        elif self.view == "clients":
            body = _clients(self.reading.engines or (), width)
        elif self.view == "tiers":
            body = [Text(), *_lines(tier_details(stats), width)]
        elif self.view == "policy":
            body = [Text(), *_lines(policy_lines(stats), width)]
        elif self.view == "help":
            body = [Text(), *_lines(HELP, width)]
        else:
            body = self._all(stats, console)
        away = [Text(printable(self.no_answer), "bold red")] if self.no_answer else []
        page = Layout()
        page.split_column(
            Layout(self._header(stats), size=1), Layout(Group(*away, *body)), Layout(self._keys(width), size=1)
        )
        return page

    def _header(self, stats: DaemonStats) -> RenderableType:
        level, problems = stats.health, len(stats.health_problems)
        words, style = PAYS[stats.paying_off]
        if level is not HealthLevel.OK:
            words = f"{level.value.upper()}: {problems} problem{plural(problems)}"
            style = "bold yellow" if level is HealthLevel.DEGRADED else "bold red"
        words, style = ("NO ANSWER", "bold red") if self.no_answer else (words, style)
        up = format_duration(stats.uptime_seconds)
        left = line("kvoffd  ", "bold").append(words, style)
        left.append(printable(f"  {stats.version}  {self.host}  up {up}  {stats.policy}"))
        return _ends(left, Text(f" {'PAUSED ' * self.paused}{self.clock}", "reverse" * self.paused))

    def _keys(self, width: int) -> RenderableType:
        names = [f"{number} {name}" for number, name in enumerate(VIEWS, 1)]
        keys = [*names, f"s sort: {self.sort.lower()}", "p pause", "h help", "q quit"]
        interval = exact_duration(self.interval_s)
        fits = len("  ".join(keys)) + len(interval) <= width
        return _ends(line(("  " if fits else " ").join(keys)), Text(interval if fits else ""), "reverse")

    def _all(self, stats: DaemonStats, console: Console) -> list[RenderableType]:
        """Return the view with all. A high screen's ``free`` lines are given, in this order, to whole sentences and a
        table of misses, to engines, and to higher charts."""
        width, now = console.width, self.history.now()
        # Without the lines of header, keys and a daemon that does not answer.
        free = console.height - (3 if self.no_answer else 2)
        tells_verdict = bool(stats.verdict) and not stats.paying_off
        problems = [(f"! {one.reason}: {one.sentence}", "yellow") for one in stats.health_problems[:3]]
        head: list[RenderableType] = [
            *pool_bar(stats.pool, width),
            _saved(stats),
            *(_lines([(stats.verdict, PAYS[stats.paying_off][1])], width) if tells_verdict else ()),
        ]
        tail: list[RenderableType] = [*_curve(stats), *_lookups(stats, now), *_hints(stats)]
        below: list[RenderableType] = [*_tier_summary(stats), *self._namespaces(stats, width)]
        middle: list[RenderableType] = [
            *(line(*one) for one in problems),
            _rates(stats, now, width),
            line(f"Missed  {_misses(stats)}"),
        ]
        free -= _height(console, [*head, *middle, *tail, *below]) + CHARTS  # a line for each chart
        # ``middle`` without cuts, and with a table in the place of the line of misses.
        more: list[RenderableType] = [*_lines(problems, width), *middle[len(problems) : -1], *_miss_table(stats)]
        if (added := _height(console, more) - _height(console, middle)) <= free:
            middle, free = more, free - added
        engines = _engines(stats)
        if engines and len(engines) <= free:
            below, free = [*below, *engines], free - len(engines)
        return [*head, *middle, *tail, *self._charts(width, 1 + min(MAX_CHART - 1, max(0, free) // CHARTS)), *below]

    def _charts(self, width: int, rows: int) -> list[Text]:
        """Return the charts of loads and stores, each ``rows`` lines high."""
        cells = width - len("Loaded  ") - PEAK_CELLS
        shown = list(self.history.rates)[-cells:] if cells > 0 else []
        tokens, stored = ([one[at] for one in shown] for at in (0, 1))
        most_tokens, most_stored = (max(rates, default=0.0) for rates in (tokens, stored))
        peaks = f"{format_count(round(most_tokens))} tokens/s", format_rate(most_stored)
        lines = []
        for name, rates, peak in zip(("Loaded", "Stored"), (tokens, stored), peaks, strict=True):
            first, *rest = chart(rates, rows)
            lines.append(line(f"{name}  {first.rjust(cells)}  peak {peak}"))
            lines += [line(f"        {one.rjust(cells)}") for one in rest]
        return lines

    def _namespaces(self, stats: DaemonStats, width: int) -> list[RenderableType]:
        """Return the namespaces in the selected order, then by size."""
        if not stats.namespaces:
            return [Text(), line("No namespace: no engine has connected yet.", "dim")]
        now_of = {one.id: self.history.now_of(one) for one in stats.namespaces}
        rank = SORTS[self.sort]
        rows = [
            _namespace_row(one, now_of[one.id])
            for one in sorted(stats.namespaces, key=lambda one: (-rank(now_of[one.id]), -one.ready_bytes))
        ]
        titles, cells = fitted_columns(COLUMNS, rows, width, ("<MOST MISSED ", ">   OWN", "<ID          "))
        table = table_of(titles, cells, gap=1)
        table.expand, table.header_style = width <= WIDE_CELLS, "bold reverse"
        name = table.columns[0]
        name.ratio, name.no_wrap, name.overflow = 1, True, "ellipsis"
        return [Text(), table]


def _height(console: Console, body: Sequence[RenderableType]) -> int:
    """Return the number of lines that these parts take."""
    return len(console.render_lines(Group(*body), console.options.update(height=None), pad=False)) if body else 0


MIN_NAME_CELLS = 10
"""Least width of the first column of a table, for which others are left out."""


def fitted_columns(
    titles: Sequence[str], rows: Sequence[Sequence[str]], width: int, expendable: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Return the columns that fit ``width`` with a cell between them; those of ``expendable`` go first, in its order.

    The first column may be cut down to ``MIN_NAME_CELLS``.
    """
    cells = {title: max(map(len, (title.lstrip("<>"), *column))) for title, *column in zip(titles, *rows, strict=True)}
    cells[titles[0]] = min(MIN_NAME_CELLS, cells[titles[0]])
    left = list(titles)
    for title in expendable:
        if sum(cells[one] + 1 for one in left) - 1 > width and title in left:
            left.remove(title)
    kept = [titles.index(one) for one in left]
    return left, [[row[at] for at in kept] for row in rows]


COLUMNS = "NAMESPACE", "<ID          ", ">     SIZE", ">   TOK/S", ">COMPUTED", ">   OWN", ">LOADED", "<MOST MISSED "
"""Columns at least as wide as their titles. The name gets the remaining width; its id is never cut."""


def _namespace_row(one: NamespaceStats, now: Window) -> tuple[str, ...]:
    missed = sum(now.misses.values())
    return (
        printable(one.model).rpartition("/")[2],
        one.id,
        _size(one),
        *_token_shares(now, ("computed", "engine")),
        percent(now.loaded_prompt_tokens, now.all_prompt_tokens),
        reason_name(max(now.misses, key=now.misses.__getitem__)) if missed else "-",
    )


def line(words: str, style: str = "") -> Text:
    """Return ``words`` on one line, cut at its end and without control characters."""
    return Text(printable(words), style, no_wrap=True, overflow="ellipsis")


def _ends(left: Text, right: Text, style: str = "") -> Table:
    """Return a line with words at both ends."""
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, right, style=style)
    return grid


def chart(values: Sequence[float], rows: int) -> list[str]:
    """Return ``rows`` lines of a bar chart, the highest first: one character per value, from 0 to the largest."""
    most, steps = max(values, default=0.0), len(SPARKS) - 1
    heights = [max(1, round(value / most * steps * rows)) if value > 0 else 0 for value in values]
    return [
        "".join(SPARKS[min(steps, max(0, height - steps * below))] for height in heights)
        for below in reversed(range(rows))
    ]


def _saved(stats: DaemonStats) -> Text:
    total, life = stats.since_start, stats.lifetime
    words = f"Saved   prefill {saved_time(total)}, {token_count(total.loaded_tokens, total.loaded_keys)} tokens loaded"
    if life.saved_seconds > total.saved_seconds:
        words += f"; {format_duration(life.saved_seconds)} in all"
    return line(words, "bold")


def _rates(stats: DaemonStats, now: Window, width: int) -> Table:
    windows = {"now": now, "1 min": stats.last_minute, "1 hour": stats.last_hour, "start": stats.since_start}
    sources = sources_of(stats.since_start)
    names = [f">{SHORT_SOURCES.get(name, name):>6}" for name in sources]
    every = "<", ">tokens/s", *names, ">loaded/s", ">stored/s"
    cells = [
        (
            name,
            *_token_shares(one, sources),
            _bytes(one.loaded_bytes, one),
            _bytes(one.stored_bytes, one),
        )
        for name, one in windows.items()
    ]
    titles, rows = fitted_columns(every, cells, width, (">stored/s", ">loaded/s"))
    table = table_of(titles, rows, gap=1)
    table.header_style, table.rows[0].style = "dim", "bold"
    return table


def _rate(count: float, window: Window) -> str:
    return format_count(round(count / window.seconds)) if window.seconds else "-"


def _token_shares(one: Window, sources: Iterable[str]) -> Iterator[str]:
    """Yield the rate of prompts' tokens, and the share of each source."""
    total = one.all_prompt_tokens
    yield "-" if one.asked_keys and not total else _rate(total, one)
    for source in sources:
        yield percent(one.prompt_tokens.get(source, 0), total)


def _bytes(count: float, window: Window) -> str:
    return format_rate(count / window.seconds).removesuffix("/s") if window.seconds else "-"


def _lookups(stats: DaemonStats, now: Window) -> list[Text]:
    queued = stats.store.queued_jobs + stats.load.queued_jobs
    failed = sum(copies.last_hour_failed_jobs for _, copies in failing_copies(stats))
    words = f"Lookups {_rate(now.lookups, now)}/s  queued copies {format_count(queued)}  since start:"
    failures = f"! {format_count(failed)} copy jobs failed in the last hour: see `kvoffd-cli doctor --all`"
    return [line(f"{words} {stats.lookup_seconds.summary()}"), *([line(failures, "yellow")] if failed else [])]


def _hints(stats: DaemonStats) -> list[Text]:
    """Return what hints retain, and what they did since the start; nothing if there were none."""
    total = stats.since_start
    counts = {"released": total.released_blocks, "prefetched": total.prefetched_keys, "unknown": total.unknown_hints}
    words = [f"{name} {format_count(count)}" for name, count in counts.items() if count]
    if total.retained_blocks:
        found = f"keys found in it {format_count(total.retained_found_keys)}"
        words = [f"retained {format_size(stats.pool.retained_bytes)}", found, *words]
    return [line(f"Hints   {'  '.join(words)}")] if words else []


def _misses(stats: DaemonStats) -> str:
    """Return the reasons of misses in the last hour, or since the start if it had none."""
    window = stats.last_hour if stats.last_hour.misses else stats.since_start
    largest = sorted(window.misses.items(), key=lambda item: -item[1])
    words = "  ".join(f"{reason_name(reason)} {percent(keys, window.asked_keys)}" for reason, keys in largest if keys)
    return f"{words or 'nothing'}{' in the last hour' * (window is stats.last_hour)}"


def _miss_table(stats: DaemonStats) -> list[RenderableType]:
    """Return the reasons of misses in lines of their own, the most frequent first."""
    windows = stats.last_minute, stats.last_hour, stats.since_start
    largest = sorted(stats.since_start.misses.items(), key=lambda item: -item[1])
    rows = [
        (reason_name(reason), *(percent(one.misses.get(reason, 0), one.asked_keys) for one in windows))
        for reason, keys in largest[:MAX_REASONS]
        if keys
    ]
    if not rows:
        return [line("Missed  nothing")]
    table = table_of(("Missed", "> 1 min", ">1 hour", ">  start"), rows, gap=1)
    table.header_style = "dim"
    return [table]


def _engines(stats: DaemonStats) -> list[RenderableType]:
    """Return a line for each engine, with its namespace, after an empty one; nothing without engines."""
    lines = [
        line(f"Engine  {engine}  {one.model.rpartition('/')[2]} {one.id}")
        for one in stats.namespaces
        for engine in one.engines
    ]
    return [Text(), *lines] if lines else []


def _curve(stats: DaemonStats) -> list[Text]:
    curve = stats.curve
    if curve is None or not curve.asked_tokens:
        return []
    ratios = [(size, curve.lru_hit_ratio[size]) for size in SHOWN_SIZES if size in curve.lru_hit_ratio]
    words = ", ".join(f"{size}x {100 * ratio:.0f} %" for size, ratio in ratios)
    own = percent(curve.found_tokens, curve.asked_tokens)
    return [line(f"Found   {own} of tokens; lru {words}")]


def _size(one: NamespaceStats) -> str:
    if one.quota_bytes is None:
        return format_size(one.ready_bytes)
    both = one.ready_bytes, one.quota_bytes
    return "/".join(format_size(each).replace(" ", "").removesuffix("iB") for each in both)


def _tier_summary(stats: DaemonStats) -> list[Text]:
    lines = []
    for disk in stats.disks:
        used = f"{percent(disk.used_bytes, disk.size_bytes)} of {format_size(disk.size_bytes)}"
        copied = f"read {format_size(disk.read_bytes)}  written {format_size(disk.written_bytes)}"
        words = f"Disk  {disk.directory}  {disk.state}  {used}  {copied}"
        lines.append(line(words, "" if disk.up else "red"))
    for store in stats.shared:
        found = f"found {percent(store.found_keys, store.asked_keys)}"
        words = f"Store {store.url}  {'up' if store.up else 'down'}  {answer_time(store)}  {found}"
        lines.append(line(words, "" if store.up else "red"))
    return [Text(), *lines] if lines else []


def _clients(engines: Sequence[Engine], width: int) -> list[RenderableType]:
    if not engines:
        return [Text(), Text("No engine is connected.")]
    note = line("pinned: pool memory under its leases.", "dim")
    return [Text(), engine_table(engines, width), Text(), note]


def _lines(lines: Iterable[Line], width: int) -> list[RenderableType]:
    """Return these lines wrapped to the width."""
    return [Text(text, style) for text, style in wrapped(lines, width)]


# --- the loop ---------------------------------------------------------------------------------------


def top(
    interval: Annotated[str, typer.Option("--interval", metavar="DURATION", help="Time between updates.")] = "1s",
    directory: Directory = None,
    url: Url = "",
) -> int:
    """Show what the daemon does, live.

    1 to 4 select the view, h shows keys and explanations, q quits.
    """
    interval_s = parse_option("--interval", interval, parse_duration)
    if interval_s < MIN_INTERVAL_S:
        raise CliError(f"--interval {interval!r} is too short; the minimum is {format_duration(MIN_INTERVAL_S)}.")
    check_one_daemon(directory, url)
    console = make_console()
    if not console.is_terminal or console.is_dumb_terminal:
        raise CliError("top needs a terminal; `kvoffd-cli stats` prints its numbers, --json for programs.")
    with open_admin(directory) as admin:
        admin.on_silence = lambda: None  # the screen shows it

        def read(view: str, timeout_s: float) -> Reading:
            if url:
                return Reading(read_stats(url, timeout_s), over_http=True)
            admin.timeout_s = timeout_s
            if view != "clients":
                return Reading(admin.stats())
            return Reading(admin.stats(), engines_of(admin.sessions().sessions, labels_of(admin)))

        host = urlsplit(url if "://" in url else f"//{url}").hostname or gethostname()
        return run(read, interval_s, console, host)


def run(read: Read, interval_s: float, console: Console, host: str) -> int:
    """Draw until ``q``. Raises KvoffdClientError if the daemon does not answer the first time."""
    screen = Screen(interval_s, host=host)
    _refresh(screen, read, ANSWER_S)
    next_at, silent_since = time.monotonic() + min(interval_s, 0.5), ""  # rates need two samples
    with Live(console=console, screen=True, auto_refresh=False) as live, keyboard(live) as pressed:
        while True:
            live.update(screen.page(console), refresh=True)
            size, keys = console.size, ""
            while not keys and console.size == size and (screen.paused or next_at > time.monotonic()):
                left_s = LOOK_S if screen.paused else next_at - time.monotonic()
                keys = pressed(max(0.0, min(LOOK_S, left_s)))
            for key in keys:
                if key in ("q", "\x04"):
                    return 0
                _handle_key(screen, key)
            wants_engines = bool(keys) and screen.view == "clients"
            if not screen.paused and (wants_engines or next_at <= time.monotonic()):
                next_at = time.monotonic() + interval_s
                try:
                    _refresh(screen, read, LATER_ANSWER_S if silent_since else ANSWER_S)
                    silent_since = ""
                except KvoffdClientError as error:
                    silent_since = silent_since or time.strftime("%H:%M:%S")
                    screen.no_answer = f"No answer since {silent_since}: {error}"


def _refresh(screen: Screen, read: Read, timeout_s: float) -> None:
    screen.reading = read(screen.view, timeout_s)
    screen.history.add(screen.reading.stats)
    screen.no_answer, screen.clock = "", time.strftime("%H:%M:%S")


def _handle_key(screen: Screen, key: str) -> None:
    if key in "1234":
        screen.view = VIEWS[int(key) - 1]
    elif key in "h?":
        screen.view = VIEWS[0] if screen.view == "help" else "help"
    elif key == "s":
        names = [*SORTS]
        screen.sort = names[(names.index(screen.sort) + 1) % len(names)]
    elif key == "p":
        screen.paused = not screen.paused


ESCAPE_SEQUENCE = re.compile(r"\x1b(\[[0-9;]*[@-~]|O.)")
"""Characters of a key such as Delete or F5; some of them are digits, which are other keys here."""


@contextmanager
def keyboard(live: Live) -> Iterator[Callable[[float], str]]:
    """Yield a function that waits up to ``seconds`` for keys and returns them; ``q`` if the terminal is gone.

    Signals that end or stop the process restore the terminal.
    """
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal) if sys.stdin.isatty() else None

    def pressed(seconds: float) -> str:
        if not select.select([terminal] if before else [], [], [], seconds)[0]:
            return ""
        if not (typed := os.read(terminal, 64)):
            return "q"
        return ESCAPE_SEQUENCE.sub("", typed.decode(errors="ignore"))

    def begin() -> None:
        if before:
            tty.setcbreak(terminal)

    def restore() -> None:
        if before:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    def stop(number: int, _: object) -> None:
        live.stop()
        restore()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)  # returns when the process continues
        signal.signal(number, stop)
        begin()
        live.start(refresh=True)

    handlers = {signal.SIGTERM: end, signal.SIGHUP: end, signal.SIGTSTP: stop}
    defaults = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        begin()
        yield pressed
    finally:
        for number, handler in defaults.items():
            signal.signal(number, handler)
        restore()
