"""The page of ``kvoffd-cli stats``: a StatsReply, and perhaps the one before it, as something rich can print."""

from __future__ import annotations

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
    section,
    short_fingerprint,
)
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import BlockAccessStats, DirectionStats, NamespaceStats, PoolStats, StatsReply
from kvoffd_proto.units import format_count, format_duration, format_rate, format_size

TITLE_CELLS = 11
"""Width of the first column of every section with its gap, so that the sections line up."""
PAIR_CELLS, PAIRS_OF_LINE = 23, 3
"""Width of one name with its value, and how many of them fit on 80 columns beside the title."""
WIDE_CELLS = 116
"""From here on there is room for every column of the namespaces."""
AIRY_LINES = 34
"""On a screen with fewer lines the sections stand close together, so that a small terminal shows them all."""
FIXED_LINES = 20
"""Lines of a page without its namespaces, with one error and a notice of two lines."""
FIXED_LINES_AIRY = FIXED_LINES + 8
DISK_LINES = 2
MIN_BAR_CELLS = 10
MIN_NAMESPACES = 3
MAX_NAMESPACES = 12
"""More would push the rest of the page off the screen; those with the most bytes are shown."""


@dataclass(frozen=True)
class Rates:
    """Speeds between two samples or, where there is only one, as the daemon averages them itself.

    Attributes:
        cpu_share: CPU seconds per second, more than 1 where several cores work; with one sample since the start.
        activity: each of ``activity_counters`` per second; None where there is only one sample.
    """

    store_bytes: float
    load_bytes: float
    lookups: float
    cpu_share: float
    activity: dict[str, float] | None


def rates_between(now: StatsReply, before: StatsReply | None) -> Rates:
    """Return the rates of ``now``. A ``before`` of another life of the daemon, or not older, counts as none."""
    if before is None or before.epoch != now.epoch or now.uptime_seconds <= before.uptime_seconds:
        return Rates(
            store_bytes=now.store.bytes_per_second,
            load_bytes=now.load.bytes_per_second,
            lookups=now.lookups_per_second,
            cpu_share=now.cpu_seconds / now.uptime_seconds if now.uptime_seconds > 0 else 0.0,
            activity=None,
        )
    seconds = now.uptime_seconds - before.uptime_seconds

    def rate(new: float, old: float) -> float:
        """A counter that fell, as when a namespace was closed, is no negative speed."""
        return max(new - old, 0) / seconds

    old_activity = activity_counters(before)
    return Rates(
        store_bytes=rate(now.store.bytes, before.store.bytes),
        load_bytes=rate(now.load.bytes, before.load.bytes),
        lookups=rate(now.lookup_latency.count, before.lookup_latency.count),
        cpu_share=rate(now.cpu_seconds, before.cpu_seconds),
        activity={name: rate(count, old_activity[name]) for name, count in activity_counters(now).items()},
    )


def activity_counters(now: StatsReply) -> dict[str, float]:
    """Return the counters of the section Activity by their column, over all namespaces and since the daemon's start."""
    return {
        "requests": now.requests,
        "KV events": now.events_published,
        "evicted blocks": sum(namespace.evicted_blocks for namespace in now.namespaces),
        "invalidated": sum(namespace.invalidated_blocks for namespace in now.namespaces),
        "dropped keys": sum(namespace.dropped_keys for namespace in now.namespaces),
    }


