"""``kvoffd-cli stats``: sources of prompts' tokens, and why keys were missed; then the pool, namespaces and tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Annotated

import typer
from rich.text import Text

from kvoffd_client.admin_client import read_stats
from kvoffd_client.cli.format import (
    NO_NAMESPACE,
    Line,
    engine_lines,
    make_console,
    print_json,
    print_page,
    print_table,
    say,
)
from kvoffd_client.cli.target import CliError, Directory, Json, Url, check_one_daemon, open_admin
from kvoffd_proto import stats as s
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import fields_of
from kvoffd_proto.stats import namespace_name, reason_name
from kvoffd_proto.units import (
    count_blocks,
    format_count,
    format_duration,
    format_rate,
    format_size,
    percent,
    plural,
    printable,
)

BAR_CELLS = 80
DAY_S = 86_400.0
MAX_NAMESPACES = 5
"""Namespaces on the page; ``stats namespaces`` shows all."""
RARE_CLASS = 0.03
"""Share of lookups below which a class is not shown."""
FEW_REQUESTS, FEW_LIFETIMES = 1000, 10.0
"""With fewer prompts or pool lifetimes a policy has learned little."""

UNTIMED = "an engine knows its prefill rate after two runs of 512 prompt tokens"
"""Reason of an unknown time saved; see MIN_TOKENS in ``vllm/prefill_rate.py``."""

SOURCE_NAMES = {"engine": "engines' own cache", "other": "other connectors"}
"""Names of sources of tokens for people, where they are not clear."""
RARE = {
    "blocks evicted": "evicted_blocks",
    "keys without space": "no_space_keys",
    "keys rejected": "rejected_keys",
    "lookups late": "late_lookups",
    "loads skipped": "skipped_loads",
    "stores paused": "paused_stores",
    "blocks retained": "retained_blocks",
    "blocks not retained": "unretained_blocks",
    "retained keys found": "retained_found_keys",
    "blocks released": "released_blocks",
    "keys prefetched": "prefetched_keys",
    "hints unknown": "unknown_hints",
}
"""Rows of counts that are shown only if they are not 0."""


class Section(StrEnum):
    """Parts of the statistics with a page of their own."""

    POOL = "pool"
    NAMESPACES = "namespaces"
    TIERS = "tiers"
    POLICY = "policy"
    SETTINGS = "settings"


FIELDS = {
    Section.POOL: ("pool",),
    Section.NAMESPACES: ("namespaces",),
    Section.TIERS: ("tiers", "disks", "shared", "lent"),
    Section.POLICY: ("policy", "policy_bytes", "ghost_entries", "curve", "curve_seen_bytes", "learned"),
    Section.SETTINGS: ("settings",),
}
"""Fields of the statistics that ``--json`` has of a part, under the names that they have among all."""


def stats(
    section: Annotated[Section | None, typer.Argument(metavar="SECTION", help="Show only this part.")] = None,
    misses: Annotated[bool, typer.Option("--misses", help="Show misses by reason.")] = False,
    directory: Directory = None,
    url: Url = "",
    json: Json = False,
) -> int:
    """Show what the daemon saved, and what it does.

    Percentages of sources are of all prompts' tokens, those of misses of the keys asked for. A key is a block's hash.

    Exit status: 0; 1 with tiers, if a disk or store is down; 2 an error.
    """
    if misses and section:
        raise CliError("--misses and a section exclude each other; give one of them.")
    check_one_daemon(directory, url)
    if url:
        now = read_stats(url)
    else:
        with open_admin(directory) as admin:
            now = admin.stats()
    if json and misses:
        print_json({name: one.misses for name, one in _windows(now).items()})
    elif json:
        print_json({name: getattr(now, name) for name in FIELDS[section]} if section else now)
    elif misses:
        _misses(now)
    elif section is Section.POOL:
        _pool(now.pool)
    elif section is Section.NAMESPACES:
        _namespaces(now, len(now.namespaces))
        _namespaces_worth(now)
        if opened := [*engine_lines(now)]:
            say("", *opened)
    elif section is Section.TIERS:
        say(*tier_details(now))
    elif section is Section.POLICY:
        say(*policy_lines(now))
    elif section is Section.SETTINGS:
        settings = [(one.name, printable(one.value) or "-", printable(one.source)) for one in now.settings]
        print_table(("setting", "value", "from"), settings)
    else:
        print_stats(now)
    fails = any(one.state in ("failed", "hanging") for one in now.disks) or not all(one.up for one in now.shared)
    return int(section is Section.TIERS and fails)


def _windows(now: s.DaemonStats) -> dict[str, s.Window]:
    return {"last_minute": now.last_minute, "last_hour": now.last_hour, "since_start": now.since_start}


def _reasons(windows: Iterable[s.Window]) -> list[str]:
    return [reason for reason, _ in sum((Counter(one.misses) for one in windows), Counter[str]()).most_common()]


# --- the page --------------------------------------------------------------------------------------


def print_stats(now: s.DaemonStats) -> None:
    say(*_head(now), "")
    _traffic(now)
    say("")
    _pool_bar(now.pool)
    if now.namespaces or now.gone_namespaces:
        say("")
        _namespaces(now, MAX_NAMESPACES)
        if gone := now.gone_namespaces:
            which = f"{format_count(gone)} removed namespace{plural(gone)}"
            say((f"The sums above include {which}.", "dim"))
    if any(map(is_untimed, (now.since_start, *now.namespaces))):
        say((f"unknown: {UNTIMED}", "dim"))
    tiers = tier_details(now) if now.disks or now.shared or now.lent else ()
    if lines := [*tiers, *_errors(now)]:
        say("", *lines)


def _head(now: s.DaemonStats) -> Iterator[Line]:
    protocol = f" (protocol {now.protocol})" if now.protocol else ""
    yield (
        f"kvoffd {printable(now.version)}{protocol}, up {format_duration(now.uptime_seconds)}, policy "
        f"{printable(now.policy)}, {format_count(now.sessions)} session{plural(now.sessions)}, "
        f"{format_size(now.resident_bytes)} of memory besides the pool"
    )
    if now.health_problems:
        reasons = ", ".join(printable(one.reason) for one in now.health_problems)
        yield f"{now.health.value}: {reasons}; see kvoffd-cli health", "yellow"
    if worth := day_sentence(now.last_day):
        yield worth
    ever = now.lifetime
    if ever.loaded_tokens > now.since_start.loaded_tokens:
        saved = format_duration(ever.saved_seconds)
        yield f"including earlier runs: {format_count(ever.loaded_tokens)} tokens, {saved} of prefill saved"


def day_sentence(day: s.Window) -> str:
    """Return the one figure for who pays: what was not computed in the last day; empty if nothing was loaded."""
    if not day.loaded_prompt_tokens:
        return ""
    hours, share = day.saved_gpu_seconds / 3600, percent(day.loaded_prompt_tokens, day.all_prompt_tokens)
    saved = f"{hours:,.1f} GPU hours" if hours >= 0.1 else f"{format_duration(day.saved_gpu_seconds)} of a GPU"
    period = "24 h" if day.seconds > 0.9 * DAY_S else format_duration(day.seconds)
    worth = f", which saved {saved}" if day.saved_gpu_seconds else ""
    return f"of the last {period}'s prompt tokens {share} were loaded instead of computed{worth}"


def _traffic(now: s.DaemonStats) -> None:
    windows = list(_windows(now).values())

    def row(title: str, cell: Callable[[s.Window], str]) -> tuple[str, ...]:
        return (title, *map(cell, windows))

    def source(name: str) -> tuple[str, ...]:
        title = f"  {SOURCE_NAMES.get(name, printable(name))}"
        return row(title, lambda one: percent(one.prompt_tokens.get(name, 0), one.all_prompt_tokens))

    def missed(reason: str) -> tuple[str, ...]:
        return row(f"    {reason_name(reason)}", lambda one: percent(one.misses.get(reason, 0), one.asked_keys))

    rare = {title: [format_count(getattr(one, name)) for one in windows] for title, name in RARE.items()}
    print_table(
        ("", ">last minute", ">last hour", ">since start"),
        [
            row("tokens of prompts", lambda one: token_count(one.all_prompt_tokens, one.asked_keys)),
            *map(source, sources_of(now.since_start)),
            row("tokens loaded", lambda one: token_count(one.loaded_tokens, one.loaded_keys)),
            row("prefill saved", saved_time),
            row("keys asked for", lambda one: format_count(one.asked_keys)),
            row("  missed", lambda one: percent(sum(one.misses.values()), one.asked_keys)),
            *map(missed, _reasons(windows)),
            row("stored", lambda one: format_size(one.stored_bytes)),
            row("loaded", lambda one: format_size(one.loaded_bytes)),
            *((title, *cells) for title, cells in rare.items() if set(cells) != {"0"}),
        ],
    )


def sources_of(one: s.Traffic) -> list[str]:
    """Return the sources to show: those of every daemon, and others that had tokens."""
    known = [*s.PROMPT_SOURCES, *(name for name in one.prompt_tokens if name not in s.PROMPT_SOURCES)]
    return [name for name in known if name in ("computed", "engine", "pool") or one.prompt_tokens.get(name)]


def token_count(count: int, keys: int) -> str:
    """Return the tokens of ``keys`` keys; a dash if the engine does not report them."""
    return "-" if keys and not count else format_count(count)


def saved_time(one: s.Traffic) -> str:
    if one.loaded_keys and not one.loaded_tokens:
        return "-"
    return "unknown" if is_untimed(one) else format_duration(one.saved_seconds)


def size_of(one: s.NamespaceStats) -> str:
    return format_size(one.ready_bytes) + (f" of {format_size(one.quota_bytes)}" if one.quota_bytes is not None else "")


def is_untimed(one: s.Traffic) -> bool:
    """Return whether the engine's prefill rate is unknown."""
    return one.loaded_tokens > 0 and not one.saved_seconds


