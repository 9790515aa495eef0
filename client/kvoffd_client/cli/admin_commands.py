"""``kvoffd-cli sessions``, ``namespaces``, ``clear`` and ``scrub``."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, TypeVar

import typer
from rich.text import Text

from kvoffd_client.cli.console import (
    Column,
    Listing,
    count_blocks,
    namespace_name,
    percent,
    print_line,
    short_fingerprint,
    were,
)
from kvoffd_client.cli.json_objects import Cleared, Difference, Differences, EngineRow, Engines, Namespaces, Sessions
from kvoffd_client.cli.json_output import print_json, print_listing, to_json
from kvoffd_client.cli.target import (
    NAMESPACE_OPTION,
    CliError,
    Directory,
    Json,
    confirmed,
    open_admin,
    resolve_namespace,
)
from kvoffd_client.namespace import differences
from kvoffd_proto.admin import NamespaceInfo, ScrubReply, SessionInfo
from kvoffd_proto.messages import Role
from kvoffd_proto.units import format_count, format_duration, format_rate, format_size, printable

FIRST_SCRUB_PAUSE_S = 0.02
SCRUB_PAUSE_S = 0.5
"""Between two questions for a scrub's progress: at first short, since a small pool is done at once."""
T = TypeVar("T")


def sessions(
    context: typer.Context,
    directory: Directory = None,
    engines: Annotated[
        bool, typer.Option("--engines", help="One row for each engine: its scheduler and workers together.")
    ] = False,
    json: Json = False,
) -> int:
    """List the connected clients, oldest first.

    With --engines, sessions of one namespace whose names differ in the role alone are one row. The names of vLLM's
    sessions have the first characters of the engine's id, so that two engines of one model are two rows.
    """
    with open_admin(context, directory) as admin:
        found = admin.sessions().sessions
        labels = {} if json else {one.namespace: one.label for one in admin.namespaces().namespaces}
    if engines:
        rows = engines_of(found)
        print_listing(Engines(rows), _engines_page(rows, labels), as_json=json)
    else:
        print_listing(Sessions(found), _sessions_page(found, labels), as_json=json)
    return 0


def engines_of(found: Sequence[SessionInfo]) -> list[EngineRow]:
    """The engines among the sessions, oldest first."""
    rows: dict[tuple[str, tuple[bytes, ...]], EngineRow] = {}
    for one in found:
        if one.role not in (Role.SCHEDULER, Role.WORKER):
            continue
        name = re.sub(rf" {one.role}( \d+)?$", "", one.name)
        row = rows.setdefault((name, tuple(one.namespaces)), EngineRow(name, one.namespaces))
        row.schedulers += one.role == Role.SCHEDULER
        row.workers += one.role == Role.WORKER
        if one.pid and one.pid not in row.pids:
            row.pids.append(one.pid)
        row.leases += one.leases
        row.pinned_bytes += one.pinned_bytes
        row.jobs += one.jobs
        row.registered_bytes += one.registered_bytes
    return list(rows.values())


def _engines_page(rows: Sequence[EngineRow], labels: Mapping[bytes, str]) -> Listing | Text:
    if not rows:
        return Text("No engine is connected.")
    names = [", ".join(namespace_name(labels.get(one, ""), one) for one in row.namespaces) or "-" for row in rows]
    return Listing(
        [
            Column("engine", [printable(row.name) or "-" for row in rows], 0, 12),
            Column("namespace", names, 0, 16),
            Column("schedulers", [format_count(row.schedulers) for row in rows], right=True),
            Column("workers", [format_count(row.workers) for row in rows], right=True),
            Column("pids", [", ".join(map(str, row.pids)) or "-" for row in rows], 1, 8),
            Column("leases", [format_count(row.leases) for row in rows], 3, right=True),
            Column("pinned", [format_size(row.pinned_bytes) for row in rows], right=True),
            Column("jobs", [format_count(row.jobs) for row in rows], right=True),
            Column("memory", [format_size(row.registered_bytes) for row in rows], 2, right=True),
        ]
    )


def _column(
    found: Sequence[T], title: str, cell: Callable[[T], str], rank: int = 0, least: int = 0, *, right: bool = True
) -> Column:
    return Column(title, [cell(one) for one in found], rank, least, right)


