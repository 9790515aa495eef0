"""The page of ``kvoffd-cli stats``: a StatsReply, and perhaps the one before it, as something rich can print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from kvoffd_client.cli.console import (
    GAP,
    add_numbers,
    bar_characters,
    count_blocks,
    fitting,
    percent,
    printable,
    section,
    short_fingerprint,
)
from kvoffd_client.cli.disk_commands import DISK_ERRORS, OTHER_DISK_ERROR
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import BlockAccessStats, DirectionStats, NamespaceStats, PoolStats, RecentStats, StatsReply
from kvoffd_proto.units import format_count, format_duration, format_rate, format_size

TITLE_CELLS = 11
"""Width of the first column of every section with its gap, so that the sections line up."""
PAIR_CELLS, PAIRS_OF_LINE = 17, 4
"""Width of one name with its value, and how many of them fit on 80 columns beside the title."""
WIDE_CELLS = 116
"""From here on there is room for every column."""
AIRY_LINES = 36
"""On a screen with fewer lines the sections stand close together, so that a small terminal shows them all."""
FIXED_LINES = 20
"""Lines of a page without its namespaces, with one error and a notice of two lines."""
FIXED_LINES_AIRY = FIXED_LINES + 8
DISK_LINES = 2
MIN_BAR_CELLS = 10
MAX_NAMESPACES = 12
"""More would push the rest of the page off the screen; those with the most bytes are shown."""


@dataclass(frozen=True)
class StatsPage:
    """One page.

    Attributes:
        now: what to show.
        notice: a sentence to put on top, such as that the daemon does not answer.
        footnote: a line for the bottom, such as how to leave.
        lines: of the screen that must hold the page; None where it may be as long as it is.
    """

    now: StatsReply
    notice: str = ""
    footnote: str = ""
    lines: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDE_CELLS
        airy = self._airy and not (console.is_terminal and console.height < AIRY_LINES)
        errors = _errors(_failures(self.now), whole=True)
        if self.lines is not None and self._lines_left(len(console.render_lines(errors, options))) < 0:
            errors = _errors(_failures(self.now), whole=False)
        sections = (
            (Text(self.notice, style="bold red"),) if self.notice else (),
            tuple(_daemon(self.now)),
            _pool(self.now.pool, self.now.blocks, options),
            tuple(_over(self.now.recent, wide)),
            (_copies(self.now),),
            (_lookups(self.now),),
            (_disks(self.now),) if self.now.disks else (),
            _namespaces(self.now.namespaces, self._most_namespaces(len(console.render_lines(errors, options))), wide),
            (errors,),
            (Text(self.footnote, style="dim"),) if self.footnote else (),
        )
        for index, parts in enumerate(part for part in sections if part):
            if index and airy:
                yield Text()
            yield from parts

    @property
    def _airy(self) -> bool:
        return self.lines is None or self.lines >= AIRY_LINES

    def _most_namespaces(self, error_lines: int) -> int:
        """As many as the screen has lines for beside all the rest."""
        return MAX_NAMESPACES if self.lines is None else min(MAX_NAMESPACES, max(0, self._lines_left(error_lines)))

    def _lines_left(self, error_lines: int) -> int:
        """Lines of the screen for namespaces, below 0 where there are too few for the rest."""
        assert self.lines is not None
        rest = (FIXED_LINES_AIRY if self._airy else FIXED_LINES) + error_lines - 1
        rest += (DISK_LINES + self._airy) if self.now.disks else 0
        rest += bool(self.now.health_problems) + bool(self.now.ended_sessions)
        rest += bool(self.now.recent and self.now.recent[-1].misses)
        rest += len(list(_pool_notes(self.now.pool, self.now.blocks)))
        return self.lines - rest


def _pairs(title: str, pairs: dict[str, str]) -> Table:
    """Names with values, three beside each other."""
    grid = Table.grid()
    grid.add_column(width=TITLE_CELLS, style="bold", no_wrap=True)
    for _ in range(PAIRS_OF_LINE):
        grid.add_column(width=PAIR_CELLS, no_wrap=True, overflow="ellipsis")
    cells = [Text.assemble((f"{name} ", "dim"), value) for name, value in pairs.items()]
    for index in range(0, len(cells), PAIRS_OF_LINE):
        grid.add_row("" if index else title, *cells[index : index + PAIRS_OF_LINE])
    return grid


def _section(title: str, numbers: Sequence[str]) -> Table:
    """A section that lines up with the others."""
    return section(title, numbers, min_cells=TITLE_CELLS - 2)


def _daemon(now: StatsReply) -> Iterator[Table | Text]:
    """Who answers, for how long, at what cost, and what an operator should see to."""
    pairs = {
        "version": str(fitting(now.daemon_version)),
        "up": format_duration(now.uptime_seconds),
        "pid": str(now.pid),
        "memory": format_size(now.resident_bytes),
        "policy": str(fitting(now.policy)),
        "sessions": format_count(now.sessions),
        "leases": format_count(now.leases),
        "pinned": f"{format_count(now.pinned_blocks)} blocks",
    }
    yield _pairs("Daemon", pairs)
    if now.ended_sessions:
        ended = ", ".join(f"{format_count(count)} {why.replace('_', ' ')}" for why, count in _ended(now))
        yield fitting(printable(f"{'Sessions':<{TITLE_CELLS}}that ended: {ended}"), "dim")
    if now.health_problems:
        reasons = printable(", ".join(now.health_problems))
        yield fitting(f"{'Health':<{TITLE_CELLS}}{now.health.value}: {reasons}; see kvoffd-cli health", "yellow")


def _ended(now: StatsReply) -> list[tuple[str, int]]:
    return Counter(now.ended_sessions).most_common()


def _pool(pool: PoolStats, blocks: BlockAccessStats, options: ConsoleOptions) -> RenderResult:
    """A bar over the whole pool, and the books."""
    used = pool.pool_bytes - pool.free_bytes
    numbers = f"  {percent(used, pool.pool_bytes)}  {format_size(used)} of {format_size(pool.pool_bytes)}"
    cells = max(MIN_BAR_CELLS, options.max_width - TITLE_CELLS - len(numbers))
    line = Text(no_wrap=True)
    line.append("Pool".ljust(TITLE_CELLS), style="bold")
    line.append_text(_bar(pool, cells, bar_characters(options)))
    line.append(numbers)
    yield line
    sizes = {
        "ready": pool.ready_bytes,
        "writing": pool.writing_bytes,
        "leaving": pool.leaving_bytes,
        "free": pool.free_bytes,
        "pinned": pool.pinned_bytes,
        "table": pool.table_bytes,
    }
    yield _pairs("", {name: format_size(size) for name, size in sizes.items()})
    for note, style in _pool_notes(pool, blocks):
        yield fitting(" " * TITLE_CELLS + note, style)


def _pool_notes(pool: PoolStats, blocks: BlockAccessStats) -> Iterator[tuple[str, str]]:
    """What is unusual about the pool, a line each, with its style."""
    if pool.spilled_slots:
        yield f"{format_count(pool.spilled_slots)} slots so far lie on another NUMA node than their GPU", "yellow"
    if 0 < pool.page_locked_bytes < pool.pool_bytes:
        locked = format_size(pool.page_locked_bytes)
        yield f"{locked} are page-locked for GPUs so far; the rest is copied slowly", "yellow"
    if blocks.pinned_blocks:
        pinned = f"{count_blocks(blocks.pinned_blocks)} ({format_size(blocks.pinned_bytes)})"
        yield f"{pinned} pinned by operators; see block ls --pinned", "dim"
    if pool.quarantined_bytes:
        lost = format_size(pool.quarantined_bytes)
        yield f"{lost} in quarantine: not as they were stored; see kvoffd-cli health", "red"
    touched = pool.usable_bytes + pool.quarantined_bytes
    if touched < pool.pool_bytes:
        yield f"starting: {percent(touched, pool.pool_bytes)} of the pool's memory is touched", "yellow"


def _bar(pool: PoolStats, cells: int, characters: tuple[str, str, str]) -> Text:
    """Readable bytes, then those being written or leaving, then free ones. What is there gets at least one cell."""
    full, half, empty = characters
    ready = _cells_of(pool.ready_bytes, pool.pool_bytes, cells)
    moving = min(cells - ready, _cells_of(pool.writing_bytes + pool.leaving_bytes, pool.pool_bytes, cells))
    free = empty * (cells - ready - moving)
    return Text.assemble((full * ready, "green"), (half * moving, "yellow"), (free, "dim"))


def _cells_of(part: int, whole: int, cells: int) -> int:
    return min(cells, max(1, round(cells * part / whole))) if part > 0 and whole > 0 else 0


def _over(recent: Sequence[RecentStats], wide: bool) -> Iterator[Table | Text]:
    yield _recent(recent, wide)
    yield from _misses(recent, wide)


def _recent(recent: Sequence[RecentStats], wide: bool) -> Table:
    """Speeds and ratios over several windows of time. A key is a hit of the pool, or else of a disk, or a miss."""
    table = _section("Over", ("keys asked", "pool", "disk", "miss", "stored", "loaded", "evicted"))
    if wide:
        add_numbers(table, ("lookups", "no room", "cpu"))
    for window in recent:
        seconds = max(window.seconds, 1e-9)
        table.add_row(
            fitting(f"{window.window_seconds:,.0f} s" if window.window_seconds else "in all"),
            _per_second(window.keys_asked / seconds),
            percent(window.keys_ready, window.keys_asked),
            percent(window.keys_pending, window.keys_asked),
            percent(window.keys_missing, window.keys_asked),
            format_rate(window.stored_bytes / seconds),
            format_rate(window.loaded_bytes / seconds),
            _per_second(window.evicted_blocks / seconds),
            *(
                (
                    _per_second(window.lookups / seconds),
                    _alarming(window.dropped_keys),
                    percent(window.cpu_seconds, seconds, none="0 %"),
                )
                if wide
                else ()
            ),
        )
    return table


def _misses(recent: Sequence[RecentStats], wide: bool) -> Iterator[Text]:
    """Why keys were not there, over 100 s and in all: the most frequent reasons."""
    parts = []
    for window in recent[1::2]:
        total, most = sum(window.misses.values()), Counter(window.misses).most_common(None if wide else 2)
        if total:
            title = f"over {window.window_seconds:,.0f} s" if window.window_seconds else "in all"
            reasons = ", ".join(f"{name.replace('_', ' ')} {percent(count, total)}" for name, count in most)
            parts.append(f"{title}: {reasons}")
    if parts:
        line = Text(no_wrap=True, overflow="ellipsis")
        yield line.append("Misses".ljust(TITLE_CELLS), style="bold").append(printable("; ".join(parts)))


def _copies(now: StatsReply) -> Table:
    """Both directions since the start. ``copying at`` is the speed while a copy runs: what the memory gives."""
    table = _section("Copies", ("total", "copying at", "jobs", "failed", "queued", "running"))
    for title, direction in (("store", now.store), ("load", now.load)):
        table.add_row(
            fitting(title),
            format_size(direction.bytes),
            _copy_speed(direction),
            format_count(direction.jobs),
            _alarming(direction.failed_jobs),
            format_count(direction.queued_jobs),
            format_count(direction.running_jobs),
        )
    return table


def _copy_speed(direction: DirectionStats) -> str:
    if direction.bytes <= 0 or direction.busy_seconds <= 0:
        return "-"
    return format_rate(direction.bytes / direction.busy_seconds)


def _alarming(count: int) -> Text:
    return Text(format_count(count), style="red" if count else "")


def _lookups(now: StatsReply) -> Table:
    """How long the daemon takes for an answer, and what else it did since the start."""
    table = _section("Lookups", ("total", "p50", "p99", "max", "requests", "KV events", "dropped"))
    latency = now.lookup_latency
    durations = (latency.p50, latency.p99, latency.maximum)
    table.add_row(
        fitting("all"),
        format_count(latency.count),
        *(format_duration(value) if latency.count else "-" for value in durations),
        format_count(now.requests),
        format_count(now.events_published),
        _alarming(sum(namespace.dropped_keys for namespace in now.namespaces)),
    )
    return table


def _disks(now: StatsReply) -> Table:
    """All directories of the disk tier together."""
    disks = now.disks
    table = _section("Disk", ("used", "blocks", "read", "written", "pending", "failed", "errors"))
    table.add_row(
        fitting("all"),
        percent(sum(disk.used_bytes for disk in disks), sum(disk.size_bytes for disk in disks)),
        format_count(sum(disk.blocks for disk in disks)),
        format_size(sum(disk.read_bytes for disk in disks)),
        format_size(sum(disk.written_bytes for disk in disks)),
        format_count(now.below.pending_blocks if now.below is not None else 0),
        _alarming(sum(now.below.failed_promotions.values()) if now.below is not None else 0),
        _alarming(sum(sum(disk.errors.values()) for disk in disks)),
    )
    return table


def _per_second(value: float) -> str:
    """A speed below ten keeps a decimal, so that what is rare is not shown as nothing."""
    if value <= 0:
        return "0/s"
    return f"{format_count(round(value))}/s" if value >= 9.95 else f"{max(value, 0.1):.1f}/s"


def _namespaces(namespaces: list[NamespaceStats], most: int, wide: bool) -> RenderResult:
    """One line each. Hits are keys that pool or disk had; prefix, those in the pool in the run at a request's start."""
    if not namespaces:
        yield Text.assemble(("Namespaces ", "bold"), "none open; an engine opens its own when it connects")
        return
    table = _section("Namespace", ())
    table.add_column("", no_wrap=True, style="dim")
    windows = [f"{window.window_seconds:,.0f} s" for window in namespaces[0].recent]
    if windows:
        windows[0] = f"hits {windows[0]}"
    more = ("prefix", "stored", "loaded", "evicted") if wide else ()
    add_numbers(table, ("blocks", "size", *windows, "in all", *more))
    by_weight = sorted(namespaces, key=lambda namespace: (namespace.ready_bytes, namespace.keys_asked), reverse=True)
    for namespace in by_weight[:most]:
        table.add_row(*_namespace_row(namespace, wide))
    if most:
        yield table
    if len(namespaces) > most:
        others = f"{len(namespaces) - most} {'smaller' if most else 'namespaces'}"
        yield Text(f"and {others}; `kvoffd-cli namespaces` lists all", style="dim")