def _misses(now: s.DaemonStats) -> None:
    windows = list(_windows(now).values())
    totals = [sum(one.misses.values()) for one in windows]
    print_table(
        ("why", ">minute", ">hour", ">start", "meaning"),
        [
            *(
                (
                    reason_name(reason),
                    *(format_count(one.misses.get(reason, 0)) for one in windows),
                    s.MISS_REASONS.get(reason, ""),
                )
                for reason in _reasons(windows)
            ),
            ("all misses", *map(format_count, totals), "of keys that engines asked for"),
            ("keys asked for", *(format_count(one.asked_keys) for one in windows), ""),
        ],
    )
    tiers = [(f"the disk {one.directory}", one.missed_keys, one.up) for one in now.disks]
    tiers += [(one.url, one.missed_keys, one.up) for one in now.shared]
    for name, keys, is_up in tiers:
        if keys:
            since = "" if is_up else ", as it is now"
            say(f"tier down: {format_count(keys)} since the start while {printable(name)} was{since}.")


def _pool_bar(pool: s.PoolStats) -> None:
    console = make_console()
    for line in pool_bar(pool, min(BAR_CELLS, console.width)):
        print_page(line, console)
    say(*((f"     {text}", style) for text, style in _pool_notes(pool)))


def pool_bar(pool: s.PoolStats, width: int) -> list[Text]:
    """Return the states of the pool's bytes as a bar and in words."""
    parts = [("ready", "█", "green"), ("writing", "▒", "cyan"), ("dropped", "▒", "yellow")]
    parts += [("quarantined", "▒", "red"), ("free", "░", "dim")]
    used = pool.size_bytes - pool.of("free")
    tail = f"] {percent(used, pool.size_bytes)}, {format_size(used)} of {format_size(pool.size_bytes)}"
    bar = Text("Pool [")
    cells, shown_bytes, drawn = width - len(bar) - len(tail), 0, 0
    for state, mark, style in parts:
        shown_bytes += pool.of(state)
        end = round(cells * shown_bytes / max(1, pool.size_bytes))
        bar.append(mark * (end - drawn), style)
        drawn = max(drawn, end)
    bar.append(tail)
    named = [
        f"{state} {format_size(pool.of(state))}" for state, *_ in parts if pool.of(state) or state in ("ready", "free")
    ]
    return [bar, Text(f"     {'  '.join(named)}  pinned {format_size(pool.pinned_bytes)}")]


