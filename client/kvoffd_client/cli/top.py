"""``kvoffd-cli top``: what the daemon does now, on one screen that is drawn again every second."""

from __future__ import annotations

import os
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
from itertools import pairwise
from socket import gethostname
from textwrap import wrap
from typing import Annotated, Any, NoReturn

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvoffd_client.admin_client import read_stats
from kvoffd_client.cli.findings import failing_copies
from kvoffd_client.cli.format import Line, make_console, percent, print_json, print_line, reason_name, wrapped
from kvoffd_client.cli.show import Engine, engine_table, engines_of, labels_of
from kvoffd_client.cli.stats import policy_lines, pool_bar, print_stats, saved_time, tier_details, token_count
from kvoffd_client.cli.target import CliError, Directory, Url, check_names_one, open_admin, parse_option
from kvoffd_client.errors import KvoffdClientError
from kvoffd_proto.admin import HealthLevel
from kvoffd_proto.stats import MAX_NAMESPACE_ROWS, DaemonStats, NamespaceStats, Traffic, Window
from kvoffd_proto.units import (
    exact_duration,
    format_count,
    format_duration,
    format_rate,
    format_size,
    parse_duration,
    plural,
    printable,
)

MIN_INTERVAL_S = 0.1
MOST_SAMPLES = 900
"""A quarter of an hour of the usual interval."""
NOW_S = 3.0
"""What ``now`` is an average over: one second alone jumps."""
ANSWER_S = 2.0
LATER_ANSWER_S = 10.0
"""For an answer after one that did not come."""
LOOK_S = 0.25
"""How soon another size of the terminal is seen."""
SHOWN_SIZES = ("0.5", "1", "2", "10")
VIEWS = ("all", "clients", "tiers", "policy")
HELP = (
    "1 all, 2 clients, 3 tiers, 4 policy, h or ? this page",
    "s  sort the namespaces by another column; p  pause; q  quit",
    "",
    "key         the hash of one block; percentages are of the keys asked for",
    "loaded      what an engine got from kvoffd and did not compute",
    "not needed  what was found and the engine had already",
    "missed      what it did not get; `kvoffd-cli stats --misses` has the reasons",
    "tokens/s    tokens loaded",
    "now         the last 3 seconds",
    "In pool     each prompt's tokens up to the first that the pool lacked, disks and",
    "            stores left out; lru: in pools of other sizes, empty at the start",
    "pinned      under a lease or a copy: it cannot be evicted",
)
SORTS: dict[str, Callable[[Window], float]] = {
    "TOK/S": lambda now: now.loaded_tokens,
    "SIZE": lambda now: 0,
    "MISSED": lambda now: sum(now.misses.values()),
}
"""By what comes before the size."""
SPARKS = " ▁▂▃▄▅▆▇█"
MOST_AWAY_LINES = 3
LEAVE, ENTER = b"\x1b[?1049l\x1b[?25h", b"\x1b[?1049h\x1b[?25l"
"""The alternate screen, and the cursor."""


@dataclass(frozen=True)
class Reading:
    """What one look at the daemon brought; ``engines`` for the view that shows them."""

    stats: DaemonStats
    engines: Sequence[Engine] | None = None
    far: bool = False
    """It came over HTTP, which has statistics alone."""


Read = Callable[[str, float], Reading]
"""Asks the daemon for a view, within so many seconds. Raises KvoffdClientError."""


