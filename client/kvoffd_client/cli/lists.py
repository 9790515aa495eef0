"""The tables of ``kvoffd-cli sessions`` and ``kvoffd-cli namespaces``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from kvoffd_client.cli.text import GAP, add_numbers, fitting, printable, section, short_fingerprint
from kvoffd_proto.messages import NamespaceInfo, SessionInfo
from kvoffd_proto.units import format_count, format_duration, format_size


def sessions_table(sessions: Sequence[SessionInfo]) -> Table | Text:
    """One line per session, oldest first."""
    if not sessions:
        return Text("No session is open.")
    table = Table(box=None, padding=GAP, pad_edge=False, header_style="bold")
    table.add_column("id", justify="right", no_wrap=True)
    table.add_column("role", no_wrap=True)
    table.add_column("name")
    table.add_column("software")
    for title in ("pid", "uid", "age", "idle", "leases", "jobs", "memory", "unacked"):
        table.add_column(title, justify="right", no_wrap=True)
    for session in sessions:
        table.add_row(
            str(session.session_id),
            printable(session.role),
            fitting(session.name or "-"),
            fitting(session.software or "-", "dim"),
            str(session.pid) if session.pid else "-",
            str(session.uid),
            _age(session.age_seconds),
            _age(session.idle_seconds),
            format_count(session.leases),
            format_count(session.jobs),
            format_size(session.registered_bytes) if session.registrations else "-",
            format_count(session.unacknowledged),
        )
    return table


def _age(seconds: float) -> str:
    """Ages below a second are noise."""
    return format_duration(seconds) if seconds >= 1 else "<1 s"


def namespaces_table(namespaces: Sequence[NamespaceInfo]) -> Table | Text:
    """One line per namespace, in the order in which they were opened."""
    if not namespaces:
        return Text("No namespace is open; an engine opens its own when it connects.")
    table = section("label")
    table.add_column("fingerprint", no_wrap=True)
    add_numbers(table, ("ranks", "groups", "tokens/block", "block size", "blocks", "writing", "size", "sessions"))
    for namespace in namespaces:
        table.add_row(
            fitting(namespace.label or "(no label)"),
            short_fingerprint(namespace.namespace),
            format_count(namespace.world_size),
            format_count(len(namespace.groups)),
            _spread([group.tokens_per_block for group in namespace.groups], format_count),
            _spread([sum(by_rank) for by_rank in namespace.shard_bytes], format_size),
            format_count(namespace.ready_blocks),
            format_count(namespace.writing_blocks),
            format_size(namespace.ready_bytes),
            format_count(namespace.sessions),
        )
    return table


def _spread(values: Sequence[int], form: Callable[[int], str]) -> str:
    """The value all groups share, or the least and the largest; ``-`` where nothing is known."""
    known = sorted({value for value in values if value > 0})
    if not known:
        return "-"
    return form(known[0]) if len(known) == 1 else f"{form(known[0])} to {form(known[-1])}"
