"""``kvoffd-cli clear`` and ``scrub``."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from kvoffd_client.cli.format import count_blocks, namespace_name, percent, print_json, print_status, say
from kvoffd_client.cli.target import NAMESPACE_HELP, CliError, Directory, Json, open_admin
from kvoffd_proto.units import format_count, format_duration, format_rate, format_size

FIRST_SCRUB_PAUSE_S, SCRUB_PAUSE_S = 0.02, 0.5
"""Between two questions for a scrub's progress: at first short, since a small pool is done at once."""


def clear(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help=NAMESPACE_HELP)] = None,
    everything: Annotated[bool, typer.Option("--all", help="Clear every namespace.")] = False,
    all_nodes: Annotated[bool, typer.Option("--all-nodes", help="Also on all nodes that share its store.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    directory: Directory = None,
    json: Json = False,
) -> int:
    """Drop the blocks of one namespace or of all, on disks too.

    With --all-nodes the other nodes drop theirs within seconds, as is wanted where weights changed under one name.

    Exit status: 0 done, 1 no, 2 an error, 3 done, but a kill may undo it.
    """
    if (name is None) is not everything:
        raise CliError("Name one namespace, or --all; `kvoffd-cli namespaces` lists them.")
    with open_admin(directory) as admin:
        one = None if everything else admin.namespace(name or "")
        chosen = admin.namespaces().namespaces if one is None else [one]
        where = "all namespaces" if one is None else f"namespace {namespace_name(one.label, one.namespace)}"
        where += " on all nodes" * all_nodes
        blocks, nbytes = sum(each.ready_blocks for each in chosen), sum(each.ready_bytes for each in chosen)
        below = ", and those on disks," if any(one.blocks for one in admin.stats().disks) else ""
        if not yes:
            if not sys.stdin.isatty():
                raise CliError("Nothing was cleared, since there is no terminal to confirm it on; add --yes.")
            question = f"Drop {count_blocks(blocks)} ({format_size(nbytes)}){below} from {where}? [y/N] "
            print(question, end="", file=sys.stderr, flush=True)  # stdout holds nothing but the result
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                say("Nothing was cleared.")
                return 1
        stores = [admin.reset_fleet(each.namespace) for each in chosen] if all_nodes else []
        fingerprint = None if one is None else one.namespace
        dropped = admin.clear(fingerprint)
    if json:
        print_json({"namespace": fingerprint, "cleared_blocks": dropped, "stores": max(stores, default=0)})
    else:
        say(f"Dropped {count_blocks(dropped)} from {where}.")
    return 0


def scrub(directory: Directory = None, json: Json = False) -> int:
    """Compare every block in the pool with its checksum.

    The daemon reads in the background, with pauses, while it serves. A block that does not match is dropped, and its
    slot is not used any more. Ctrl-C ends the waiting, not the scrub.

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
            some = "1 does" if reply.mismatches == 1 else f"{format_count(reply.mismatches)} do"
            result = (
                f"{some} not match: the blocks are dropped and the slots not used before a restart. The daemon's log "
                "names them; check the machine's memory (dmesg, edac-util)."
            )
        say(
            f"{format_count(reply.checked_slots)} slots ({format_size(reply.checked_bytes)}) were compared with their "
            f"checksums in {format_duration(reply.seconds)}{speed}; {result}"
        )
    return int(reply.mismatches > 0)