class History:
    """Samples of the last minutes. A restart of the daemon empties it: its counters begin anew."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, Window]] = deque(maxlen=MOST_SAMPLES)
        self._latest: deque[DaemonStats] = deque(maxlen=MOST_SAMPLES)
        """From the youngest that is older than ``NOW_S`` on, if there is one."""

    def add(self, stats: DaemonStats) -> None:
        """Times are the daemon's: an answer that comes late changes no rate, nor one that HTTP gives twice."""
        last_s = self._latest[-1].uptime_seconds if self._latest else 0.0
        if self._latest and stats.uptime_seconds == last_s:
            return
        if stats.uptime_seconds < last_s:
            self._totals.clear()
            self._latest.clear()
        self._totals.append((stats.uptime_seconds, stats.since_start))
        self._latest.append(stats)
        while len(self._latest) > 2 and self._latest[1].uptime_seconds <= stats.uptime_seconds - NOW_S:
            self._latest.popleft()
        self._before = {one.id: one for one in self._latest[0].namespaces}

    def now(self) -> Window:
        """What was counted in the last seconds."""
        return self._gained(self._latest[-1].since_start, self._latest[0].since_start)

    def now_of(self, namespace: NamespaceStats) -> Window:
        # Of one that was not there nothing had been counted, unless others pushed it off the list.
        absent = NamespaceStats() if len(self._before) < MAX_NAMESPACE_ROWS else namespace
        return self._gained(namespace, self._before.get(namespace.id, absent))

    def series(self, name: str, count: int) -> list[float]:
        """How much of a counter came in each second, between the latest samples."""
        kept = list(self._totals)[-count - 1 :]
        return [(getattr(b, name) - getattr(a, name)) / max(1e-9, t - s) for (s, a), (t, b) in pairwise(kept)]

    def _gained(self, later: Traffic, earlier: Traffic) -> Window:
        """What was counted in the last seconds; ``earlier``: what had been before."""
        counts: dict[str, Any] = {}
        for name in Traffic.__struct_fields__:
            now, before = getattr(later, name), getattr(earlier, name)
            counts[name] = (
                {key: n - before.get(key, 0) for key, n in now.items()} if isinstance(now, dict) else now - before
            )
        # A lookup is counted before its load: what the loads of earlier lookups took away is no negative count.
        counts["not_needed_keys"] = max(0, counts["not_needed_keys"])
        counts["asked_keys"] = counts["loaded_keys"] + counts["not_needed_keys"] + sum(counts["misses"].values())
        return Window(seconds=self._latest[-1].uptime_seconds - self._latest[0].uptime_seconds, **counts)


# --- the screen -------------------------------------------------------------------------------------


