"""``kvoffd-cli advise``: what the cache brings, what would bring more, and what is in its way, in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, islice

import typer
from msgspec import structs

from kvoffd_client.cli.console import (
    TEXT_CELLS,
    make_console,
    namespace_name,
    percent,
    print_page,
)
from kvoffd_client.cli.json_objects import Advice, AdviceGiven
from kvoffd_client.cli.json_output import print_json
from kvoffd_client.cli.pool_notes import FULL_INDEX, index_is_full
from kvoffd_client.cli.target import Directory, Json, open_admin
from kvoffd_client.namespace import differences, differing_fields, fields_of_description
from kvoffd_proto.admin import NamespaceInfo
from kvoffd_proto.messages import BENCH_LABEL
from kvoffd_proto.stats import DaemonStats, HitCurve, NamespaceStats, PoolStats
from kvoffd_proto.units import format_count, format_duration, format_size, plural, printable

FEWEST_LOOKUPS = 100
"""With fewer the numbers are left to chance."""
POINTS = 1.0
"""Percentage points of hits that are worth a sentence."""
STARVED_POINTS = 10.0
AT_QUOTA = 0.9
"""Part of its quota from which on it is that which keeps a namespace from more."""
DEAR = 10.0
"""Bytes written for a byte read that are too many."""
SMALLEST_SLOT_BYTES = 8192
FEW_KEYS = 2.0
"""Whole blocks of a request; with fewer most of its tokens are in a block that is not whole."""
LATE = 0.1
"""Of what a disk has, the part that may come too late."""
MOST_PAIRS = 5
_HASHES = "give both engines the same PYTHONHASHSEED, or none and the same SHA-256 as --prefix-caching-hash-algo"
_REMEDIES = {
    "hash_probe": _HASHES,
    "private": _HASHES,
    "salt": "give both the same salt if they may share",
    "tokens_per_hash": "give both the same --block-size",
    "blocks_per_chunk": "give both the same block size",
    "groups": "give both the same --block-size and --kv-cache-dtype",
    "kv_cache_dtype": "give both the same --kv-cache-dtype",
}
"""What to do where engines differ in a field of the fingerprint."""


def advise(context: typer.Context, directory: Directory = None, json: Json = False) -> None:
    """Say what the cache saved and what would bring more.

    What more or less memory would do, and what is misconfigured. Says so where there was too little traffic to
    tell. What pools of other sizes would find is estimated, as by curve; everything else was counted since the
    daemon's start.
    """
    with open_admin(context, directory) as admin:
        stats, namespaces = admin.stats(), admin.namespaces().namespaces
    given = advice_of(stats, namespaces)
    if json:
        print_json(given)
        return
    console = make_console(pipe_cells=TEXT_CELLS)
    for number, one in enumerate(given.advice):
        if number:
            print_page("", console)
        print_page(printable(one.text), console)


def advice_of(stats: DaemonStats, namespaces: Sequence[NamespaceInfo]) -> AdviceGiven:
    stats = structs.replace(stats, namespaces=[one for one in stats.namespaces if not one.of_bench and one.fingerprint])
    namespaces = [info for info in namespaces if not _is_of_bench(info)]
    known = {info.namespace.hex(): info for info in namespaces}
    lookups = stats.since_start.lookups
    enough = lookups >= FEWEST_LOOKUPS and stats.curve is not None and stats.curve.asked_tokens > 0
    found: list[Advice] = []
    if enough:
        assert stats.curve is not None
        found += _saved(stats)
        found += _sizes(stats, stats.curve)
        found += _writes(stats)
        found += _starving(stats, stats.curve)
        found += _without_hits(stats.namespaces)
        found += _late(stats)
        found += _slow_loads(stats.namespaces)
        found += _short_prompts(stats.namespaces, known)
    else:
        few = f"Only {format_count(lookups)} request{plural(lookups)}" if lookups else "No request"
        text = f"{few} so far: too few to tell; ask again after {FEWEST_LOOKUPS} of them."
        found.append(Advice("too_little_traffic", text, None, {"requests": lookups}))
    found += _full_index(stats.pool)
    found += _small_shards(namespaces)
    found += _apart(namespaces)
    return AdviceGiven(enough, found)


def _name(one: NamespaceStats) -> str:
    return namespace_name(one.model, bytes.fromhex(one.fingerprint))


def _is_of_bench(one: NamespaceInfo) -> bool:
    """Whether ``kvoffd-cli bench`` made it, of whose traffic nothing follows."""
    return one.label.startswith(BENCH_LABEL)


def _saved(stats: DaemonStats) -> Iterator[Advice]:
    """What was loaded, of all namespaces, also those that are forgotten, but not of benches."""
    total = stats.since_start
    tokens, asked, found = total.loaded_tokens, total.asked_tokens, total.found_keys
    parts = {source: tokens * found.get(source, 0) / max(1, sum(found.values())) for source in ("disk", "shared")}
    figures = {
        "loaded_tokens": tokens,
        "asked_tokens": asked,
        "tokens_from_disks": parts["disk"],
        "tokens_from_shared": parts["shared"],
        "prefill_seconds": total.saved_seconds,
    }
    if not asked:
        if nbytes := total.loaded_bytes:
            text = f"Engines loaded {format_size(nbytes)} that they did not compute; how many tokens these are, "
            yield Advice("saved", text + "their namespaces do not say.", None, {"loaded_bytes": nbytes})
        return
    text = (
        f"In {format_duration(stats.uptime_seconds)} engines loaded {format_count(round(tokens))} tokens instead of "
        f"computing them, {percent(tokens, asked)} of those that they asked for."
    )
    has_disks = stats.tiers is not None and bool(stats.disks or parts["disk"])
    tiers = [("disks", parts["disk"])] * has_disks + [("shared stores", parts["shared"])] * bool(stats.shared)
    if tiers:
        shares = [f"{percent(part, tokens, '0 %')} came from {name}" for name, part in tiers]
        text += f" Of these {' and '.join(shares)}."
    if total.saved_seconds:
        text += f" At the speed that the engines measured, that is {format_duration(total.saved_seconds)} of prefill."
    elif tokens:
        text += " How fast they compute prompts no engine has told, so that the time is not known: engines measure that"
        text += " in prompts of which they compute 1,024 tokens or more."
    yield Advice("saved", text, None, figures)


def _sizes(stats: DaemonStats, curve: HitCurve) -> Iterator[Advice]:
    pool, seen = stats.pool.size_bytes, stats.curve_seen_bytes
    ratios = {float(size): 100 * ratio for size, ratio in curve.lru_hit_ratio.items()}
    now, most = ratios[1.0], ratios[max(ratios)]
    own = 100 * curve.found_tokens / curve.asked_tokens
    figures = {"pool_bytes": pool, "hit_percent": own} | {f"lru_{size:g}_percent": at for size, at in ratios.items()}
    text = f"Requests find {own:.1f} % of their tokens in the pool of {format_size(pool)}"
    without = _not_estimated(stats)
    if seen < pool and not without and not any(one.rejected_keys for one in stats.namespaces):
        # No policy had to choose.
        asked = f"; {now:.1f} % were asked for before, but not all of that was stored by then."
        text += asked if now - own >= POINTS else "."
    elif stats.policy != "lru":
        text += f"; with lru{without} it would be {now:.1f} %, and what follows is for {(without and 'that') or 'lru'}."
    elif abs(own - now) < POINTS:
        text += "."
    else:
        text += f"; the estimate for this size{without} is {now:.1f} %, and what follows is by the estimate."
    is_ahead = stats.policy != "lru" and own - now >= POINTS and seen >= pool
    if seen < pool:
        text += f" All different blocks that were asked for, {format_size(seen)}, fit into it: more memory brings"
        text += " nothing yet."
    elif is_ahead and own - most >= POINTS:
        text += f" With ten times the memory it would find {most:.1f} %, less than is found now."
    elif most - max(now, own) < POINTS:
        text += f" More memory brings nothing: with ten times as much it would be {most:.1f} %."
    else:
        text += f" Twice the memory would find {ratios[2.0]:.1f} %, ten times as much, such as a disk of "
        text += f"{format_size(9 * pool)}, {most:.1f} %."
        near = min(size for size, at in ratios.items() if most - at < POINTS)
        if near < max(ratios):
            text += f" Beyond {format_size(near * pool)} there is little more."
    least = min(size for size, at in ratios.items() if now - at < POINTS)
    if now < POINTS:
        pass  # whatever is smaller finds nearly as much
    elif least < 1:
        size = format_size(least * pool)
        if is_ahead:
            text += f" With {size} it would find nearly as much."
        else:
            text += f" {size} would find nearly as much as the pool does."
    else:
        text += f" Half the memory would find {ratios[0.5]:.1f} %."
    if is_ahead:
        text += f" What {printable(stats.policy)} would find with more or less, kvoffd-cli record and simulate tell."
    if stats.disks:
        below = sum(one.size_bytes for one in stats.disks)
        near = min(ratios, key=lambda at: abs(at * pool - pool - below))
        text += f" With the disks, {format_size(below)}, there is room for about {ratios[near]:.1f} %."
    yield Advice("size", text, None, figures)


def _not_estimated(stats: DaemonStats) -> str:
    """What the estimates do without and the pool does not."""
    there = {
        "quotas of namespaces": any(one.quota_bytes is not None for one in stats.namespaces),
        "a full index": index_is_full(stats.pool),
    }
    named = " and ".join(name for name, is_there in there.items() if is_there)
    return f", without {named}," if named else ""


def _full_index(pool: PoolStats) -> Iterator[Advice]:
    if not index_is_full(pool) or pool.of("ready") >= FULL_INDEX * pool.size_bytes:
        return
    wanted = pool.index_counted_bytes * pool.size_bytes / max(1, pool.of("ready"))
    text = (
        f"The index is full with {format_size(pool.of('ready'))} of blocks in a pool of "
        f"{format_size(pool.size_bytes)}: blocks are evicted for want of index_size, "
        f"{format_size(pool.index_limit_bytes)}. For blocks of this size the whole pool needs "
        f"{format_size(wanted)}, which the daemon's memory must have room for."
    )
    figures = {"ready_bytes": pool.of("ready"), "pool_bytes": pool.size_bytes, "index_size_bytes": wanted}
    yield Advice("full_index", text, None, figures)


def _writes(stats: DaemonStats) -> Iterator[Advice]:
    stored, loaded = stats.since_start.stored_bytes, stats.since_start.loaded_bytes
    if stored:
        cost = stored / max(1, loaded)
        figures: dict[str, float] = {"stored_bytes": stored, "loaded_bytes": loaded}
        if not loaded:
            text = f"Engines stored {format_size(stored)} and loaded nothing: storing does not pay so far."
        else:
            text = f"Engines stored {cost:.1f} bytes for each byte that they loaded"
            text += ": storing hardly pays." if cost >= DEAR else "."
            if cost >= DEAR and stats.policy in ("lru", "arc"):
                text += " The policies learned and gate store less of what does not come back (eviction_policy)."
        yield Advice("stores", text, None, figures)
    written, read = (sum(getattr(one, f"{verb}_bytes") for one in stats.disks) for verb in ("written", "read"))
    if written:
        text = f"The disks wrote {written / max(1, read):.1f} bytes for each byte that was read from them"
        dear = written >= DEAR * max(1, read)
        if dear:
            text += ": their wear hardly pays; disk_write_per_day bounds it"
            if stats.tiers is not None and stats.tiers.write_mode in ("always", "evict"):
                text += ', and disk_write = "reuse" writes what was used twice'
        text += "."
        yield Advice("disk_writes", text, None, {"written_bytes": written, "read_bytes": read})


def _starving(stats: DaemonStats, curve: HitCurve) -> Iterator[Advice]:
    held = sum(one.ready_bytes for one in stats.namespaces)
    for one in stats.namespaces:
        if one.curve is None or one.lookups < FEWEST_LOOKUPS or not one.curve.asked_tokens:
            continue
        own = 100 * one.curve.found_tokens / one.curve.asked_tokens
        could = 100 * max(one.curve.lru_hit_ratio.values())
        asks, has = one.curve.asked_tokens / curve.asked_tokens, one.ready_bytes / max(1, held)
        if could - own >= STARVED_POINTS and has < asks / 2:
            name = _name(one)
            text = (
                f"{name} starves: it asks for {percent(asks, 1)} of all tokens and has {percent(has, 1)} of the pool's "
                f"blocks; it finds {own:.1f} % of its tokens, and would find {could:.1f} % with ten times the memory. "
            )
            if one.quota_bytes is not None and one.ready_bytes > AT_QUOTA * one.quota_bytes:
                limited, quota = one, f"lets it have more than its quota, {format_size(one.quota_bytes)}."
            else:
                limited, quota = max(stats.namespaces, key=lambda each: each.ready_bytes), "leaves it more of the pool."
            text += f"kvoffd-cli namespaces quota {limited.id} --max SIZE {quota}"
            yield Advice(
                "starving",
                text,
                bytes.fromhex(one.fingerprint),
                {"hit_percent": own, "could_percent": could, "share_of_pool": has},
            )


def _without_hits(counted: Iterable[NamespaceStats]) -> Iterator[Advice]:
    for one in counted:
        if one.lookups < FEWEST_LOOKUPS or one.found_keys:
            continue
        text = f"{_name(one)} never found anything, in {format_count(one.lookups)} requests"
        if one.misses:
            reason, keys = max(one.misses.items(), key=lambda item: item[1])
            text += (
                f"; of {percent(keys, one.asked_keys)} of its keys the reason is: {printable(reason.replace('_', ' '))}"
            )
        could = 100 * max(one.curve.lru_hit_ratio.values(), default=0.0) if one.curve is not None else 0.0
        if could >= POINTS:
            text += f". Ten times the memory would find {could:.1f} % of its tokens."
        else:
            text += ". What it asks for does not come back, with ten times the memory either."
        if not one.stored_bytes:
            text += " Its engines stored nothing."
        yield Advice("no_hits", text, bytes.fromhex(one.fingerprint), {"requests": one.lookups, "could_percent": could})


def _late(stats: DaemonStats) -> Iterator[Advice]:
    total = stats.since_start
    late = total.misses.get("tier_late", 0)
    pending = late + total.found_keys.get("disk", 0) + total.found_keys.get("shared", 0)
    if pending and late >= LATE * pending:
        names = ["disks"] * bool(stats.disks) + ["shared stores"] * bool(stats.shared)
        text = (
            f"{percent(late, pending)} of what the {' and '.join(names) or 'disks'} have came too late for its request:"
        )
        text += " they are too slow."
        yield Advice("disks_late", text, None, {"late_keys": late, "pending_keys": pending})


def _slow_loads(counted: Iterable[NamespaceStats]) -> Iterator[Advice]:
    for one in counted:
        if one.skipped_loads or one.paused_stores:
            name = _name(one)
            text = (
                f"Engines of {name} left out {format_count(one.skipped_loads)} loads, since computing was faster, and "
                f"{format_count(one.paused_stores)} stores, since they had waited for stores too often."
            )
            if one.load_tokens_per_second and one.prefill_tokens_per_second:
                text += (
                    f" They compute {format_count(round(one.prefill_tokens_per_second))} tokens a second and load "
                    f"{format_count(round(one.load_tokens_per_second))}."
                )
            figures: dict[str, float] = {"skipped_loads": one.skipped_loads, "paused_stores": one.paused_stores}
            yield Advice("slow_copies", text, bytes.fromhex(one.fingerprint), figures)


def _short_prompts(counted: Iterable[NamespaceStats], known: dict[str, NamespaceInfo]) -> Iterator[Advice]:
    for one in counted:
        info = known.get(one.fingerprint)
        if info is None or one.lookups < FEWEST_LOOKUPS:
            continue
        keys = one.asked_keys / one.lookups / len(info.groups)
        tokens = max(group.tokens_per_block for group in info.groups)
        if keys < FEW_KEYS and tokens > 1:
            text = (
                f"{_name(one)}: its requests have {keys:.1f} whole blocks of {tokens} "
                "tokens on average, and only whole blocks are kept. Smaller blocks would find more."
            )
            yield Advice(
                "block_size",
                text,
                bytes.fromhex(one.fingerprint),
                {"blocks_of_a_request": keys, "tokens_per_block": tokens},
            )


def _small_shards(namespaces: Iterable[NamespaceInfo]) -> Iterator[Advice]:
    for info in namespaces:
        smallest = min((size for sizes in info.shard_bytes for size in sizes if size), default=SMALLEST_SLOT_BYTES)
        if smallest < SMALLEST_SLOT_BYTES:
            wasted = percent(SMALLEST_SLOT_BYTES - smallest, SMALLEST_SLOT_BYTES)
            text = (
                f"{namespace_name(info.label, info.namespace)} has shards of {format_size(smallest)} in slots of "
                f"{format_size(SMALLEST_SLOT_BYTES)}: {wasted} of each is wasted. Larger blocks waste less."
            )
            yield Advice("small_shards", text, info.namespace, {"shard_bytes": smallest})


def _apart(namespaces: Sequence[NamespaceInfo]) -> Iterator[Advice]:
    """Open namespaces of one model that do not share."""
    pairs = combinations([(info, _model(info)) for info in namespaces if info.sessions], 2)
    alike = ((one, other) for (one, model), (other, others) in pairs if model == others)
    for one, other in islice(alike, MOST_PAIRS):
        fields = [name for name, *_ in differences(one.description, other.description)]
        text = (
            f"Engines of {printable(one.label)} do not share blocks: {one.namespace.hex()[:8]} and "
            f"{other.namespace.hex()[:8]} differ {differing_fields(one.description, other.description)}."
        )
        remedies = dict.fromkeys(_REMEDIES[name] for name in fields if name in _REMEDIES)
        if remedies and len(fields) <= len(_REMEDIES):
            text += f" If they should share, {'; '.join(remedies)}."
        yield Advice("apart", text, one.namespace, {}, fields)


def _model(info: NamespaceInfo) -> object:
    return (fields_of_description(info.description) or {}).get("model") or info.label
