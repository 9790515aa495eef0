"""``kvoffd-cli shared`` and ``reset``: the tiers that nodes share, as this node sees them."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from kvoffd_client.cli.json_objects import SharedTiers
from kvoffd_client.cli.json_output import print_listing
from kvoffd_client.cli.target import (
    Directory,
    Json,
    open_admin,
)
from kvoffd_proto.stats import SharedStats
from kvoffd_proto.units import format_count, format_duration, format_size, plural, printable

SHARED_ERRORS = {
    "unreachable": "attempts to connect that failed; see the URL, the network and whether the server runs",
    "timeout": "answers that did not come in time",
    "disconnected": "connections that the server closed",
    "credentials": "refusals of the password or the keys; see shared_password_file, which is read at the start",
    "forbidden": "commands that the user may not give; the daemon's log says which it needs",
    "region": "refusals because the URL names another region than the bucket's",
    "clock": "refusals because this machine's clock, or the server's, is wrong",
    "bucket": "answers that there is no such bucket; see the URL",
    "busy": "answers that the server has too much to do",
    "tls": "connections whose server does not prove who it is; SSL_CERT_FILE names its authority",
    "full": "writes that there is no room for; see Redis's maxmemory and maxmemory-policy, or the bucket's quota",
    "mismatch": "objects that were not the block that they should be; they are removed there",
    "cluster": "servers of a cluster that was not named as redis+cluster://, has changed, or is down",
    "refused": "other refusals; the daemon's log has the first",
    "protocol": "answers that are not what the protocol says",
    "generation": "generations of namespaces that are no numbers",
    "internal": "bugs; please report the traceback in the daemon's log",
}
"""What the kinds of a shared server's errors are."""


def shared(context: typer.Context, directory: Directory = None, json: Json = False) -> int:
    """Show the stores that nodes share.

    Whether each is reachable, what was asked, found, read and written, and its errors.

    Exit status: 0 it is reachable or there is none, 1 it is not reachable, 2 an error.
    """
    with open_admin(context, directory) as admin:
        reply = admin.stats()
    print_listing(SharedTiers(reply.shared), shared_page(reply.shared), as_json=json)
    return int(not all(one.up for one in reply.shared))


def shared_page(found: Sequence[SharedStats]) -> RenderableType:
    if not found:
        return Text("No tier is shared with other nodes; start the daemon with --shared URL.")
    return Group(*[line for one in found for line in (_text(one), *_servers(one), *_problems(one))])


def _text(one: SharedStats) -> Text:
    failed = ", ".join(f"{kind} {format_count(count)}" for kind, count in sorted(one.promotions_failed.items()))
    return Text.assemble(
        (printable(one.url), "bold"),
        ": ",
        ("reachable", "") if one.up else ("not reachable", "yellow"),
        f", given up {format_count(one.breaker_trips)} time{plural(one.breaker_trips)}, answers take "
        f"{format_duration(one.ask_seconds)}"
        f"\n    asked: {format_count(one.asked_keys)} keys that pool and disks did not have, found "
        f"{format_count(one.found_keys)}, without an answer in time {format_count(one.unanswered_keys)}"
        f"\n    read: {format_count(one.read_blocks)} blocks ({format_size(one.read_bytes)}), "
        f"{format_count(one.queued_reads)} waiting, failed: {printable(failed) or 'none'}"
        f"\n    written: {format_count(one.written_blocks)} blocks ({format_size(one.written_bytes)}), "
        f"{format_count(one.already_stored)} were there already, {format_count(one.queued_writes)} waiting, "
        f"{format_count(one.dropped_writes)} dropped",
    )


def _servers(one: SharedStats) -> list[Text]:
    found = [
        Text.assemble(
            "    server ",
            printable(server.name),
            ": ",
            "answers" if server.up else (f"cannot be used: {printable(server.problem) or 'not tried yet'}", "yellow"),
        )
        for server in one.servers
    ]
    if one.unshared_namespaces:
        text = (
            f"    namespaces that are not shared since an engine reset them: {format_count(one.unshared_namespaces)}; "
            "`kvoffd-cli clear --namespace NAME --all-nodes` has one shared again, on all nodes"
        )
        found.append(Text(text, style="yellow"))
    return found


def _problems(one: SharedStats) -> list[Text]:
    return [
        Text(
            f"    {printable(kind)} {format_count(count)}: {SHARED_ERRORS.get(kind, 'see the daemon log')}", style="red"
        )
        for kind, count in sorted(one.errors.items())
    ]
