"""``kvoffd-cli`` without a command: the daemon on one screen, as text for a ticket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from kvoffd_client.cli.doctor import gather_facts
from kvoffd_client.cli.format import print_line
from kvoffd_client.cli.stats import SOURCE_NAMES, saved_time, sources_of
from kvoffd_client.cli.target import CliError, open_admin
from kvoffd_client.errors import KvoffdClientError
from kvoffd_proto.engines import engines_of
from kvoffd_proto.findings import Facts, find
from kvoffd_proto.stats import DaemonStats, Window, reason_name
from kvoffd_proto.units import format_count, format_duration, format_size, percent, plural, printable

WIDTH, HEIGHT = 80, 24
LABEL_CELLS = 10
MAX_WRAPPED = 2
"""Lines of one label."""
MAX_TIERS, MAX_FINDINGS = 3, 5
"""Lines of tiers and findings, after which a line says how many more there are."""


def show_overview(directory: Path | None) -> int:
    """Print the overview of the daemon of this node, or of that directory. Raises CliError if it does not answer."""
    try:
        with open_admin(directory) as admin:
            facts = gather_facts(admin, {})
    except KvoffdClientError as error:
        raise CliError(f"{error} `kvoffd-cli --help` shows all commands.") from error
    print_line("\n".join(overview(facts)))
    return 0


def overview(facts: Facts) -> list[str]:
    """Return at most ``HEIGHT`` lines of ``WIDTH`` characters."""
    return [line for label, text in _parts(facts) for line in _lines(label, text)]


def _lines(label: str, text: str) -> list[str]:
    cut = wrap(printable(text), WIDTH - LABEL_CELLS, max_lines=MAX_WRAPPED, placeholder=" …") or ["-"]
    return [f"{label if not number else '':<{LABEL_CELLS}}{line}" for number, line in enumerate(cut)]


def _line(text: str) -> str:
    """Return a text for one line behind a label."""
    text, cells = printable(text), WIDTH - LABEL_CELLS
    return text if len(text) <= cells else f"{text[: cells - 1]}…"


def _parts(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield labels and texts; those that may get long begin with what matters."""
    stats, pool = facts.stats, facts.stats.pool
    up = format_duration(stats.uptime_seconds)
    yield "kvoffd", f"{stats.version} (protocol {stats.protocol}) on {stats.node}, up {up}, policy {stats.policy}"
    yield "state", f"{stats.health.value}. {stats.verdict}"
    used = pool.size_bytes - pool.of("free")
    text = f"{format_size(used)} of {format_size(pool.size_bytes)} used ({percent(used, pool.size_bytes)}), "
    yield "pool", f"{text}{format_size(pool.pinned_bytes)} pinned; its memory {pool.at_the_end}"
    yield "engines", _engines(facts)
    # The last hour, or all since the start if nothing came in it.
    hour, start = stats.last_hour, stats.since_start
    named = ("last hour", hour) if hour.all_prompt_tokens or hour.asked_keys else ("since the start", start)
    yield "tokens", _tokens(*named)
    yield "saved", _line(f"{saved_time(hour)} of prefill in the last hour, {saved_time(start)} since the start")
    yield "missed", _misses(*named)
    tiers = list(_tiers(stats))
    for text in tiers[:MAX_TIERS]:
        yield "tier", _line(text)
    if (more := len(tiers) - MAX_TIERS) > 0:
        yield "", f"and {more} more: kvoffd-cli stats tiers"
    found = find(facts)
    for one in found[:MAX_FINDINGS]:
        yield one.level, _line(f"{one.check}: {one.evidence}")
    if (more := len(found) - MAX_FINDINGS) > 0:
        yield "", f"and {more} more finding{plural(more)}: kvoffd-cli doctor --all"
    elif not found:
        yield "findings", "none"
    yield "more", "kvoffd-cli doctor, stats, top, clients --requests; --help has the rest"


def _engines(facts: Facts) -> str:
    labels = {one.namespace: one.label for one in facts.namespaces}
    engines = engines_of(facts.sessions or (), labels)
    names = [f"{one.name} ({', '.join(one.labels)})" if one.labels else one.name for one in engines]
    return f"{len(engines)}: {'; '.join(names)}" if engines else "none"


def _tokens(period: str, window: Window) -> str:
    total = window.all_prompt_tokens
    shares = (
        f"{SOURCE_NAMES.get(name, name)} {percent(window.prompt_tokens.get(name, 0), total)}"
        for name in sources_of(window)
    )
    return f"{period}: {format_count(total)}: {', '.join(shares)}" if total else f"{period}: none reported"


def _misses(period: str, window: Window) -> str:
    largest = sorted(window.misses.items(), key=lambda item: -item[1])
    reasons = ", ".join(f"{reason_name(reason)} {percent(keys, window.asked_keys)}" for reason, keys in largest if keys)
    return f"{period}, of {format_count(window.asked_keys)} keys: {reasons or 'none'}"


def _tiers(stats: DaemonStats) -> Iterator[str]:
    for disk in stats.disks:
        used = f"{percent(disk.used_bytes, disk.size_bytes)} of {format_size(disk.size_bytes)} used"
        yield f"{disk.state}, {used}: {disk.directory}"
    for one in stats.shared:
        found = f"found {percent(one.found_keys, one.asked_keys)} of the keys asked for" if one.asked_keys else "unused"
        yield f"{'up' if one.up else 'down'}, {found}: {one.url}"