def _namespace_row(namespace: NamespaceStats, wide: bool) -> tuple[Text | str, ...]:
    row: tuple[Text | str, ...] = (
        fitting(namespace.label or "(no label)"),
        short_fingerprint(namespace.namespace),
        format_count(namespace.ready_blocks),
        format_size(namespace.ready_bytes),
        *(percent(one.keys_ready + one.keys_pending, one.keys_asked) for one in namespace.recent),
        percent(namespace.keys_ready + namespace.keys_pending, namespace.keys_asked),
    )
    if not wide:
        return row
    return (
        *row,
        percent(namespace.prefix_keys_ready, namespace.keys_asked),
        format_size(namespace.stored_bytes),
        format_size(namespace.loaded_bytes),
        format_count(namespace.evicted_blocks),
    )


def _failures(now: StatsReply) -> dict[str, int]:
    """Refusals by code, the replies that clients did not read, what GPUs' drivers refused, errors of disks."""
    found = Counter(now.errors)
    found["unread_replies"] += now.replies_dropped.get("unread", 0)
    found["refused_batches"] += now.store.refused_batches + now.load.refused_batches
    for disk in now.disks:
        found.update({f"disk_{kind}": count for kind, count in disk.errors.items()})
    return {name: count for name, count in found.items() if count}


