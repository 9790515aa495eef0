"""``kvoffd-cli policy``: what the eviction policy has learned, and what it makes of that."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from rich.text import Text

from kvoffd_client.cli.console import percent, plain_table, print_line, print_list, print_page
from kvoffd_client.cli.json_output import print_json
from kvoffd_client.cli.target import Directory, Json, open_admin
from kvoffd_proto.admin import KeyWorth, PolicyClass, PolicyDescribed
from kvoffd_proto.units import format_count, format_size, plural, printable

RARE = 0.01
"""Of what is asked for; kinds of less have no line of their own."""

COLUMNS = (
    "half by: when half of those that come back have, in pool lifetimes (as much is asked for as the pool holds); "
    "worth: most hits of a block in one"
)
"""What its titles mean."""

LEGEND = {
    "adopted": "adopted: left by an earlier daemon",
    "unasked": "stored unasked: without a lookup",
    "shared": "shared: seen by so many requests before, more than the conversation has turns",
    "old": "old: of a conversation, known before",
    "new": "new: its new keys",
    "pause": "pause: since its last turn, in pool lifetimes",
    "branch": "branch: new behind a known part that others continued otherwise",
    "first": "first: new, of a new conversation",
    "+": "+, >: up to, or more than so many new tokens in the request",
}
"""What the words of short names mean."""


def policy(context: typer.Context, directory: Directory = None, json: Json = False) -> None:
    """Show what the eviction policy has learned.

    Lists the classes of keys that the policy tells apart: their share of what is asked for, the chance that such a key
    is asked for again, when, and how much of them is kept. Ages are in pool lifetimes, the time in which as much is
    asked for as the pool holds. --json has the rare classes too, and longer names.
    """
    with open_admin(context, directory) as admin:
        found = admin.describe_policy()
    if json:
        print_json(found)
        return
    for line in _sentences(found):
        print_page(Text(printable(line)))
    if found.classes:
        print_line("")
        _print_classes(found)


def _sentences(found: PolicyDescribed) -> Iterator[str]:
    if not found.policy_bytes:
        yield f"Policy {found.policy}. It does not learn."
        return
    if not found.known_keys and found.ghost_keys:
        keys, memory = format_count(found.ghost_keys), format_size(found.policy_bytes)
        yield f"Policy {found.policy}. It does not learn. It remembers {keys} keys without a block, in {memory}."
        return
    if not found.requests:
        yield f"Policy {found.policy}. It has learned nothing so far: nothing was asked for."
        return
    yield (
        f"Policy {found.policy}: {format_count(found.requests)} requests, {format_count(found.known_keys)} keys known, "
        f"{format_count(found.ghost_keys)} of them without a block, in {format_size(found.policy_bytes)} of memory."
    )
    hits, lru = format_size(found.hit_bytes), format_size(found.lru_hit_bytes)
    yield f"Found by requests since the daemon's start: {hits}; with lru it would have been {lru}."
    if found.as_lru:
        yield "Blocks go as with lru for now, since that would have had more hits."


def _print_classes(found: PolicyDescribed) -> None:
    table = plain_table()
    for title in ("asked for", "come back", "half by", "kept", "worth"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("keys")
    shown = [one for one in found.classes if one.accessed_share >= RARE]
    for one in shown:
        table.add_row(*_row(one))
    print_list(table)
    words = " ".join(_short(one) for one in shown)
    legend = [COLUMNS, *(text for word, text in LEGEND.items() if word in words)]
    print_page(Text(f"{'; '.join(legend)}.", style="dim"))
    if rare := found.classes[len(shown) :]:
        share = percent(sum(one.accessed_share for one in rare), 1.0, "0 %")
        kept = format_size(sum(one.kept_bytes for one in rare))
        print_page(Text(f"And {len(rare)} rare kind{plural(len(rare))}: {share} of what is asked for, {kept} kept."))


def _row(one: PolicyClass) -> tuple[str, ...]:
    return (
        percent(one.accessed_share, 1.0),
        percent(one.return_chance, 1.0),
        f"{one.return_age:g}",
        format_size(one.kept_bytes),
        f"{one.worth:.3f}",
        _short(one),
    )


def _short(one: PolicyClass) -> str:
    return one.short_name or one.name


def key_sentence(key: KeyWorth) -> str:
    """Why a block is kept, and what would go before it."""
    turn = f", the last one turn {key.turn} of its conversation" if key.turn else ""
    requests = f"{format_count(key.requests)} request{plural(key.requests)}"
    return (
        f"kept as: {key.kind}; asked for by {requests}{turn}, {key.age:.2f} pool lifetimes ago; "
        f"{key.worth:.3f} hits to be expected in a lifetime; {format_size(key.bytes_before)} would go before it"
    )
