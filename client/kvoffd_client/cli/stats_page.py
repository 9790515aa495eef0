"""The page of ``kvoffd-cli stats``: a DaemonStats, and perhaps the one before it, as something rich can print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from kvoffd_client.cli.console import (
    GAP,
    add_numbers,
    bar_characters,
    fitting,
    percent,
    section,
)
from kvoffd_client.cli.pool_notes import pool_notes
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.stats import CopyStats, DaemonStats, DiskFault, NamespaceStats, PoolStats, Window
from kvoffd_proto.units import format_count, format_duration, format_rate, format_size, plural, printable

TITLE_CELLS = 11
"""Width of the first column of every section with its gap, so that the sections line up."""
PAIR_CELLS, PAIRS_OF_LINE = 17, 4
"""Width of one name with its value, and how many of them fit on 80 columns beside the title."""
WIDE_CELLS = 116
"""From here on there is room for every column but those of limits and rates, which are shown where there are any"""
WIDEST_CELLS = 170
"""and there is room for them."""
AIRY_LINES = 36
"""On a screen with fewer lines the sections stand close together, so that a small terminal shows them all."""
CLOSE = ("settings", "ended", "health", "notes", "misses", "curve", "late")
"""Sections without an empty line before them."""
LEAST_NAMESPACE_LINES = 3
"""Lines of namespaces for which other sections are made shorter."""
Section: TypeAlias = tuple[RenderableType, ...]
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

    now: DaemonStats
    notice: str = ""
    footnote: str = ""
    lines: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        now, wide = self.now, options.max_width >= WIDE_CELLS
        sections: dict[str, Section] = {
            "notice": (Text(self.notice, style="bold red"),) if self.notice else (),
            "daemon": tuple(_daemon(now)),
            "settings": tuple(_settings(now)),
            "ended": tuple(_ended(now)),
            "health": tuple(_health(now)),
            "pool": tuple(_pool(now.pool, options)),
            "notes": tuple(fitting(" " * TITLE_CELLS + text, style) for text, style in pool_notes(now.pool)),
            "over": (_recent(_windows(now), wide),),
            "misses": tuple(_misses(_windows(now), wide)),
            "curve": tuple(_curve(now, wide)),
            "copies": (_copies(now, wide),),
            "lookups": (_lookups(now, wide),),
            "late": tuple(_late(_windows(now))),
            "disks": (_disks(now, wide),) if now.disks else (),
            "namespaces": (),
            "errors": (_errors(_failures(now)),),
            "footnote": (Text(self.footnote, style="dim"),) if self.footnote else (),
        }

        def height(*parts: RenderableType) -> int:
            return sum(len(console.render_lines(part, options)) for part in parts)

        most, airy = MAX_NAMESPACES, not console.is_terminal or console.height >= AIRY_LINES
        if self.lines is not None:
            most, airy = self._fit(sections, self.lines, height)
        sections["namespaces"] = tuple(_namespaces(now, most, options.max_width))
        for index, (name, parts) in enumerate((name, parts) for name, parts in sections.items() if parts):
            if index and airy and name not in CLOSE:
                yield Text()
            yield from parts

    def _fit(self, sections: dict[str, Section], lines: int, height: Callable[..., int]) -> tuple[int, bool]:
        """Leave out what the screen has no lines for.

        Returns how many namespaces it has lines for, and whether there are some for empty lines between sections.
        """
        failures, found = _failures(self.now), len(self.now.namespaces)
        shorter: dict[str, Section] = {
            "errors": (_short_errors(failures),),
            "ended": (),
            "settings": (),
            "late": (),
            "curve": (),
            "misses": (),
            "notes": (),
        }
        # Beside the namespaces there is a line with the titles, and one that says how many others there are.
        wanted = min(found, MAX_NAMESPACES) + 1 + (found > MAX_NAMESPACES)
        left = lines - sum(height(*parts) for parts in sections.values())
        empty_lines = sum(bool(parts) for name, parts in sections.items() if name not in CLOSE)
        for name, parts in shorter.items():
            if left >= min(wanted, LEAST_NAMESPACE_LINES):
                break
            left += height(*sections[name]) - height(*parts)
            sections[name] = parts
        return (MAX_NAMESPACES if left >= wanted else max(0, left - 2)), left >= wanted + empty_lines


def _pairs(title: str, pairs: dict[str, str]) -> Table:
    grid = Table.grid()
    grid.add_column(width=TITLE_CELLS, style="bold", no_wrap=True)
    for _ in range(PAIRS_OF_LINE):
        grid.add_column(width=PAIR_CELLS, no_wrap=True, overflow="ellipsis")
    cells = [Text.assemble((f"{name} ", "dim"), value) for name, value in pairs.items()]
    for index in range(0, len(cells), PAIRS_OF_LINE):
        grid.add_row("" if index else title, *cells[index : index + PAIRS_OF_LINE])
    return grid


def _titled(title: str, text: Text) -> Table:
    grid = Table.grid()
    grid.add_column(width=TITLE_CELLS, style="bold", no_wrap=True)
    grid.add_column()
    grid.add_row(title, text)
    return grid


def _section(title: str, numbers: Sequence[str]) -> Table:
    return section(title, numbers, min_cells=TITLE_CELLS - 2)


def _daemon(now: DaemonStats) -> Iterator[Table]:
    pairs = {
        "version": str(fitting(now.version)),
        "up": format_duration(now.uptime_seconds),
        "pid": str(now.pid),
        "memory": format_size(now.resident_bytes),
        "policy": str(fitting(now.policy)),
        "sessions": format_count(now.sessions),
        "leases": format_count(now.leases),
        "pinned": f"{format_count(now.pinned_blocks)} blocks",
    }
    yield _pairs("Daemon", pairs)


def _settings(now: DaemonStats) -> Iterator[Text]:
    """Settings that are not the default; ``--json`` has all."""
    if changed := [f"{one.name} {one.value or 'nothing'}" for one in now.settings if not one.default]:
        yield fitting(f"{'Settings':<{TITLE_CELLS}}{', '.join(changed)}", "dim")


def _ended(now: DaemonStats) -> Iterator[Text]:
    if found := Counter(now.ended_sessions).most_common():
        ended = ", ".join(f"{format_count(count)} {why.replace('_', ' ')}" for why, count in found)
        yield fitting(f"{'Sessions':<{TITLE_CELLS}}that ended: {ended}", "dim")


def _health(now: DaemonStats) -> Iterator[Text]:
    if now.health_problems:
        reasons = ", ".join(dict.fromkeys(one.reason for one in now.health_problems))
        yield fitting(f"{'Health':<{TITLE_CELLS}}{now.health.value}: {reasons}; see kvoffd-cli health", "yellow")


def _pool(pool: PoolStats, options: ConsoleOptions) -> Iterator[Table | Text]:
    used = pool.size_bytes - pool.of("free")
    numbers = f"  {percent(used, pool.size_bytes)}  {format_size(used)} of {format_size(pool.size_bytes)}"
    cells = max(MIN_BAR_CELLS, options.max_width - TITLE_CELLS - len(numbers))
    line = Text(no_wrap=True)
    line.append("Pool".ljust(TITLE_CELLS), style="bold")
    line.append_text(_bar(pool, cells, bar_characters(options)))
    line.append(numbers)
    yield line
    sizes = {
        "ready": pool.of("ready"),
        "writing": pool.of("filling"),
        "leaving": pool.of("evicting"),
        "free": pool.of("free"),
        "pinned": pool.pinned_bytes,
        "table": pool.table_bytes,
    }
    yield _pairs("", {name: format_size(size) for name, size in sizes.items()})


def _bar(pool: PoolStats, cells: int, characters: tuple[str, str, str]) -> Text:
    """Readable bytes, then those being written or leaving, then free ones. What is there gets at least one cell."""
    full, half, empty = characters
    ready = _cells_of(pool.of("ready"), pool.size_bytes, cells)
    moving = min(cells - ready, _cells_of(pool.of("filling") + pool.of("evicting"), pool.size_bytes, cells))
    free = empty * (cells - ready - moving)
    return Text.assemble((full * ready, "green"), (half * moving, "yellow"), (free, "dim"))


def _cells_of(part: int, whole: int, cells: int) -> int:
    return min(cells, max(1, round(cells * part / whole))) if part > 0 and whole > 0 else 0


def _windows(now: DaemonStats) -> dict[str, Window]:
    return {"last minute": now.last_minute, "last hour": now.last_hour, "in all": now.since_start}


def _recent(recent: dict[str, Window], wide: bool) -> Table:
    """Speeds and ratios over several windows of time: what was loaded, found and not needed, and missed."""
    row: tuple[Text | str, ...]
    table = _section("Over", ("keys asked", "loaded", "not needed", "miss", "tokens", "stored", "evicted"))
    if wide:
        add_numbers(table, ("pool", "disk", "shared", "lookups", "no space"))
    for name, window in recent.items():
        seconds, asked, found = max(window.seconds, 1e-9), window.asked_keys, window.found_keys
        row = (
            _per_second(asked / seconds),
            percent(window.loaded_keys, asked),
            percent(window.not_needed_keys, asked),
            percent(sum(window.misses.values()), asked),
            _per_second(window.loaded_tokens / seconds),
            format_rate(window.stored_bytes / seconds),
            _per_second(window.evicted_blocks / seconds),
        )
        if wide:
            sources = (percent(found.get(source, 0), asked) for source in ("pool", "disk", "shared"))
            row = (*row, *sources, _per_second(window.lookups / seconds), _alarming(window.no_space_keys))
        table.add_row(fitting(name), *row)
    return table


def _misses(recent: dict[str, Window], wide: bool) -> Iterator[Table]:
    """Why keys were not brought: the most frequent reasons."""
    parts = []
    for name, window in recent.items():
        total, most = sum(window.misses.values()), Counter(window.misses).most_common(None if wide else 2)
        if total and name != "last hour":
            reasons = ", ".join(f"{reason.replace('_', ' ')} {percent(count, total)}" for reason, count in most)
            parts.append(f"{name}: {reasons}")
    if parts:
        yield _titled("Misses", Text(printable("; ".join(parts))))


def _curve(now: DaemonStats, wide: bool) -> Iterator[Text]:
    """The part of the tokens that was found, and that an lru had found with other sizes of the pool."""
    if (curve := now.curve) is None or not curve.asked_tokens:
        return
    found = percent(curve.found_tokens, curve.asked_tokens, "0 %")
    pools = {"0.5": "half the pool", "1": "this", "2": "twice", **({"10": "ten times"} if wide else {})}
    others = (f"{name} {percent(curve.lru_hit_ratio[size], 1, '0 %')}" for size, name in pools.items())
    yield fitting(f"{'Tokens':<{TITLE_CELLS}}{found} found; lru: {', '.join(others)}")


def _copies(now: DaemonStats, wide: bool) -> Table:
    """Both directions since the start. ``copying at`` is the speed while a copy runs: what the memory gives."""
    table = _section("Copies", ("total", "copying at", "jobs", "failed", "queued", "running"))
    dropped = (now.cancelled_stores, now.unsent_stores) if wide else ()
    if any(dropped):
        add_numbers(table, ("cancelled", "unsent"))
    for title, direction in (("store", now.store), ("load", now.load)):
        table.add_row(
            fitting(title),
            format_size(direction.bytes),
            _copy_speed(direction),
            format_count(direction.jobs),
            _alarming(direction.failed_jobs),
            format_count(direction.queued_jobs),
            format_count(direction.running_jobs),
            *((format_count(count) if title == "store" else "-" for count in dropped) if any(dropped) else ()),
        )
    return table


def _copy_speed(direction: CopyStats) -> str:
    if direction.bytes <= 0 or direction.busy_seconds <= 0:
        return "-"
    return format_rate(direction.bytes / direction.busy_seconds)


def _alarming(count: int) -> Text:
    return Text(format_count(count), style="red" if count else "")


def _lookups(now: DaemonStats, wide: bool) -> Table:
    """How long the daemon takes for an answer, and what else it did since the start."""
    table = _section("Lookups", ("total", "p50", "p99", "no room", "declined", "requests"))
    if wide:
        add_numbers(table, ("KV events",))
    times = now.lookup_seconds
    durations = (times.quantile(0.5), times.quantile(0.99))
    table.add_row(
        fitting("all"),
        format_count(times.count),
        *(format_duration(value) if times.count else "-" for value in durations),
        _alarming(sum(namespace.no_space_keys for namespace in now.namespaces)),
        format_count(sum(namespace.rejected_keys for namespace in now.namespaces)),
        format_count(now.requests),
        *((format_count(now.kv_events),) if wide else ()),
    )
    return table


def _late(recent: dict[str, Window]) -> Iterator[Text]:
    """Lookups whose answers engines did not wait for.

    Engines report them later than they ask, so there may be more of them in a window than lookups.
    """
    if not any(window.late_lookups for window in recent.values()):
        return
    parts = (
        f"{percent(window.late_lookups, max(window.lookups, window.late_lookups), '0 %')} {name} "
        f"({format_count(window.late_lookups)})"
        for name, window in recent.items()
    )
    yield fitting(f"{'Late':<{TITLE_CELLS}}{', '.join(parts)}: engines computed these prompts", "yellow")


def _disks(now: DaemonStats, wide: bool) -> Table:
    """``spared``: blocks that were not worth a write."""
    disks = now.disks
    table = _section("Disk", ("used", "blocks", "read", "written", "pending", "failed", "errors"))
    if wide:
        add_numbers(table, ("spared",))
    table.add_row(
        fitting("all"),
        percent(sum(disk.used_bytes for disk in disks), sum(disk.size_bytes for disk in disks)),
        format_count(sum(disk.blocks for disk in disks)),
        format_size(sum(disk.read_bytes for disk in disks)),
        format_size(sum(disk.written_bytes for disk in disks)),
        format_count(now.tiers.promotions_waiting if now.tiers is not None else 0),
        _alarming(sum(now.tiers.promotions_failed.values()) if now.tiers is not None else 0),
        _alarming(sum(sum(disk.errors.values()) for disk in disks)),
        *((format_count(now.tiers.writes_avoided if now.tiers is not None else 0),) if wide else ()),
    )
    return table


def _per_second(value: float) -> str:
    """A speed below ten keeps a decimal, so that what is rare is not shown as nothing."""
    if value <= 0:
        return "0/s"
    return f"{format_count(round(value))}/s" if value >= 9.95 else f"{max(value, 0.1):.1f}/s"


def _namespaces(now: DaemonStats, most: int, width: int) -> Iterator[Table | Text]:
    """One line each. Hits are keys that pool or disk had; prefix, those in the pool in the run at a request's start."""
    namespaces = now.namespaces
    if not namespaces:
        yield Text.assemble(("Namespaces ", "bold"), "none open; an engine opens its own when it connects")
        return
    table = _section("Namespace", ())
    table.add_column("", no_wrap=True, style="dim")
    wide, widest = width >= WIDE_CELLS, width >= WIDEST_CELLS
    more = ("stored", "bytes loaded", "evicted") if wide else ()
    if widest and any(one.quota_bytes is not None for one in namespaces):
        more = (*more, "at most")
    if widest and any(one.load_tokens_per_second or one.prefill_tokens_per_second for one in namespaces):
        more = (*more, "computes", "loads", "left out")
    add_numbers(table, ("blocks", "size", "tokens loaded", "saved", "loaded", *more))
    by_weight = sorted(namespaces, key=lambda namespace: (namespace.ready_bytes, namespace.asked_keys), reverse=True)
    for namespace in by_weight[:most]:
        quota = "-" if namespace.quota_bytes is None else format_size(namespace.quota_bytes)
        rates = _rates(namespace) if "loads" in more else ()
        table.add_row(*_namespace_row(namespace, wide), *([quota] if "at most" in more else []), *rates)
    if most:
        yield table
    found = len(namespaces) + now.other_namespaces
    if found > most:
        others = f"{found - most} {'smaller' if most else f'namespace{plural(found)}'}"
        yield Text(f"and {others}; `kvoffd-cli namespaces` lists all", style="dim")