@dataclass(frozen=True)
class StatsPage:
    """One page.

    Attributes:
        now: what to show.
        before: an earlier sample of the same daemon; speeds are then those between the two.
        notice: a sentence to put on top, such as that the daemon does not answer.
        footnote: a line for the bottom, such as how to leave.
        lines: of the screen that must hold the page; None where it may be as long as it is.
    """

    now: StatsReply
    before: StatsReply | None = None
    notice: str = ""
    footnote: str = ""
    lines: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rates = rates_between(self.now, self.before)
        sections = (
            (Text(self.notice, style="bold red"),) if self.notice else (),
            (_daemon(self.now, rates),),
            _pool(self.now.pool, self.now.blocks, options),
            (_copies(self.now, rates),),
            (_lookups(self.now, rates),),
            (_disks(self.now),) if self.now.disks else (),
            (_activity(self.now, rates),),
            _namespaces(self.now.namespaces, self._most_namespaces, wide=options.max_width >= WIDE_CELLS),
            (_errors(_failures(self.now), whole=self.lines is None),),
            (Text(self.footnote, style="dim"),) if self.footnote else (),
        )
        for index, parts in enumerate(part for part in sections if part):
            if index and self._airy:
                yield Text()
            yield from parts

    @property
    def _airy(self) -> bool:
        return self.lines is None or self.lines >= AIRY_LINES

    @property
    def _most_namespaces(self) -> int:
        """As many as the screen has lines for beside all the rest."""
        if self.lines is None:
            return MAX_NAMESPACES
        rest = (FIXED_LINES_AIRY if self._airy else FIXED_LINES) + max(0, len(_failures(self.now)) - 1)
        rest += (DISK_LINES + self._airy) if self.now.disks else 0
        least = MIN_NAMESPACES - bool(self.now.disks)
        return min(MAX_NAMESPACES, max(least, self.lines - rest))


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


def _daemon(now: StatsReply, rates: Rates) -> Table:
    """Who answers, for how long, and at what cost."""
    pairs = {
        "version": str(fitting(now.daemon_version)),
        "up": format_duration(now.uptime_seconds),
        "sessions": format_count(now.sessions),
        "cpu": percent(rates.cpu_share, 1.0, none="0 %"),
        "memory": format_size(now.resident_bytes),
        "leases": format_count(now.leases),
        "policy": str(fitting(now.policy)),
        "pid": str(now.pid),
        "pinned blocks": format_count(now.pinned_blocks),
    }
    return _pairs("Daemon", pairs)


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
        "slot table": pool.table_bytes,
    }
    yield _pairs("", {name: format_size(size) for name, size in sizes.items()})
    for note, style in _pool_notes(pool, blocks):
        yield Text(" " * TITLE_CELLS + note, style=style)


def _pool_notes(pool: PoolStats, blocks: BlockAccessStats) -> Iterator[tuple[str, str]]:
    """What is unusual about the pool, a line each, with its style."""
    if pool.spilled_slots:
        yield f"{format_count(pool.spilled_slots)} slots so far lie on another NUMA node than their GPU", "yellow"
    if 0 < pool.page_locked_bytes < pool.pool_bytes:
        locked = format_size(pool.page_locked_bytes)
        yield f"{locked} are page-locked for GPUs so far; the rest is copied slowly", "yellow"
    if blocks.pinned_blocks:
        pinned = f"{count_blocks(blocks.pinned_blocks)} ({format_size(blocks.pinned_bytes)})"
        yield f"{pinned} pinned by operators; see kvoffd-cli block ls --pinned", "dim"
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


def _now(rates: Rates) -> str:
    return f"{'now' if rates.activity is not None else 'last 10 s':>9}"