def _sessions_page(found: Sequence[SessionInfo], labels: Mapping[bytes, str]) -> Listing | Text:
    if not found:
        return Text("No session is open.")
    column = partial(_column, found)

    def names(session: SessionInfo) -> str:
        return ", ".join(namespace_name(labels.get(one, ""), one) for one in session.namespaces) or "-"

    return Listing(
        [
            column("id", lambda one: str(one.session_id)),
            column("role", lambda one: one.role or "new", right=False),
            column("name", lambda one: printable(one.name) or "-", 0, 12, right=False),
            column("namespace", names, 0, 16, right=False),
            column("software", lambda one: printable(one.software) or "-", 5, 12, right=False),
            column("pid", lambda one: str(one.pid) if one.pid else "-", 1),
            column("uid", lambda one: str(one.uid), 6),
            column("age", lambda one: _format_age(one.age_seconds), 4),
            column("idle", lambda one: _format_age(one.idle_seconds), 3),
            column("leases", lambda one: format_count(one.leases), 7),
            column("pinned", lambda one: format_size(one.pinned_bytes)),
            column("jobs", lambda one: format_count(one.jobs)),
            column("memory", lambda one: format_size(one.registered_bytes) if one.registrations else "-", 2),
            column("unacked", lambda one: format_count(one.unacknowledged), 8),
        ]
    )


def _format_age(seconds: float) -> str:
    """Fractions of the first second would only be noise."""
    return format_duration(seconds) if seconds >= 1 else "<1 s"


namespaces_app = typer.Typer(help="List what is cached, by namespace.", rich_markup_mode=None)


@namespaces_app.callback(invoke_without_command=True)
def namespaces(context: typer.Context, directory: Directory = None, json: Json = False) -> int:
    """List what is cached, by namespace, and what each may have of the pool where that was set."""
    if context.invoked_subcommand is not None:
        return 0
    with open_admin(context, directory) as admin:
        found = admin.namespaces().namespaces
    print_listing(Namespaces(found), _namespaces_page(found), as_json=json)
    return 0


@namespaces_app.command()
def diff(
    context: typer.Context,
    one: Annotated[str, typer.Argument(metavar="A", help="A label, or the first digits of a fingerprint.")],
    other: Annotated[str, typer.Argument(metavar="B", help="Another one's.")],
    directory: Directory = None,
    json: Json = False,
) -> int:
    """Show why two namespaces do not share blocks: the fields of their fingerprints that differ.

    Exit status: 0 they are one namespace, 1 they differ, 2 an error.
    """
    with open_admin(context, directory) as admin:
        found = admin.namespaces().namespaces
    first, second = (resolve_namespace(found, wanted) for wanted in (one, other))
    names = [namespace_name(info.label, info.namespace) for info in (first, second)]
    fields = differences(first.description, second.description)
    if first.namespace == second.namespace:
        page: Listing | Text = Text(f"{names[0]} is one namespace.")
    elif not fields:
        page = Text(f"{names[0]} and {names[1]} differ, and their descriptions do not say in what.")
    else:
        titles = ("field", *names)
        cells = zip(*((printable(name), _shown(a), _shown(b)) for name, a, b in fields), strict=True)
        page = Listing([Column(title, list(column), 0, 12) for title, column in zip(titles, cells, strict=True)])
    print_listing(Differences([Difference(*one) for one in fields]), page, as_json=json)
    return int(first.namespace != second.namespace)


def _shown(value: object) -> str:
    return printable(value if isinstance(value, str) else "-" if value is None else to_json(value))


def _namespaces_page(found: Sequence[NamespaceInfo]) -> Listing | Text:
    if not found:
        return Text("No namespace is open; an engine opens its own when it connects.")
    column = partial(_column, found)

    def tokens(one: NamespaceInfo) -> str:
        return _format_range([group.tokens_per_block for group in one.groups], format_count)

    def block_size(one: NamespaceInfo) -> str:
        return _format_range([sum(by_rank) for by_rank in one.shard_bytes], format_size)

    def quota(one: NamespaceInfo) -> str:
        return "-" if one.quota_bytes is None else format_size(one.quota_bytes)

    limited = any(one.quota_bytes is not None for one in found)
    return Listing(
        [
            column("label", lambda one: printable(one.label) or "(no label)", 0, 16, right=False),
            column("fingerprint", lambda one: short_fingerprint(one.namespace), right=False),
            column("ranks", lambda one: format_count(one.world_size), 4),
            column("groups", lambda one: format_count(len(one.groups)), 5),
            column("tokens/block", tokens, 6),
            column("block size", block_size, 3),
            column("blocks", lambda one: format_count(one.ready_blocks)),
            column("writing", lambda one: format_count(one.writing_blocks), 7),
            column("size", lambda one: format_size(one.ready_bytes)),
            column("sessions", lambda one: format_count(one.sessions), 2 * limited),
            *([column("at most", quota)] if limited else []),
        ],
        "at most: the quota, from which on it takes from itself." if limited else "",
    )