def _rates(namespace: NamespaceStats) -> tuple[str, ...]:
    """Tokens a second that its engine computes, and that loads bring it; loads left out, since that is slower."""
    rates = namespace.prefill_tokens_per_second, namespace.load_tokens_per_second
    return (*(_per_second(rate) if rate else "-" for rate in rates), format_count(namespace.skipped_loads))


def _namespace_row(namespace: NamespaceStats, wide: bool) -> tuple[Text | str, ...]:
    row: tuple[Text | str, ...] = (
        fitting(namespace.model or "(no label)"),
        namespace.id,
        format_count(namespace.ready_blocks),
        format_size(namespace.ready_bytes),
        format_count(namespace.loaded_tokens),
        format_duration(namespace.saved_seconds),
        percent(namespace.loaded_keys, namespace.asked_keys),
    )
    if not wide:
        return row
    return (
        *row,
        format_size(namespace.stored_bytes),
        format_size(namespace.loaded_bytes),
        format_count(namespace.evicted_blocks),
    )


def _failures(now: DaemonStats) -> Counter[str]:
    """Refusals by code, the replies that clients did not read, what GPUs' drivers refused, errors of disks."""
    found = Counter(now.errors)
    found["unread_replies"] += now.replies_dropped.get("unread", 0)
    found["refused_batches"] += now.store.refused_batches + now.load.refused_batches
    for disk in now.disks:
        found.update({f"disk_{kind}": count for kind, count in disk.errors.items()})
    return +found