def _pool_notes(pool: s.PoolStats) -> Iterator[tuple[str, str]]:
    if pool.at_the_end:
        yield f"its memory {printable(pool.at_the_end)}{pages_of(pool)}", "dim"
    if pool.page_slowdown >= s.SLOW_PAGES:
        slower = f"reading it takes {pool.page_slowdown:.1f} times as long as memory in huge pages"
        yield f"{slower}; the daemon's log and kvoffd-cli doctor say what helps", "yellow"
    if pool.retained_bytes:
        yield f"{format_size(pool.retained_bytes)} are retained by hints: they are evicted last", "dim"
    if pool.numa_remote_slots:
        yield f"{format_count(pool.numa_remote_slots)} slots were taken on another NUMA node than their GPU", "yellow"
    if 0 < pool.pinned_for_gpu_bytes < pool.size_bytes:
        yield f"{format_size(pool.pinned_for_gpu_bytes)} are page-locked for GPUs; the rest is copied slowly", "yellow"
    if pool.of("quarantined"):
        yield f"{format_size(pool.of('quarantined'))} did not match their checksum; see kvoffd-cli health", "red"


def pages_of(pool: s.PoolStats) -> str:
    """Return how much of a pool is in huge pages, as the end of a sentence; empty if nobody looked."""
    if not (pool.huge_page_bytes or pool.page_slowdown):
        return ""
    reserved = "reserved " * (pool.memory == "reserved")
    return f"; {percent(pool.huge_page_bytes, pool.size_bytes)} of it in {reserved}huge pages"


