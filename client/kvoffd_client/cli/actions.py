"""``kvoffd-cli clear``, ``scrub`` and ``events``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import typer

from kvoffd_client.admin_client import WHOLE_FINGERPRINT, AdminClient, find_namespace_info
from kvoffd_client.cli.format import WIDE_CELLS, make_console, print_json, print_line, print_status, say
from kvoffd_client.cli.show import labels_of
from kvoffd_client.cli.target import NAMESPACE_HELP, CliError, Directory, Json, PlainJson, open_admin
from kvoffd_client.errors import RequestRefused
from kvoffd_proto.admin import LogLevel, NamespaceInfo, NamespacesReply, SetLogLevel
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.events import KV_TOPIC_PREFIX, MEDIUM_STORAGE, AllBlocksCleared, BlockStored, KvEvent
from kvoffd_proto.stats import DaemonStats, namespace_id, namespace_name
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

FIRST_SCRUB_PAUSE_S, SCRUB_PAUSE_S = 0.02, 0.5
"""Pauses between requests for a scrub's progress: short at first, for small pools."""
HASH_DIGITS = 12


def clear(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help=NAMESPACE_HELP)] = None,
    everything: Annotated[bool, typer.Option("--all", help="Clear every namespace.")] = False,
    all_nodes: Annotated[
        bool, typer.Option("--all-nodes", help="Also on all nodes that share a store or are peers.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    directory: Directory = None,
    json: PlainJson = False,
) -> int:
    """Drop the blocks of one namespace or of all, also on disks.

    Shared stores and peers keep theirs without --all-nodes. With it the other nodes follow within seconds: use it if
    weights changed under one name.

    Exit status: 0 done, 1 not confirmed, 2 an error, or a kill may undo it.
    """
    if (name is None) is not everything:
        raise CliError("Name one namespace or --all, not both; `kvoffd-cli namespaces` lists them.")
    with open_admin(directory) as admin:
        listed, now = admin.namespaces(), admin.stats()
        chosen = _choose(listed, name, all_nodes=all_nodes)
        where = _place(chosen, all_nodes=all_nodes)
        if not yes:
            known = chosen.listed.values()
            blocks, nbytes = sum(each.ready_blocks for each in known), sum(each.ready_bytes for each in known)
            below = ", and those on disks," if _has_on_disks(now, chosen.fingerprint) else ""
            if not _is_confirmed(f"Drop {count_blocks(blocks)} ({format_size(nbytes)}){below} from {where}? [y/N] "):
                say("Nothing was cleared.")
                return 1
        dropped, problem = _drop(admin, chosen, all_nodes=all_nodes)
        if problem is not None:
            raise CliError(f"{problem} On this node {count_blocks(dropped)} were dropped.") from problem
    # Stores and peers that keep copies which prompts load again.
    keepers = [] if all_nodes or chosen.fingerprint in listed.unshared else _keepers(now)
    stores = len(now.shared) if all_nodes else 0
    if json:
        print_json({"namespace": chosen.fingerprint, "cleared_blocks": dropped, "stores": stores, "kept_by": keepers})
        return 0
    say(f"Dropped {count_blocks(dropped)} from {where}.")
    if stores:
        say("Shared stores keep the bytes, which nobody reads, until they expire or are evicted there.")
    if keepers:
        _show_keepers(keepers, chosen)
    return 0


class _Chosen(NamedTuple):
    """Namespaces to clear."""

    fingerprint: bytes | None
    """The only one; None for all."""
    listed: dict[bytes, NamespaceInfo]
    """Those of them that the daemon lists."""
    unlisted: list[bytes]
    """Others to clear on all nodes: this daemon has forgotten them."""


def _choose(listed: NamespacesReply, name: str | None, *, all_nodes: bool) -> _Chosen:
    """Return the namespace of this name, or all without one. Raises KvoffdClientError.

    On all nodes a whole fingerprint may name one that is not open.
    """
    if name is None:
        known = {each.namespace: each for each in listed.namespaces}
        return _Chosen(None, known, [each for each in listed.unshared if each not in known] if all_nodes else [])
    if all_nodes and WHOLE_FINGERPRINT.fullmatch(name):
        fingerprint = bytes.fromhex(name)
    else:
        fingerprint = find_namespace_info(listed.namespaces, name).namespace
    known = {each.namespace: each for each in listed.namespaces if each.namespace == fingerprint}
    return _Chosen(fingerprint, known, [] if known else [fingerprint])


def _place(chosen: _Chosen, *, all_nodes: bool) -> str:
    """Return from where blocks are dropped, as the end of a sentence."""
    if chosen.fingerprint is not None:
        label = next((each.label for each in chosen.listed.values()), "")
        return f"namespace {namespace_name(label, chosen.fingerprint)}{' on all nodes' if all_nodes else ''}"
    if not all_nodes:
        return "all namespaces"
    count, unlisted = len(chosen.listed), len(chosen.unlisted)
    those = "one" if count == 1 else format_count(count)
    where = f"all namespaces, and the {those} that this daemon has from all nodes"
    if unlisted:
        more = f"{format_count(unlisted)} more that {'was' if unlisted == 1 else 'were'} not shared"
        where += f", with {more} any longer"
    return where


def _is_confirmed(question: str) -> bool:
    """Ask on the terminal. Raises CliError without one."""
    if not sys.stdin.isatty():
        raise CliError("Nothing was cleared: there is no terminal to confirm it on; add --yes.")
    print(question, end="", file=sys.stderr, flush=True)  # stdout is for the result
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _drop(admin: AdminClient, chosen: _Chosen, *, all_nodes: bool) -> tuple[int, RequestRefused | None]:
    """Drop the blocks; return how many this node had, and the first refusal if other nodes may have kept theirs."""
    dropped = 0
    problem: RequestRefused | None = None
    if all_nodes:
        for each in (*chosen.listed, *chosen.unlisted):
            try:
                dropped += admin.reset_fleet(each)
            except RequestRefused as error:
                if error.code is ErrorCode.BAD_ARGUMENT:
                    raise
                # This node has dropped its own, and the other namespaces are cleared all the same.
                problem = problem or error
                dropped += chosen.listed[each].ready_blocks if each in chosen.listed else 0
    # Even after all nodes: a clear of all also drops namespaces that the daemon knows only from before its start.
    if chosen.fingerprint is None or not all_nodes:
        dropped += admin.clear(chosen.fingerprint)
    return dropped, problem


def _show_keepers(keepers: Sequence[str], cleared: _Chosen) -> None:
    """Print who keeps copies of what was cleared, and how to invalidate them."""
    keep = "keeps its copies" if len(keepers) == 1 else "keep their copies"
    say(f"{printable(', '.join(keepers))} {keep}, and prompts load them again. To invalidate them on all nodes:")
    # The daemon has forgotten those that no engine has open: they need their whole fingerprints.
    closed = [each.namespace for each in cleared.listed.values() if not each.sessions]
    if cleared.fingerprint is None and (len(closed) < len(cleared.listed) or not closed):
        print_line("  kvoffd-cli clear --all --all-nodes")
    elif cleared.fingerprint is not None and not closed:
        print_line(f"  kvoffd-cli clear {namespace_id(cleared.fingerprint)} --all-nodes")
    for each in closed:
        print_line(f"  kvoffd-cli clear {each.hex()} --all-nodes")


def _keepers(now: DaemonStats) -> list[str]:
    """Return the URLs of the stores and peers that may have copies of this node's blocks."""
    peers = next((one.value for one in now.settings if one.name == "peers"), "")
    # Of a network, 10.0.0.0/16:7400, or behind a name, dns+engines:7400, ``shared`` has only the peers that answer now.
    of_many = [one for one in map(str.strip, peers.split(",")) if "/" in one or one.startswith("dns+")]
    return [*(one.url for one in now.shared), *(f"peer://{one}" for one in of_many)]


def _has_on_disks(stats: DaemonStats, fingerprint: bytes | None) -> bool:
    """Return whether a namespace, or any one if it is None, has blocks on disks."""
    if fingerprint is None or not any(disk.blocks for disk in stats.disks):
        return any(disk.blocks for disk in stats.disks)
    rows = {row.fingerprint: row.disk_bytes for row in stats.namespaces}
    return rows.get(fingerprint.hex()) != 0  # it may have been opened since


def scrub(directory: Directory = None, json: Json = False) -> int:
    """Compare every block in the pool with its checksum.

    The daemon does this in the background, with pauses. A block that does not match is dropped, and its slot is no
    longer used. Ctrl-C stops waiting, not the scrub.

    Exit status: 0 all blocks match, 1 some do not, 2 an error.
    """
    with open_admin(directory) as admin:
        reply, pause_s = admin.scrub(), FIRST_SCRUB_PAUSE_S
        while reply.running:
            wrong = f", {format_count(reply.mismatches)} wrong" if reply.mismatches else ""
            done = percent(reply.done_slots, reply.slots)
            print_status(f"scrubbing: {done} of {format_count(reply.slots)} slots{wrong}")
            time.sleep(pause_s)
            pause_s = min(SCRUB_PAUSE_S, 2 * pause_s)
            reply = admin.scrub(start=False)
    print_status()
    if json:
        print_json(reply)
    else:
        speed = f", {format_rate(reply.checked_bytes / reply.seconds)}" if reply.seconds > 0 else ""
        result = "all match."
        if reply.mismatches:
            failed = "1 does" if reply.mismatches == 1 else f"{format_count(reply.mismatches)} do"
            result = (
                f"{failed} not match: the blocks are dropped, and the slots unused until a restart. The daemon's log "
                "lists them; check the machine's memory (dmesg, edac-util)."
            )
        say(
            f"{format_count(reply.checked_slots)} slots ({format_size(reply.checked_bytes)}) were compared with their "
            f"checksums in {format_duration(reply.seconds)}{speed}; {result}"
        )
    return int(reply.mismatches > 0)


def log_level(
    level: Annotated[
        LogLevel | None, typer.Argument(metavar="LEVEL", help="debug, info, warning or error.", show_default=False)
    ] = None,
    directory: Directory = None,
) -> int:
    """Set what the daemon logs, or show it.

    A level holds until the daemon ends: the next one has its setting log_level. Level debug also has warnings that are
    otherwise logged once a minute.
    """
    with open_admin(directory) as admin:
        if level is not None:
            admin.ask(SetLogLevel, level)
        now = level or admin.stats().log_level
    say(f"The daemon logs {now} and above.")
    return 0


# --- KV events -------------------------------------------------------------------------------------


def events(directory: Directory = None, json: PlainJson = False) -> int:
    """Print KV cache events as they happen, until Ctrl-C.

    Blocks are stored in the pool and removed from it, written to a disk and dropped from it. With --json, one object
    per line. Lost messages, and the end and return of the daemon, are reported on stderr.
    """
    labels: dict[bytes, str] = {}
    expected: dict[bytes, int] = {}
    """Number of the next message by topic."""
    first: int | None = None
    """Number of each topic's first message; None if the daemon ran before this command, and its first were missed."""
    wide = make_console().width >= WIDE_CELLS
    with open_admin(directory, subscribe_events=True) as admin:
        admin.health()  # a missing daemon is an error
        epoch = admin.epoch
        if sys.stderr.isatty():
            print("Waiting for events; Ctrl-C ends.", file=sys.stderr)
        for found in admin.events():
            if found is None:
                state = "is back; events in between were lost." if admin.ready else "has ended the connection."
                print(f"kvoffd-cli: The kvoffd daemon in {admin.directory} {state}", file=sys.stderr, flush=True)
                if admin.epoch != epoch:  # another daemon, which numbers its messages from 0
                    epoch, expected, first = admin.epoch, {}, 0
                continue
            topic, sequence, batch = found
            missing = sequence - expected.get(topic, sequence if first is None else first)
            if missing:
                gap = f"{missing} event message{plural(missing)} before number {sequence} did not arrive."
                if missing < 0:
                    gap = "The namespace was forgotten and opened again: its events are numbered from 0."
                print(f"kvoffd-cli: {gap}", file=sys.stderr, flush=True)
            expected[topic] = sequence + 1
            fingerprint = bytes.fromhex(topic.removeprefix(KV_TOPIC_PREFIX).decode())
            if fingerprint not in labels:
                labels |= labels_of(admin)
            if json:
                where = {"namespace": fingerprint, "label": labels.get(fingerprint)}
                objects = [_event_object(one) for one in batch.events]
                print_json({"sequence": sequence, "time": batch.ts, **where, "events": objects})
                continue
            label = f" {printable(labels.get(fingerprint, ''))}" if wide else ""
            clock = f"{time.strftime('%H:%M:%S', time.localtime(batch.ts))}.{int(batch.ts % 1 * 1000):03}"
            for one in batch.events:
                text = _event_text(one, span=wide)
                print_line(f"{clock} {sequence:>8} {namespace_id(fingerprint)}{label} {text}")
    return 0


def _event_text(event: KvEvent, *, span: bool) -> str:
    if isinstance(event, AllBlocksCleared):
        return "cleared  all blocks"
    here, below = ("stored ", "written") if isinstance(event, BlockStored) else ("removed", "dropped")
    word = below if event.medium == MEDIUM_STORAGE else here
    hashes = event.block_hashes
    first, last = (block_hash.hex()[:HASH_DIGITS] for block_hash in (hashes[0], hashes[-1])) if hashes else ("", "")
    shown = f"{first} to {last}" if span and first != last else first
    return f"{word} group {event.group_idx} {len(hashes):>5} block{plural(len(hashes)) or ' '} {shown}".rstrip()


def _event_object(event: KvEvent) -> dict[str, object]:
    if isinstance(event, AllBlocksCleared):
        return {"type": "cleared"}
    kind: dict[str, object] = {"type": "removed"}
    if isinstance(event, BlockStored):
        kind = {"type": "stored", "tokens_per_block": event.block_size}
    return {**kind, "group": event.group_idx, "medium": event.medium, "block_hashes": event.block_hashes}