@dataclass
class Screen:
    """What is shown: the latest reading and its history, and what the keys have chosen."""

    interval_s: float
    reading: Reading | None = None
    history: History = field(default_factory=History)
    view: str = VIEWS[0]
    sort: str = "TOK/S"
    paused: bool = False
    away: str = ""
    """Since when the daemon does not answer, and why; empty while it does."""
    clock: str = ""

    def lines(self, console: Console) -> list[Text]:
        """As many lines as the screen has, the last one that of the keys."""
        assert self.reading is not None
        width, height = console.size
        pen = Pen(width)
        stats = self.reading.stats
        away = wrap(printable(self.away), max(1, width))[:MOST_AWAY_LINES]
        head = [self._header(stats, pen), *(pen.text(line, "bold red") for line in away)]
        room = max(0, height - len(head) - 1)
        if self.reading.far and self.view == "clients":
            body = [Text(), pen.text("This is shown on the daemon's own machine: HTTP has statistics alone.", "dim")]
        elif self.view == "clients":
            body = [pen.cut(line) for line in _clients(self.reading.engines, console)]
        elif self.view == "tiers":
            body = _page(tier_details(stats), pen)
        elif self.view == "policy":
            body = _page(policy_lines(stats), pen)
        elif self.view == "help":
            body = _page(HELP, pen)
        else:
            body = self._all(stats, pen)
        if len(body) > room > 0:
            more = len(body) - room + 1
            body = [*body[: room - 1], pen.text(f"{more} more lines: make the terminal higher", "dim")]
        return [*head, *body, *[Text()] * (room - len(body)), self._keys(pen)][:height]

    def _header(self, stats: DaemonStats, pen: Pen) -> Text:
        level, problems = stats.health, len(stats.health_problems)
        words = level.value.upper() + (f": {problems} problem{plural(problems)}" if problems else "")
        style = {HealthLevel.OK: "bold green", HealthLevel.DEGRADED: "bold yellow"}.get(level, "bold red")
        words, style = ("NO ANSWER", "bold red") if self.away else (words, style)
        up = format_duration(stats.uptime_seconds)
        left = f"kvoffd {stats.version}  {gethostname()}  up {up}  {stats.policy}   "
        line = Text(set_cell_size(printable(left), min(len(left), pen.width - len(words) - 10)), "bold")
        line.append(words, style)
        line.append(f"{'PAUSED ' * self.paused}{self.clock}".rjust(pen.width - line.cell_len), "reverse" * self.paused)
        return pen.cut(line)

    def _keys(self, pen: Pen) -> Text:
        names = "  ".join(f"{number} {name}" for number, name in enumerate(VIEWS, 1))
        line = f"{names}  s sort: {self.sort.lower()}  p pause  h help  q quit "
        interval = exact_duration(self.interval_s).rjust(pen.width - len(line))
        return pen.text((line + interval if len(line + interval) <= pen.width else line).ljust(pen.width), "reverse")

    def _all(self, stats: DaemonStats, pen: Pen) -> list[Text]:
        """What matters most comes first: a low screen ends earlier."""
        now = self.history.now()
        return [
            *map(pen.cut, pool_bar(stats.pool, pen.width)),
            _saved(stats, pen),
            *(pen.text(f"! {one.reason}: {one.sentence}", "yellow") for one in stats.health_problems[:3]),
            *_rates(stats, now, pen),
            _misses(stats, pen),
            *_curve(stats, pen),
            *_lookups(stats, now, pen),
            *self._sparks(pen),
            *_tier_summary(stats, pen),
            *_namespaces(self._sorted(stats), self.history, self.sort, pen),
        ]

    def _sorted(self, stats: DaemonStats) -> list[NamespaceStats]:
        """The namespaces in the order that was chosen; those of the same rank by size."""
        rank = SORTS[self.sort]
        return sorted(stats.namespaces, key=lambda one: (-rank(self.history.now_of(one)), -one.ready_bytes))

    def _sparks(self, pen: Pen) -> list[Text]:
        cells = pen.width - 40
        tokens, stored = (self.history.series(name, cells) for name in ("loaded_tokens", "stored_bytes"))
        most = [max(series, default=0.0) for series in (tokens, stored)]
        return [
            pen.text(f"Loaded  {pen.spark(tokens, cells)}  at most {format_count(round(most[0]))} tokens/s"),
            pen.text(f"Stored  {pen.spark(stored, cells)}  at most {format_rate(most[1])}"),
        ]


@dataclass(frozen=True)
class Pen:
    """Draws lines that are no wider than the screen."""

    width: int

    def text(self, words: str, style: str = "") -> Text:
        """``words`` on one line; names in them cannot move the cursor."""
        return self.cut(Text(printable(words), style))

    def cut(self, line: Text) -> Text:
        line.truncate(self.width, overflow="ellipsis")
        return line

    def cells(self, words: Sequence[str], widths: Sequence[int], style: str = "") -> Text:
        """Words in columns: a negative width is one of a name, which is cut; numbers are aligned right."""
        parts = [
            set_cell_size(printable(word), -width) if width < 0 else word.rjust(width)
            for word, width in zip(words, widths, strict=True)
        ]
        return self.cut(Text(" ".join(parts), style))

    def spark(self, values: Sequence[float], cells: int) -> str:
        """The latest values, one character each, from nothing to the largest of them."""
        most, shown = max(values, default=0.0), values[-cells:] if cells > 0 else []
        heights = (0 if value <= 0 else max(1, round(value / most * (len(SPARKS) - 1))) for value in shown)
        return "".join(SPARKS[height] for height in heights).rjust(max(0, cells))


def _saved(stats: DaemonStats, pen: Pen) -> Text:
    total, life = stats.since_start, stats.lifetime
    line = f"Saved   prefill {saved_time(total)}, {token_count(total.loaded_tokens, total.loaded_keys)} tokens loaded"
    if life.saved_seconds > total.saved_seconds:
        line += f"; {format_duration(life.saved_seconds)} in all"
    return pen.text(line, "bold")