def _pool(pool: s.PoolStats) -> None:
    _pool_bar(pool)
    rows = [
        (item.name.removesuffix("_bytes").replace("_", " "), format_size(getattr(pool, item.name)), meaning)
        for item, _, meaning in fields_of(s.PoolStats)
        if item.name.endswith("_bytes")
    ]
    say("")
    print_table(("", ">bytes", "meaning"), rows)


def _namespaces(now: s.DaemonStats, most: int) -> None:
    found = sorted(now.namespaces, key=lambda one: (one.ready_bytes, one.asked_keys), reverse=True)
    if not found:
        say(NO_NAMESPACE)
    else:
        print_table(
            ("namespace", "<id", ">size", ">prompt\ntokens", ">saved", ">computed", ">own", ">loaded"),
            [
                (
                    printable(one.model) or "(no label)",
                    one.id,
                    size_of(one),
                    token_count(one.all_prompt_tokens, one.asked_keys),
                    saved_time(one),
                    percent(one.prompt_tokens.get("computed", 0), one.all_prompt_tokens),
                    percent(one.prompt_tokens.get("engine", 0), one.all_prompt_tokens),
                    percent(one.loaded_prompt_tokens, one.all_prompt_tokens),
                )
                for one in found[:most]
            ],
        )
    if others := len(found[most:]):
        say((f"and {format_count(others)} more; `kvoffd-cli stats namespaces` has all", "dim"))


def _namespaces_worth(now: s.DaemonStats) -> None:
    """Show the prefill time that namespaces saved per hour, and what each GiB of the pool contributed."""
    rows = []
    for one in sorted(now.namespaces, key=lambda one: -one.saved_seconds):
        if one.saved_seconds:
            an_hour = one.saved_seconds * 3600 / max(1.0, now.uptime_seconds)
            per_gib = format_duration(an_hour * 2**30 / one.ready_bytes) if one.ready_bytes else "-"
            rows.append((one.id, format_duration(an_hour), per_gib))
    if rows:
        say("")
        print_table(("<id", ">prefill saved per hour", ">per hour and GiB of the pool"), rows)


def _errors(now: s.DaemonStats) -> Iterator[tuple[str, str]]:
    """Yield failures, most frequent first, with their meanings."""
    meanings = {name.lower(): code.sentence for name, code in ErrorCode.__members__.items()}
    meanings["unread_replies"] = "Replies were dropped because a client left too many unread."
    meanings["refused_batches"] = "A CUDA driver refused batches or rows of copies, which are copied piece by piece."
    found = Counter(now.errors)
    found["unread_replies"] += now.replies_dropped.get("unread", 0)
    found["refused_batches"] += now.store.refused_batches + now.load.refused_batches
    for code, count in (+found).most_common():
        yield f"{format_count(count)} {code}: {meanings.get(code.lower(), '')}", "red"


# --- tiers -----------------------------------------------------------------------------------------


