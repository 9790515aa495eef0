"""``kvoffd-cli scrub``: has the daemon look at every block, and waits for it."""

from __future__ import annotations

import sys
import time

from kvoffd_client.cli.json_output import to_json
from kvoffd_client.cli.screen import emit
from kvoffd_client.cli.target import Where, open_admin
from kvoffd_client.cli.text import percent
from kvoffd_proto.messages import ScrubReply
from kvoffd_proto.units import format_count, format_duration, format_rate, format_size

FIRST_LOOK_S = 0.02
LOOK_S = 0.5
"""How often the daemon is asked how far it is: at first soon, since a small pool is done at once."""

SOUND = 0
CORRUPT = 1


def run_scrub(where: Where, *, as_json: bool) -> int:
    """Scrub, with progress on a terminal's stderr; 1 where bytes were found that are not those that were stored."""
    with open_admin(where) as admin:
        reply = admin.scrub()
        pause_s = FIRST_LOOK_S
        while reply.running:
            _tell_progress(reply)
            time.sleep(pause_s)
            pause_s = min(LOOK_S, 2 * pause_s)
            reply = admin.scrub(start=False)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    emit(to_json(reply) if as_json else _sentence(reply))
    return CORRUPT if reply.mismatches else SOUND


def _tell_progress(reply: ScrubReply) -> None:
    if sys.stderr.isatty():
        done = f"{percent(reply.done_slots, reply.slots)} of {format_count(reply.slots)} slots"
        found = f", {format_count(reply.mismatches)} wrong" if reply.mismatches else ""
        print(f"\rscrubbing: {done}{found}\x1b[K", end="", file=sys.stderr, flush=True)


def _sentence(reply: ScrubReply) -> str:
    speed = f", {format_rate(reply.checked_bytes / reply.seconds)}" if reply.seconds > 0 else ""
    read = (
        f"{format_count(reply.checked_slots)} slots ({format_size(reply.checked_bytes)}) were compared with their "
        f"checksums in {format_duration(reply.seconds)}{speed}"
    )
    if not reply.mismatches:
        return f"{read}; all hold what was stored in them."
    some = "1 does" if reply.mismatches == 1 else f"{format_count(reply.mismatches)} do"
    return (
        f"{read}; {some} not hold what was stored: the blocks are dropped and the slots not used before a restart. "
        "The daemon's log names them; check the machine's memory (dmesg, edac-util)."
    )