RATES: tuple[tuple[str, int, Callable[[Window], str]], ...] = (
    ("tokens/s", 8, lambda one: _token_rate(one)),
    ("keys/s", 7, lambda one: _rate(one.asked_keys, one)),
    ("loaded", 7, lambda one: percent(one.loaded_keys, one.asked_keys)),
    ("not needed", 10, lambda one: percent(one.not_needed_keys, one.asked_keys)),
    ("missed", 7, lambda one: percent(sum(one.misses.values()), one.asked_keys)),
    ("loaded/s", 10, lambda one: _bytes(one.loaded_bytes, one)),
    ("stored/s", 10, lambda one: _bytes(one.stored_bytes, one)),
)
"""Title, width and cell of each column."""


def _rates(stats: DaemonStats, now: Window, pen: Pen) -> list[Text]:
    """Of tokens and keys that engines asked for, what became of them."""
    titles, widths, cells = zip(*RATES, strict=True)
    rows = [("now", now), ("1 min", stats.last_minute), ("1 hour", stats.last_hour), ("since start", stats.since_start)]
    lines = [pen.cells(("", *titles), (-11, *widths), "dim")]
    for name, window in rows:
        shown = (name, *(cell(window) for cell in cells))
        lines.append(pen.cells(shown, (-11, *widths), "bold" if name == "now" else ""))
    return lines


def _rate(count: float, window: Window) -> str:
    return format_count(round(count / window.seconds)) if window.seconds else "-"


def _token_rate(one: Window) -> str:
    return "-" if one.loaded_keys and not one.loaded_tokens else _rate(one.loaded_tokens, one)


def _bytes(count: float, window: Window) -> str:
    return format_rate(count / window.seconds).removesuffix("/s") if window.seconds else "-"


def _lookups(stats: DaemonStats, now: Window, pen: Pen) -> list[Text]:
    times = [format_duration(stats.lookup_seconds.quantile(share)) for share in (0.5, 0.99)]
    queued = stats.store.queued_jobs + stats.load.queued_jobs
    failed = sum(copies.failed_jobs for _, copies in failing_copies(stats))
    words = f"Lookups {_rate(now.lookups, now)}/s  queued copies {format_count(queued)}  since start:"
    line = f"{words} p50 {times[0]}  p99 {times[1]}"
    failures = f"! {format_count(failed)} copy jobs failed since the start: see `kvoffd-cli doctor --all`"
    return [pen.text(line), *([pen.text(failures, "yellow")] if failed else [])]


def _misses(stats: DaemonStats, pen: Pen) -> Text:
    """Of the keys asked for in the last hour; of all where none was missed then."""
    window = stats.last_hour if stats.last_hour.misses else stats.since_start
    largest = sorted(window.misses.items(), key=lambda item: -item[1])
    words = "  ".join(f"{reason_name(reason)} {percent(keys, window.asked_keys)}" for reason, keys in largest if keys)
    return pen.text(f"Missed  {words or 'nothing'}{' in the last hour' * (window is stats.last_hour)}")


def _curve(stats: DaemonStats, pen: Pen) -> list[Text]:
    curve = stats.curve
    if curve is None or not curve.asked_tokens:
        return []
    ratios = [(size, curve.lru_hit_ratio[size]) for size in SHOWN_SIZES if size in curve.lru_hit_ratio]
    words = "  ".join(f"{size}x {100 * ratio:.0f} %" for size, ratio in ratios)
    own = percent(curve.found_tokens, curve.asked_tokens)
    return [pen.text(f"In pool {own} of tokens; lru by size: {words}")]


COLUMNS = ("NAMESPACE", "SIZE", "TOK/S", "KEYS/S", "LOADED", "MISSED", "MOST MISSED")
SIZE_CELLS, QUOTA_CELLS = 9, 11
"""Of sizes: ``1.00 GiB``; where a namespace has a quota, ``50.0M/1.00G`` as df -h has it."""