def tier_details(now: s.DaemonStats) -> Iterator[Line]:
    if not now.disks and not now.shared and now.lent is None:
        yield "There is no disk and no shared store; see --disk and --shared of `kvoffd serve`."
    for disk in now.disks:
        yield from _disk(disk)
    if now.tiers is not None and now.disks:
        yield from _disk_traffic(now.tiers)
    if found := sorted((one for one in now.namespaces if one.disk_bytes), key=lambda one: -one.disk_bytes):
        yield "on disk: " + ", ".join(
            f"{namespace_name(one.model, one.id)} {format_size(one.disk_bytes)}" for one in found
        )
    for one in now.shared:
        yield from _shared(one)
    if (lent := now.lent) is not None:
        yield f"lent to peers: {count_blocks(lent.blocks)} ({format_size(lent.bytes)})", "" if lent.up else "yellow"
        yield (
            f"  they looked up {format_count(lent.asked_keys)} keys, found {format_count(lent.found_keys)}; "
            f"{format_size(lent.pinned_bytes)} lent now, {format_count(lent.refused_requests)} requests and "
            f"{format_count(lent.refused_handshakes)} connections refused"
        )


def _disk(disk: s.DiskStats) -> Iterator[Line]:
    oldest = f", oldest at most {format_duration(disk.oldest_seconds)}" if disk.blocks else ""
    yield f"{disk.directory}: {disk.state}", "bold" if disk.up else "bold yellow"
    if disk.problem:
        yield f"  {disk.problem}", "red"
    yield (
        f"  used {percent(disk.used_bytes, disk.size_bytes)} of {format_size(disk.size_bytes)}, "
        f"{count_blocks(disk.blocks)}{oldest}"
    )
    yield (
        f"  read {format_size(disk.read_bytes)}, written {format_size(disk.written_bytes)} since the start, "
        f"{format_size(disk.lifetime_written_bytes)} since its file was created"
    )
    yield from _faults(disk.errors, {str(one): one.meaning for one in s.DiskFault})
    if disk.up and not disk.direct:
        yield "  uses the page cache: the file system does not support O_DIRECT", "dim"


def _disk_traffic(tiers: s.TieringStats) -> Iterator[str]:
    left = tiers.write_budget_left_bytes
    limit = "no daily limit" if left is None else f"daily limit: {format_size(left)} left for now"
    speed = f", recently {format_rate(tiers.promotion_bytes_per_second)}" if tiers.promotion_bytes_per_second else ""
    yield (
        f"promoted {count_blocks(tiers.promoted_blocks)} ({format_size(tiers.promoted_bytes)}){speed}, "
        f"{format_count(tiers.promotions_waiting)} waiting{_unused(tiers.promotions_unused)}, "
        f"failed: {_failed(tiers.promotions_failed)}"
    )
    yield (
        f"written {count_blocks(tiers.written_blocks)} ({format_size(tiers.written_bytes)}), "
        f"{format_count(tiers.writes_waiting)} waiting, disk_write {tiers.write_mode}, {limit}"
    )
    yield from _not_written(tiers.not_written)


def _not_written(counts: Mapping[str, int]) -> Iterator[str]:
    for reason, count in sorted(counts.items()):
        if count:
            yield f"  not written: {count_blocks(count)} {s.NOT_WRITTEN.get(reason, reason)}"


def _unused(blocks: int) -> str:
    return f", {format_count(blocks)} evicted before they were loaded" if blocks else ""


def _shared(one: s.SharedStats) -> Iterator[Line]:
    yield f"{one.url}: {'up' if one.up else 'down'}", "bold" if one.up else "bold yellow"
    yield (
        f"  looked up {format_count(one.asked_keys)} keys, found {format_count(one.found_keys)}, no answer in time for "
        f"{format_count(one.unanswered_keys)}; answers take {answer_time(one)}, paused "
        f"{format_count(one.breaker_trips)} time{plural(one.breaker_trips)} after failures"
    )
    yield (
        f"  read {count_blocks(one.read_blocks)} ({format_size(one.read_bytes)}), "
        f"{format_count(one.queued_reads)} waiting{_unused(one.promotions_unused)}, "
        f"failed: {_failed(one.promotions_failed)}"
    )
    if not one.url.startswith("peer://"):  # it is only read
        yield _usage(one)
        yield (
            f"  written {count_blocks(one.written_blocks)} ({format_size(one.written_bytes)}), "
            f"{format_count(one.already_stored)} more were there already, {format_count(one.queued_writes)} waiting, "
            f"{format_count(one.dropped_writes)} dropped, shared_write {one.write_mode}"
        )
        yield from _not_written(one.not_written)
    if one.dropped_removals:
        yield (
            f"  {format_count(one.dropped_removals)} damaged or shorter copies of blocks could not be removed: lookups "
            "that find them miss, or a load fails and is recomputed"
        )
    for server in one.servers:
        problem = f"cannot be used: {server.problem or 'not tried yet'}"
        yield f"  server {server.name}: {'answers' if server.up else problem}", "" if server.up else "yellow"
    if one.unshared_namespaces:
        yield (
            f"  {format_count(one.unshared_namespaces)} namespaces are not shared, after a reset or a damaged state: "
            "`kvoffd-cli clear NAME --all-nodes` shares one again, `kvoffd-cli clear --all --all-nodes` all of them",
            "yellow",
        )
    yield from _faults(one.errors, s.SHARED_ERRORS)