def _format_range(values: Sequence[int], format_value: Callable[[int], str]) -> str:
    """Return the value that all groups share, or the least and the largest; ``-`` where none is known."""
    known = sorted({value for value in values if value > 0})
    if not known:
        return "-"
    return format_value(known[0]) if len(known) == 1 else f"{format_value(known[0])} to {format_value(known[-1])}"


def clear(
    context: typer.Context,
    directory: Directory = None,
    namespace: Annotated[str | None, NAMESPACE_OPTION] = None,
    everything: Annotated[bool, typer.Option("--all", help="Clear every namespace.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    json: Json = False,
) -> int:
    """Drop the blocks of one namespace or of all.

    The blocks leave the index at once; the bytes of blocks in use are freed when their last user is done.

    Exit status: 0 done, 1 the answer was no, 2 an error, as where there is no terminal to ask on.
    """
    if (namespace is None) != everything:
        raise CliError("Choose what to clear: either --namespace with a label or fingerprint, or --all.")
    with open_admin(context, directory) as admin:
        found = admin.namespaces().namespaces
        chosen = None if namespace is None else resolve_namespace(found, namespace)
        name = "all namespaces"
        if chosen is not None:
            name = f"namespace {namespace_name(chosen.label, chosen.namespace)}"
        if not yes and not _confirm_clear(found if chosen is None else [chosen], name):
            print_line("Nothing was cleared.")
            return 1
        dropped = admin.clear(None if chosen is None else chosen.namespace)
    if json:
        print_json(Cleared(chosen.namespace if chosen else None, dropped))
    else:
        print_line(f"{count_blocks(dropped)} {were(dropped)} dropped from {name}.")
    return 0


def _confirm_clear(cleared: Sequence[NamespaceInfo], name: str) -> bool:
    blocks = sum(namespace.ready_blocks for namespace in cleared)
    size = format_size(sum(namespace.ready_bytes for namespace in cleared))
    return confirmed(f"Drop {count_blocks(blocks)} ({size}) from {name}? [y/N] ", "cleared")


def scrub(context: typer.Context, directory: Directory = None, json: Json = False) -> int:
    """Compare every block in the pool with its checksum.

    The daemon reads in the background, with pauses, while it serves. A block whose bytes do not
    match its checksum is dropped, and its slot is not used any more until a restart.

    Exit status: 0 all blocks match, 1 some do not, 2 an error. Ctrl-C ends the waiting, not the scrub.
    """
    on_terminal = sys.stderr.isatty()
    with open_admin(context, directory) as admin:
        reply = admin.scrub()
        pause_s = FIRST_SCRUB_PAUSE_S
        while reply.running:
            if on_terminal:
                print(f"\r{_scrub_progress(reply)}\x1b[K", end="", file=sys.stderr, flush=True)
            time.sleep(pause_s)
            pause_s = min(SCRUB_PAUSE_S, 2 * pause_s)
            reply = admin.scrub(start=False)
    if on_terminal:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if json:
        print_json(reply)
    else:
        print_line(_scrub_result(reply))
    return int(reply.mismatches > 0)


def _scrub_progress(reply: ScrubReply) -> str:
    done = f"{percent(reply.done_slots, reply.slots)} of {format_count(reply.slots)} slots"
    wrong = f", {format_count(reply.mismatches)} wrong" if reply.mismatches else ""
    return f"scrubbing: {done}{wrong}"


def _scrub_result(reply: ScrubReply) -> str:
    speed = f", {format_rate(reply.checked_bytes / reply.seconds)}" if reply.seconds > 0 else ""
    read = (
        f"{format_count(reply.checked_slots)} slots ({format_size(reply.checked_bytes)}) were compared with their "
        f"checksums in {format_duration(reply.seconds)}{speed}"
    )
    if not reply.mismatches:
        return f"{read}; all match."
    some = "1 does" if reply.mismatches == 1 else f"{format_count(reply.mismatches)} do"
    return (
        f"{read}; {some} not match: the blocks are dropped and the slots not used before a restart. "
        "The daemon's log names them; check the machine's memory (dmesg, edac-util)."
    )