def _errors(failures: dict[str, int], whole: bool) -> Table | Text:
    """Failures by code, most frequent first, each with what it means: the whole sentence, or what a line holds."""
    meanings = {name.lower(): code.sentence for name, code in ErrorCode.__members__.items()}
    meanings["refused_batches"] = "A CUDA driver refused batches of copies, which were made one by one, slowly."
    meanings["unread_replies"] = "Replies were dropped, since a client has left too many unread."
    found = sorted(((-count, code) for code, count in failures.items() if count))
    if not found:
        return Text.assemble(("Errors".ljust(TITLE_CELLS), "bold"), "none")
    grid = Table.grid(padding=GAP)
    grid.add_column(width=TITLE_CELLS - 2, style="bold", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(style="red", no_wrap=True)
    grid.add_column()
    for index, (negative, code) in enumerate(found):
        meaning = meanings.get(code.lower()) or _disk_meaning(code)
        explained = Text(meaning, "dim") if whole else fitting(meaning, "dim")
        grid.add_row("" if index else "Errors", format_count(-negative), fitting(code), explained)
    return grid


def _disk_meaning(name: str) -> str:
    kind = name.removeprefix("disk_")
    return "" if kind == name else f"Of disks: {DISK_ERRORS.get(kind, OTHER_DISK_ERROR)}."