def answer_time(one: s.SharedStats) -> str:
    return format_duration(one.ask_seconds) if one.ask_seconds else "-"


def _usage(one: s.SharedStats) -> str:
    size = f" of {format_size(one.size_bytes)}" if one.size_bytes else ", without a limit"
    used = f"{format_size(one.used_bytes)}{size}"
    if not one.up:
        return f"  used {used}, when it last answered" if one.used_bytes else "  usage unknown"
    uses = f"uses {used}" if one.used_bytes else "does not report its usage"
    chosen = ", and gets only blocks that are likely to be reused" if one.write_mode == "auto" else ""
    return f"  {uses}: it is full{chosen}" if one.full else f"  {uses}"


def _faults(counts: Mapping[str, int], meanings: Mapping[str, str]) -> Iterator[Line]:
    for kind, count in sorted(counts.items()):
        yield f"  {kind} {format_count(count)}: {meanings.get(kind, 'see the log of the daemon')}", "red"


def _failed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {format_count(count)}" for kind, count in sorted(counts.items())) or "none"


# --- the policy ------------------------------------------------------------------------------------


def policy_lines(now: s.DaemonStats) -> Iterator[Line]:
    found = now.learned
    yield (
        f"Policy {printable(now.policy)}: {format_count(found.known_keys)} keys known, "
        f"{format_count(now.ghost_entries)} of them without a block, in {format_size(now.policy_bytes)}."
    )
    if not found.classes:
        yield "It has not seen enough to learn." if now.policy == "learned" else "It does not learn."
        return
    total, requests = now.since_start, found.requests
    # Each of them counts as a mean one since the daemon's start.
    block_bytes = total.stored_bytes / max(1, total.stored_blocks)
    asked_bytes = requests * total.asked_keys / max(1, total.lookups) * block_bytes
    lifetimes = asked_bytes / max(1, now.pool.size_bytes)
    prompts = f"{format_count(requests)} prompt{plural(requests)}"
    yield f"It has seen {prompts}, which asked for about {_of_pool(lifetimes)}."
    if requests < FEW_REQUESTS or lifetimes < FEW_LIFETIMES:
        yield "That is little: the following are first estimates.", "yellow"
    if found.as_lru:
        yield "Blocks are evicted as with lru for now, which would have had more hits.", "yellow"
    yield "Of the keys asked for:"
    for one in found.classes:
        if one.accessed_share >= RARE_CLASS:
            share, age = percent(one.return_chance, 1.0), _of_pool(min(one.return_age, lifetimes))
            if one.return_age <= lifetimes:
                reuse = f"about {share} come back, half of them before engines ask for {age} more"
            else:
                reuse = f"perhaps {share} come back, most of them later than was seen so far"
            yield f"{percent(one.accessed_share, 1.0):>6} {printable(one.name)}"
            yield f"       {reuse}; {format_size(one.pool_bytes)} in the pool"
    if any("lifetime" in one.name for one in found.classes if one.accessed_share >= RARE_CLASS):
        yield "A lifetime: the time in which engines ask for as many bytes as the pool holds.", "dim"


def _of_pool(lifetimes: float) -> str:
    """Return bytes in multiples of the pool's size: ``30 % of the pool's size``, ``12 times the pool's size``."""
    if lifetimes < 0.995:
        return f"{100 * lifetimes:.2g} % of the pool's size"
    many = f"{lifetimes:.2g}" if lifetimes < 10 else format_count(round(lifetimes))
    return "the pool's size" if many == "1" else f"{many} times the pool's size"
