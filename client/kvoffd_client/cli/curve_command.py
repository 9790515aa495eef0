"""``kvoffd-cli curve``: how much pools of other sizes would find."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from msgspec import structs
from rich.console import Console
from rich.text import Text

from kvoffd_client.cli.console import (
    TEXT_CELLS,
    bar_characters,
    fitting,
    make_console,
    namespace_name,
    percent,
    print_line,
    print_page,
)
from kvoffd_client.cli.json_objects import CurveOf, CurvePoint, HitCurves
from kvoffd_client.cli.json_output import print_json
from kvoffd_client.cli.target import NAMESPACE_OPTION, Directory, Json, open_admin, resolve_namespace
from kvoffd_proto.stats import DaemonStats, HitCurve
from kvoffd_proto.units import format_count, format_size

POINT_CELLS = 35
"""A line without its bar."""
MARKED = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Sizes at the axis of a PNG, in parts of the pool's."""


def curve(
    context: typer.Context,
    namespace: Annotated[str | None, NAMESPACE_OPTION] = None,
    directory: Directory = None,
    json: Json = False,
) -> None:
    """Show what pools of other sizes would find.

    That is the part of the tokens of requests, in pools from a tenth to ten times the size. It is estimated, while
    the daemon serves, from a sample of the keys that requests ask for, for the policy lru; what the daemon's own
    policy found in the pool that there is, is measured. Counted are the tokens up to the first block that is not
    there, for each namespace in a pool of all namespaces. What is a day old weighs half. A block whose engine does
    not say how many tokens it has counts as one token.
    """
    with open_admin(context, directory) as admin:
        found = curves_of(admin.stats())
        known = None if namespace is None else resolve_namespace(admin.namespaces().namespaces, namespace)
    if known is not None:
        found = structs.replace(found, curves=[one for one in found.curves if one.namespace == known.namespace])
    if json:
        print_json(found)
        return
    if not found.curves:
        print_line("No request has asked for anything so far.")
    console = make_console(pipe_cells=TEXT_CELLS)
    for number, one in enumerate(found.curves[: None if known else 1]):
        if number:
            print_line("")
        for line in _page(found, one, console):
            print_page(line, console)
    if known is None and len(found.curves) > 2:
        print_line(f"Of all {len(found.curves) - 1} namespaces together; --namespace NAME shows one.")
    if known is None and (gone := _forgotten_tokens(found)):
        print_line(f"{format_count(gone)} of the tokens were asked for in namespaces that are forgotten by now.")


def curves_of(stats: DaemonStats) -> HitCurves:
    pool_bytes = stats.pool.size_bytes
    curves = [_curve_of(None, None, stats.curve, pool_bytes)] if stats.curve is not None else []
    curves += [
        _curve_of(bytes.fromhex(one.fingerprint), one.model, one.curve, pool_bytes)
        for one in stats.namespaces
        if one.curve is not None
    ]
    return HitCurves(stats.policy, pool_bytes, stats.curve_seen_bytes, [one for one in curves if one.asked_tokens])


def _curve_of(fingerprint: bytes | None, label: str | None, curve: HitCurve, pool_bytes: int) -> CurveOf:
    points = [
        CurvePoint(float(size), round(float(size) * pool_bytes), 100 * ratio)
        for size, ratio in curve.lru_hit_ratio.items()
    ]
    hits = 100 * curve.found_tokens / max(1, curve.asked_tokens)
    return CurveOf(fingerprint, label, curve.asked_tokens, hits, points)


def _forgotten_tokens(found: HitCurves) -> int:
    """Those of all that no namespace has; what is halved every day is not exact to a token for each."""
    every, single = found.curves[:1], found.curves[1:]
    gone = sum(one.asked_tokens for one in every) - sum(one.asked_tokens for one in single)
    return gone if gone > len(single) else 0


def _page(found: HitCurves, one: CurveOf, console: Console) -> Iterator[Text]:
    name = "All namespaces" if one.namespace is None else namespace_name(one.label or "", one.namespace)
    yield fitting(f"{name}: {format_count(one.asked_tokens)} tokens asked for; found of them")
    full, _, empty = bar_characters(console.options)
    cells = min(console.width, TEXT_CELLS) - POINT_CELLS
    for point in one.points:
        bar = round(cells * point.lru_hit_percent / 100)
        size = f"{format_size(point.pool_bytes):>10}  {point.pool:>4g}  "
        style = "bold" if point.pool == 1 else ""
        yield Text(f"{size}{full * bar}{empty * (cells - bar)} {percent(point.lru_hit_percent, 100):>7} lru", style)
        if point.pool == 1:
            own = round(cells * one.hit_percent / 100)
            line = f"{'':>10}  {'':>4}  {full * own}{empty * (cells - own)} {percent(one.hit_percent, 100, '0 %'):>7}"
            yield Text(f"{line} measured", "bold")
    if found.seen_bytes < 0.99 * found.curves[0].points[-1].pool_bytes:
        seen = format_size(found.seen_bytes)
        yield Text(f"Only {seen} of different blocks were asked for; beyond, nothing is gained.", "dim")