def _copies(now: StatsReply, rates: Rates) -> Table:
    """Both directions. ``copying at`` is the speed while a copy runs: what the memory gives."""
    table = _section("Copies", (_now(rates), "total", "copying at", "jobs", "failed", "queued", "running"))
    for title, direction, speed in (("store", now.store, rates.store_bytes), ("load", now.load, rates.load_bytes)):
        table.add_row(
            fitting(title),
            format_rate(speed),
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


def _lookups(now: StatsReply, rates: Rates) -> Table:
    """How often engines ask, how long the daemon takes for an answer, how many keys were there."""
    table = _section("Lookups", (_now(rates), "total", "p50", "p99", "max", "keys asked", "hits"))
    latency = now.lookup_latency
    durations = (latency.p50, latency.p99, latency.maximum)
    asked = sum(namespace.keys_asked for namespace in now.namespaces)
    table.add_row(
        fitting("all"),
        _per_second(rates.lookups),
        format_count(latency.count),
        *(format_duration(value) if latency.count else "-" for value in durations),
        format_count(asked),
        percent(sum(namespace.keys_ready for namespace in now.namespaces), asked),
    )
    return table


def _disks(now: StatsReply) -> Table:
    """All directories of the disk tier together."""
    disks, namespaces = now.disks, now.namespaces
    table = _section("Disk", ("used", "blocks", "hits", "read", "written", "pending", "errors"))
    table.add_row(
        fitting("all"),
        percent(sum(disk.used_bytes for disk in disks), sum(disk.size_bytes for disk in disks)),
        format_count(sum(disk.blocks for disk in disks)),
        percent(sum(one.keys_pending for one in namespaces), sum(one.keys_asked for one in namespaces)),
        format_size(sum(disk.read_bytes for disk in disks)),
        format_size(sum(disk.written_bytes for disk in disks)),
        format_count(now.below.pending_blocks if now.below is not None else 0),
        format_count(sum(sum(disk.errors.values()) for disk in disks)),
    )
    return table


def _activity(now: StatsReply, rates: Rates) -> Table:
    """What else was counted since the start and, between two samples, how fast it grows."""
    counters = activity_counters(now)
    table = _section("Activity", tuple(counters))
    table.add_row(fitting("total"), *(format_count(round(value)) for value in counters.values()))
    if rates.activity is not None:
        table.add_row(fitting("now"), *(_per_second(value) for value in rates.activity.values()))
    return table


def _per_second(value: float) -> str:
    """A speed below ten keeps a decimal, so that what is rare is not shown as nothing."""
    if value <= 0:
        return "0/s"
    return f"{format_count(round(value))}/s" if value >= 9.95 else f"{max(value, 0.1):.1f}/s"


def _namespaces(namespaces: list[NamespaceStats], most: int, wide: bool) -> RenderResult:
    """One line each. Hits are keys that were ready; prefix, those in the unbroken run at the start of a request."""
    if not namespaces:
        yield Text.assemble(("Namespaces ", "bold"), "none open; an engine opens its own when it connects")
        return
    table = _section("Namespace", ())
    table.add_column("", no_wrap=True, style="dim")
    asked = ("keys asked",) if wide else ()
    copied = ("stored", "loaded") if wide else ()
    add_numbers(table, ("blocks", "size", *asked, "hits", "prefix", *copied, "evicted", "dropped"))
    by_weight = sorted(namespaces, key=lambda namespace: (namespace.ready_bytes, namespace.keys_asked), reverse=True)
    for namespace in by_weight[:most]:
        table.add_row(*_namespace_row(namespace, wide))
    yield table
    if len(namespaces) > most:
        yield Text(f"and {len(namespaces) - most} smaller; `kvoffd-cli namespaces` lists all", style="dim")


def _namespace_row(namespace: NamespaceStats, wide: bool) -> tuple[Text | str, ...]:
    return (
        fitting(namespace.label or "(no label)"),
        short_fingerprint(namespace.namespace),
        format_count(namespace.ready_blocks),
        format_size(namespace.ready_bytes),
        *((format_count(namespace.keys_asked),) if wide else ()),
        percent(namespace.keys_ready, namespace.keys_asked),
        percent(namespace.prefix_keys_ready, namespace.keys_asked),
        *((format_size(namespace.stored_bytes), format_size(namespace.loaded_bytes)) if wide else ()),
        format_count(namespace.evicted_blocks),
        _alarming(namespace.dropped_keys),
    )


def _failures(now: StatsReply) -> dict[str, int]:
    """Refusals by code, the replies that clients did not read, what GPUs' drivers refused. Clients may leave early."""
    unread = now.replies_dropped.get("unread", 0)
    batches = now.store.refused_batches + now.load.refused_batches
    return (
        now.errors | ({"unread_replies": unread} if unread else {}) | ({"refused_batches": batches} if batches else {})
    )


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
        meaning = meanings.get(code.lower(), "")
        explained = Text(meaning, "dim") if whole else fitting(meaning, "dim")
        grid.add_row("" if index else "Errors", format_count(-negative), fitting(code), explained)
    return grid
