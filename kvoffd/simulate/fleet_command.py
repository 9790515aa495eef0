"""The part of ``kvoffd-cli trace replay`` for several nodes: its options, and how results are printed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import TypeAlias, TypeVar

from kvoffd.cache.prompt_tokens import POOL
from kvoffd.simulate.fleet import SOURCES, FleetPlan, FleetReplayed, Route, Shares, Speeds
from kvoffd.simulate.trace import RequestTrace
from kvoffd.tiering import WriteMode
from kvoffd_proto.units import format_size, parse_duration, parse_size

MAX_NODES = 1000
ALL, NAMED, ANY_WAIT, ANY_SIZE = "all", "named", "none", "unlimited"
"""Values that options have besides numbers: of --route and --peers, of --peers, of --busy-limit, and of --shared."""
DEFAULTS = {
    "--route": ALL,
    "--busy-limit": "5s",
    "--least-prefix": "0",
    "--staleness": "0s",
    "--peers": "0",
    "--shared": "",
    "--shared-write": WriteMode.AUTO.value,
    "--speeds": "compute=10000,memory=20GB,disk=3GB,network=3GB",
}
"""Options that need --nodes, and what they are unless given."""
LINKS = {
    "peer": "from peers",
    "store_read": "from store",
    "store_written": "to store",
    "disk_read": "from disk",
    "disk_written": "to disk",
}
"""Headings of the columns of bytes."""
TEXT_COLUMNS = ["pool", "policy", "router", "shares"]
"""Headings of the first columns, whose cells are texts; the others have numbers."""

Value = TypeVar("Value")
Rows: TypeAlias = Sequence[tuple[str, FleetReplayed]]
"""Results with the texts of their sizes."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --nodes and the options that need it."""
    for option in ("--nodes", *DEFAULTS):
        parser.add_argument(option, default="")


def node_count(given: argparse.Namespace) -> int:
    """Return the number of nodes; 0 if the replay is that of one pool. Raises ValueError with a sentence."""
    if not given.nodes:
        if wrong := [option for option in DEFAULTS if _text(given, option)]:
            raise ValueError(f"{wrong[0]} is for several nodes; give --nodes too.")
        return 0
    if not (given.nodes.isdecimal() and 1 <= int(given.nodes) <= MAX_NODES):
        raise ValueError(f"--nodes {given.nodes}: give a number from 1 to {MAX_NODES}.")
    return int(given.nodes)


def make_plans(
    given: argparse.Namespace, trace: RequestTrace, nodes: int, blocks: int, block_bytes: int
) -> list[FleetPlan]:
    """Return the plan of each router's rule, with pools of this many blocks and no disks. Raises ValueError with a
    sentence."""
    texts = {option: _text(given, option) or default for option, default in DEFAULTS.items()}
    busy_limit = texts["--busy-limit"]
    if not trace.seconds and (wrong := [one for one in ("--busy-limit", "--staleness") if _text(given, one)]):
        raise ValueError(f"{wrong[0]} needs the times of all requests, which the trace does not have.")
    if given.shared_write and not given.shared:
        raise ValueError("--shared-write needs a store; give --shared too.")
    plan = FleetPlan(
        nodes,
        _speeds(texts),
        block_bytes,
        busy_s=inf if busy_limit == ANY_WAIT else _read("--busy-limit", busy_limit, parse_duration),
        least_prefix=_read("--least-prefix", texts["--least-prefix"], _part),
        staleness_s=_read("--staleness", texts["--staleness"], parse_duration),
        peers=_peers(texts["--peers"], nodes),
        named_peer=texts["--peers"] == NAMED,
        store_blocks=_store_blocks(texts["--shared"], nodes * blocks, block_bytes),
        store_write=_one_of("--shared-write", texts["--shared-write"], WriteMode),
    )
    names = [*Route] if texts["--route"] == ALL else texts["--route"].split(",")
    routes = dict.fromkeys(_one_of("--route", name.strip(), Route) for name in names)
    if Route.PREFIX not in routes:
        by_prefix = f"--route {Route.PREFIX}"
        uses = {"--busy-limit": by_prefix, "--least-prefix": by_prefix}
        if not plan.named_peer:
            uses["--staleness"] = f"{by_prefix}, and for --peers {NAMED}"
        for option, use in uses.items():
            if _text(given, option):
                raise ValueError(f"{option} is for {use}; add that, or leave {option} out.")
    return [plan._replace(route=route) for route in routes]


def compared(plans: Sequence[FleetPlan]) -> Iterator[tuple[FleetPlan, Shares]]:
    """Yield what is replayed with plans that differ in the rule: the bound, then for each rule the floor and, if the
    plan shares anything, what it gives."""
    yield plans[0], Shares.ONE_POOL
    for plan in plans:
        yield plan, Shares.NOTHING
        if plan.is_sharing:
            yield plan, Shares.GIVEN


def _text(given: argparse.Namespace, option: str) -> str:
    """Return what was given for an option; empty if nothing was."""
    text: str = getattr(given, option.removeprefix("--").replace("-", "_"))
    return text


def _read(option: str, text: str, parse: Callable[[str], Value]) -> Value:
    """Return what an option's text says. Raises ValueError with a sentence."""
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}.") from None