def _namespaces(found: Sequence[NamespaceStats], history: History, sort: str, pen: Pen) -> list[Text]:
    of_size = SIZE_CELLS if all(one.quota_bytes is None for one in found) else QUOTA_CELLS
    of_name = max(12, pen.width - 46 - of_size)
    widths = (-of_name, of_size, 8, 8, 6, 6, -12)
    head = pen.cells(COLUMNS, widths, "bold reverse")
    head.highlight_words([sort], "underline")
    lines = [Text(), head]
    for one in found:
        name = printable(f"{one.model} {one.id}" if one.model else one.id)
        if of_name < cell_len(name):  # the id stays whole, since labels may repeat, and the owner of the model goes
            model = printable(one.model).rpartition("/")[2]
            name = f"{set_cell_size(model, max(0, of_name - len(one.id) - 1))} {one.id}"
        now = history.now_of(one)
        missed = sum(now.misses.values())
        cells = (
            name,
            _size(one),
            _token_rate(now),
            _rate(now.asked_keys, now),
            percent(now.loaded_keys, now.asked_keys),
            percent(missed, now.asked_keys),
            reason_name(max(now.misses, key=now.misses.__getitem__)) if missed else "-",
        )
        lines.append(pen.cells(cells, widths, "dim" if one.of_bench else ""))
    return lines if found else [Text(), pen.text("No namespace: no engine has connected so far.", "dim")]


def _size(one: NamespaceStats) -> str:
    if one.quota_bytes is None:
        return format_size(one.ready_bytes)
    both = one.ready_bytes, one.quota_bytes
    return "/".join(format_size(each).replace(" ", "").removesuffix("iB") for each in both)


def _tier_summary(stats: DaemonStats, pen: Pen) -> list[Text]:
    lines = []
    for disk in stats.disks:
        used = f"{percent(disk.used_bytes, disk.size_bytes)} of {format_size(disk.size_bytes)}"
        copied = f"read {format_size(disk.read_bytes)}  written {format_size(disk.written_bytes)}"
        words = f"Disk  {disk.directory}  {disk.state}  {used}  {copied}"
        lines.append(pen.text(words, "" if disk.up else "red"))
    for store in stats.shared:
        found = f"found {percent(store.found_keys, store.asked_keys)}"
        words = f"Store {store.url}  {'up' if store.up else 'down'}  {format_duration(store.ask_seconds)}  {found}"
        lines.append(pen.text(words, "" if store.up else "red"))
    return [Text(), *lines] if lines else []


def _clients(engines: Sequence[Engine] | None, console: Console) -> list[Text]:
    if not engines:
        return [Text(), Text("No answer so far." if engines is None else "No engine is connected.")]
    found = console.render_lines(engine_table(engines, console))
    lines = [Text.assemble(*((part.text, part.style or "") for part in line)) for line in found]
    note = Text("pinned: pool memory under its leases. registered: memory of its own, for copies.", "dim")
    return [Text(), *lines, Text(), note]


def _page(lines: Iterable[Line], pen: Pen) -> list[Text]:
    return [Text(), *(pen.text(text, style) for text, style in wrapped(lines, pen.width))]


# --- the loop ---------------------------------------------------------------------------------------


def top(
    interval: Annotated[str, typer.Option("--interval", metavar="DURATION", help="Time between two looks.")] = "1s",
    directory: Directory = None,
    url: Url = "",
    json: Annotated[bool, typer.Option("--json", help="One line of JSON for each look.")] = False,
) -> int:
    """Show what the daemon does, live.

    1 to 4 choose what is shown, h shows the keys and what the words mean, q ends. Into a pipe it writes the page of
    stats every interval.
    """
    interval_s = parse_option("--interval", interval, parse_duration)
    if interval_s < MIN_INTERVAL_S:
        raise CliError(f"--interval {interval!r} is too short; the least is {format_duration(MIN_INTERVAL_S)}.")
    check_names_one(directory, url)
    with open_admin(directory) as admin:
        admin.on_silence = lambda: None  # the screen says it

        def read(view: str, timeout_s: float) -> Reading:
            if url:
                return Reading(read_stats(url), far=True)
            admin.timeout_s = timeout_s
            if view != "clients":
                return Reading(admin.stats())
            return Reading(admin.stats(), engines_of(admin.sessions().sessions, labels_of(admin)))

        console = make_console()
        if console.is_terminal and not console.is_dumb_terminal and not json:
            return run(read, interval_s, console)
        _print_pages(read, interval_s, as_json=json)
    return 0


