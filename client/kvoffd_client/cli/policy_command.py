"""``kvoffd-cli policy``: what the eviction policy has learned, and what it makes of that."""

from __future__ import annotations

from collections.abc import Iterator

import typer

from kvoffd_client.cli.console import percent, plain_table, print_line, print_list
from kvoffd_client.cli.json_output import print_json
from kvoffd_client.cli.target import Directory, Json, open_admin
from kvoffd_proto.messages import KeyWorth, PolicyClass, PolicyDescribed
from kvoffd_proto.units import format_count, format_size


def policy(context: typer.Context, directory: Directory = None, json: Json = False) -> None:
    """Show what the eviction policy has learned of which blocks come back.

    Lists the classes of keys that the policy tells apart: their share of what is asked for, the chance that such a key
    is asked for again, when, and how much of them is kept. Ages are in pool lifetimes, the time in which as much is
    asked for as the pool holds.
    """
    with open_admin(context, directory) as admin:
        found = admin.describe_policy()
    if json:
        print_json(found)
        return
    for line in _sentences(found):
        print_line(line)
    if found.classes:
        print_line("")
        _print_classes(found)


def _sentences(found: PolicyDescribed) -> Iterator[str]:
    if not found.requests:
        yield f"Policy {found.policy}. It has learned nothing so far, or does not learn."
        return
    yield (
        f"Policy {found.policy}: {format_count(found.requests)} requests, {format_count(found.known_keys)} keys known, "
        f"{format_count(found.ghost_keys)} of them without a block, in {format_size(found.policy_bytes)} of memory."
    )
    yield f"Found by requests: {format_size(found.hit_bytes)}; with lru it had been {format_size(found.lru_hit_bytes)}."
    if found.as_lru:
        yield "Blocks go as with lru for now, since that would have had more hits."


def _print_classes(found: PolicyDescribed) -> None:
    table = plain_table()
    table.add_column("keys", no_wrap=True)
    for title in ("asked for", "come back", "half by", "kept", "worth"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found.classes:
        table.add_row(*_row(one))
    print_list(table)


def _row(one: PolicyClass) -> tuple[str, ...]:
    return (
        one.name,
        percent(one.accessed_share, 1.0),
        percent(one.return_chance, 1.0),
        f"{one.return_age:g}",
        format_size(one.kept_bytes),
        f"{one.worth:.3f}",
    )


def key_sentence(key: KeyWorth) -> str:
    """Why a block is kept, and what would go before it."""
    turn = f", the last one turn {key.turn} of its conversation" if key.turn else ""
    return (
        f"kept as: {key.kind}; asked for by {format_count(key.requests)} requests{turn}, {key.age:.2f} pool lifetimes "
        f"ago; {key.worth:.3f} hits to be expected in a lifetime; {format_size(key.bytes_before)} would go before it"
    )