def _one_of(option: str, name: str, names: type[Value]) -> Value:
    """Return the member of an enumeration."""
    try:
        return names(name)  # type: ignore[call-arg]
    except ValueError:
        raise ValueError(f"{option} {name}: choose from {', '.join(map(str, names))}.") from None  # type: ignore[call-overload]


def _part(text: str) -> float:
    """Return a percentage as a part of 1."""
    number = text.removesuffix("%")
    if not (number.isdecimal() and int(number) <= 100):
        raise ValueError(f"{text!r} is not a whole number of percent from 0 to 100")
    return int(number) / 100


def _peers(text: str, nodes: int) -> int:
    if text == NAMED:
        return 0
    if text == ALL:
        return nodes - 1
    if not (text.isdecimal() and int(text) < nodes):
        raise ValueError(f"--peers {text}: give a number up to {nodes - 1}, the other nodes, or {ALL}, or {NAMED}.")
    return int(text)


def _store_blocks(text: str, pooled_blocks: int, block_bytes: int) -> int | None:
    """Return the blocks of the store; 0 for no limit, None for no store. ``pooled_blocks``: of all pools."""
    times = text.removesuffix("x")
    if not text:
        return None
    if text == ANY_SIZE:
        return 0
    if text.endswith("x") and times.isdecimal() and int(times):
        return int(times) * pooled_blocks
    if (blocks := _read("--shared", text, parse_size) // block_bytes) < 1:
        raise ValueError(f"A store of {text} does not hold one block of {format_size(block_bytes)}.")
    return blocks


def _speeds(texts: dict[str, str]) -> Speeds:
    """Return the given speeds, and the default ones of the others."""
    found: dict[str, float] = {}
    for part in f"{DEFAULTS['--speeds']},{texts['--speeds']}".split(","):  # what is given comes last, and holds
        name, _, text = part.strip().partition("=")
        if name not in ("compute", "memory", "disk", "network"):
            raise ValueError(f"--speeds {part}: write some of {DEFAULTS['--speeds']}.")
        found[name] = _read("--speeds", text, parse_size)
        if not found[name]:
            raise ValueError(f"--speeds {part}: a speed is more than nothing.")
    return Speeds(found["compute"], found["memory"], found["disk"], found["network"])


def as_json(trace: RequestTrace, rows: Rows) -> dict[str, object]:
    """Return what --json prints."""
    results = []
    for size, one in rows:
        row: dict[str, object] = {"policy": one.policy, "size": size, "blocks": one.blocks}
        if one.plan.disk is not None:
            row |= {"disk_blocks": one.plan.disk.blocks, "disk_write": one.plan.disk.mode.value}
        row |= {"route": _route(one), "shares": one.shares.value, "tokens": one.tokens, "bytes": one.links}
        row |= {"pooled_blocks": one.pooled_blocks, "repeated_blocks": one.repeated_blocks, "copies": one.copies}
        row |= {"stored_blocks": one.stored, "first_token_s": round(one.first_token_s, 6)}
        results.append(row | {"wait_s": None if one.wait_s is None else round(one.wait_s, 6)})
    plan = rows[0][1].plan
    return {"trace": trace.name, "accesses": trace.accesses, "nodes": plan.nodes, "results": results}


def as_table(trace: RequestTrace, rows: Rows) -> str:
    """Return what is printed: a line for each result."""
    plan, every = rows[0][1].plan, [one for _, one in rows]
    tokens = trace.accesses * trace.tokens_per_block
    computed_s = tokens / plan.speeds.compute_tokens / max(1, len(trace.requests))
    lines = [
        f"{trace.name}: {len(trace.requests):,} requests, {trace.accesses:,} blocks of {trace.tokens_per_block} tokens "
        f"and {format_size(plan.block_bytes)}, {plan.nodes} node{'s' * (plan.nodes > 1)}",
        f"If all tokens were computed, that would take {computed_s:.3f} s for each prompt on average.",
    ]
    sources = [name for name in SOURCES if name in ("computed", POOL.kind) or any(one.tokens[name] for one in every)]
    links = [link for link in LINKS if any(one.links[link] for one in every)]
    heads = [*TEXT_COLUMNS, *(f"{source} %" for source in sources), "repeated %", "copies", "first token s"]
    if trace.seconds:
        heads.append("wait s")
    table = [[*heads, *(LINKS[link] for link in links)]]
    for size, one in rows:
        cells = [size, one.policy, _route(one), one.shares.value, *(f"{one.percent(source):.2f}" for source in sources)]
        blocks = max(1, one.pooled_blocks)
        cells += [f"{100 * one.repeated_blocks / blocks:.2f}", f"{one.copies / blocks:.3f}", f"{one.first_token_s:.3f}"]
        if one.wait_s is not None:
            cells.append(f"{one.wait_s:.3f}")
        table.append([*cells, *(format_size(one.links[link]) for link in links)])
    widths, texts = [max(map(len, column)) for column in zip(*table, strict=True)], len(TEXT_COLUMNS)
    for row in table:
        words = [f"{cell:<{width}}" for cell, width in zip(row[:texts], widths, strict=False)]
        numbers = [f"{cell:>{width}}" for cell, width in zip(row[texts:], widths[texts:], strict=True)]
        lines.append("  ".join(words + numbers))
    return "\n".join(lines)


def _route(one: FleetReplayed) -> str:
    return "least_busy" if one.shares is Shares.ONE_POOL else one.plan.route.value