def _print_pages(read: Read, interval_s: float, *, as_json: bool) -> NoReturn:
    """A page, or a line, every interval. Only the first answer must come; where a later one does not, that is said."""
    answered = False
    while True:
        began = time.monotonic()
        try:
            stats = read(VIEWS[0], LATER_ANSWER_S if answered else ANSWER_S).stats
        except KvoffdClientError as error:
            if not answered:
                raise
            print(f"{time.strftime('%H:%M:%S')} {error}", file=sys.stderr, flush=True)
        else:
            answered = True
            if as_json:
                print_json(stats)
            else:
                print_stats(stats)
                print_line("")
        time.sleep(max(0.0, began + interval_s - time.monotonic()))


def run(read: Read, interval_s: float, console: Console) -> int:
    """Draw until ``q``. Raises KvoffdClientError where the daemon does not answer the first time."""
    screen = Screen(interval_s)
    _look(screen, read, ANSWER_S)
    next_at = time.monotonic() + min(interval_s, 0.5)  # rates need two samples
    with keyboard() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(Group(*screen.lines(console)), refresh=True)
            size, keys = console.size, ""
            while not keys and console.size == size and (screen.paused or next_at > time.monotonic()):
                keys = pressed(min(LOOK_S, LOOK_S if screen.paused else max(0.0, next_at - time.monotonic())))
            for key in keys:
                if key in ("q", "\x04"):
                    return 0
                _obey(screen, key)
            wants_engines = bool(keys) and screen.view == "clients"
            if not screen.paused and (wants_engines or next_at <= time.monotonic()):
                next_at = time.monotonic() + interval_s
                try:
                    _look(screen, read, LATER_ANSWER_S if screen.away else ANSWER_S)
                except KvoffdClientError as error:
                    since = screen.away.split(": ")[0] or f"No answer since {time.strftime('%H:%M:%S')}"
                    screen.away = f"{since}: {error}"


def _look(screen: Screen, read: Read, timeout_s: float) -> None:
    screen.reading = read(screen.view, timeout_s)
    screen.history.add(screen.reading.stats)
    screen.away, screen.clock = "", time.strftime("%H:%M:%S")


def _obey(screen: Screen, key: str) -> None:
    if key in "1234":
        screen.view = VIEWS[int(key) - 1]
    elif key in "h?":
        screen.view = VIEWS[0] if screen.view == "help" else "help"
    elif key == "s":
        names = [*SORTS]
        screen.sort = names[(names.index(screen.sort) + 1) % len(names)]
    elif key == "p":
        screen.paused = not screen.paused


@contextmanager
def keyboard() -> Iterator[Callable[[float], str]]:
    """Yields what waits so many seconds for keys and returns them: ``q`` where the terminal is gone.

    Signals that end or stop the process leave the terminal as it was before.
    """
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal) if sys.stdin.isatty() else None
    resumed: list[str] = []

    def pressed(seconds: float) -> str:
        if not select.select([terminal] if before else [], [], [], seconds)[0]:
            return resumed.pop() if resumed else ""
        return os.read(terminal, 64).decode("ascii", "ignore") or "q"

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    def stop(number: int, _: object) -> None:
        os.write(sys.stdout.fileno(), LEAVE)
        if before:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, stop)  # it goes on

    def resume(_: int, __: object) -> None:
        if before:
            tty.setcbreak(terminal)
        os.write(sys.stdout.fileno(), ENTER)
        resumed[:] = [" "]  # no key: draw all of it

    given: dict[signal.Signals, Callable[[int, object], None]] = {
        signal.SIGTERM: end,
        signal.SIGHUP: end,
        signal.SIGTSTP: stop,
        signal.SIGCONT: resume,
    }
    defaults = {number: signal.signal(number, handler) for number, handler in given.items()}
    try:
        if before:
            tty.setcbreak(terminal)
        yield pressed
    finally:
        for number, handler in defaults.items():
            signal.signal(number, handler)
        if before:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
