"""What the commands do once the command line is read. Each returns the exit status."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import RenderableType

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.cli.failure import CliError
from kvoffd_client.cli.json_output import Plain, named, to_json
from kvoffd_client.cli.lists import namespaces_table, sessions_table
from kvoffd_client.cli.resolve_namespace import choose_namespace
from kvoffd_client.cli.screen import PIPE_LIST_CELLS, emit, make_console, show
from kvoffd_client.cli.stats_page import StatsPage
from kvoffd_client.cli.tail import event_object, fingerprint_of, gap_before, lines_of
from kvoffd_client.cli.target import Where, open_admin
from kvoffd_client.cli.text import printable, short_fingerprint
from kvoffd_client.cli.watch import watch
from kvoffd_proto.messages import NamespaceInfo
from kvoffd_proto.units import format_count, format_size

DONE = 0
UNHEALTHY = 1


def stats(where: Where, *, as_json: bool) -> int:
    """Print all counters once."""
    with open_admin(where) as admin:
        reply = admin.stats()
    if as_json:
        emit(to_json(reply))
    else:
        show(make_console(), StatsPage(reply))
    return DONE


def watch_stats(where: Where, interval_s: float, *, as_json: bool) -> int:
    """Print all counters until Ctrl-C."""
    with open_admin(where) as admin:
        watch(admin, interval_s, as_json=as_json)
    return DONE


def health(where: Where, *, as_json: bool) -> int:
    """Say whether the daemon works; 1 when it does not, or does not take work yet."""
    with open_admin(where) as admin:
        reply = admin.health()
    works = reply.healthy and reply.ready
    if as_json:
        emit(to_json(reply))
    elif works:
        emit("healthy: the daemon takes sessions and jobs")
    else:
        emit("not ready yet" if reply.healthy else "unhealthy")
    if not as_json:
        for problem in reply.problems:
            emit(f"- {printable(problem)}")
    return DONE if works else UNHEALTHY


def sessions(where: Where, *, as_json: bool) -> int:
    """List who is connected."""
    with open_admin(where) as admin:
        found = admin.sessions().sessions
    _list(sessions_table(found), {"sessions": named(found)}, as_json)
    return DONE


def namespaces(where: Where, *, as_json: bool) -> int:
    """List what is cached."""
    with open_admin(where) as admin:
        found = admin.namespaces().namespaces
    _list(namespaces_table(found), {"namespaces": named(found)}, as_json)
    return DONE


def _list(table: RenderableType, objects: dict[str, Plain], as_json: bool) -> None:
    if as_json:
        emit(to_json(objects))
    else:
        show(make_console(pipe_cells=PIPE_LIST_CELLS), table)


def clear(where: Where, wanted: str | None, *, yes: bool, as_json: bool) -> int:
    """Drop every block of one namespace, or (``wanted`` None) of all. Asks before, unless told ``yes``."""
    with open_admin(where) as admin:
        open_ones = admin.namespaces().namespaces
        chosen = None if wanted is None else choose_namespace(open_ones, wanted)
        if not yes and not _confirmed(open_ones, chosen):
            emit("Nothing was cleared.")
            return UNHEALTHY
        dropped = admin.clear(None if chosen is None else chosen.namespace)
    if as_json:
        emit(to_json({"namespace": chosen.namespace if chosen else None, "cleared_blocks": dropped}))
    else:
        emit(f"{_blocks(dropped)} {'was' if dropped == 1 else 'were'} dropped from {_called(chosen)}.")
    return DONE


def _confirmed(open_ones: list[NamespaceInfo], chosen: NamespaceInfo | None) -> bool:
    """Ask on stderr, so that stdout stays what was asked for. Raises CliError where nobody can answer."""
    if not sys.stdin.isatty():
        raise CliError("Nothing was cleared, since there is no terminal to confirm it on; add --yes.")
    touched = open_ones if chosen is None else [chosen]
    blocks = sum(namespace.ready_blocks for namespace in touched)
    size = format_size(sum(namespace.ready_bytes for namespace in touched))
    question = f"Drop {_blocks(blocks)} ({size}) from {_called(chosen)}? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _blocks(count: int) -> str:
    return f"{format_count(count)} block{'' if count == 1 else 's'}"


def _called(chosen: NamespaceInfo | None) -> str:
    if chosen is None:
        return "all namespaces"
    return f"namespace {printable(chosen.label)} ({short_fingerprint(chosen.namespace)})"


def events(directory: Path, *, as_json: bool) -> int:
    """Print KV cache events as they happen, until Ctrl-C. Gaps are told on stderr."""
    labels: dict[bytes, str] = {}
    last: int | None = None
    with AdminClient(directory) as admin:
        admin.health()  # an absent daemon is an error here, not something to wait for
        for topic, sequence, batch in admin.events():
            if gap := gap_before(sequence, last):
                print(f"kvoffd-cli: {gap}", file=sys.stderr, flush=True)
            last = sequence
            if fingerprint_of(topic) not in labels:
                labels |= {item.namespace: item.label for item in admin.namespaces().namespaces}
            if as_json:
                emit(to_json(event_object(topic, sequence, batch, labels)))
            else:
                for line in lines_of(topic, sequence, batch, labels):
                    emit(line)
    return DONE