def _short_errors(failures: Counter[str]) -> Table:
    """Failures by code, most frequent first, for a screen that has no room for what they mean."""
    counts = ", ".join(f"{format_count(count)} {printable(code)}" for code, count in failures.most_common())
    return _titled("Errors", Text.assemble((counts, "red"), "; `kvoffd-cli stats` explains them"))


def _errors(failures: Counter[str]) -> Table | Text:
    """Failures by code, most frequent first, each with the sentence of what it means."""
    meanings = {name.lower(): code.sentence for name, code in ErrorCode.__members__.items()}
    meanings["refused_batches"] = "A CUDA driver refused batches of copies, which were made one by one, slowly."
    meanings["unread_replies"] = "Replies were dropped, since a client has left too many unread."
    meanings |= {f"disk_{fault}": f"Of disks: {fault.meaning}." for fault in DiskFault}
    if not failures:
        return Text.assemble(("Errors".ljust(TITLE_CELLS), "bold"), "none")
    grid = Table.grid(padding=GAP)
    grid.add_column(width=TITLE_CELLS - 2, style="bold", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(style="red", no_wrap=True)
    grid.add_column()
    for index, (code, count) in enumerate(failures.most_common()):
        meaning = Text(meanings.get(code.lower(), ""), "dim")
        grid.add_row("" if index else "Errors", format_count(count), fitting(code), meaning)
    return grid
