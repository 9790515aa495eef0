"""``kvoffd-cli disk``: shows the directories of the disk tier."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from kvoffd_client.cli.console import percent
from kvoffd_client.cli.json_objects import Disks
from kvoffd_client.cli.json_output import print_listing
from kvoffd_client.cli.target import Directory, Json, open_admin
from kvoffd_proto.stats import DiskFault, DiskStats, TieringStats
from kvoffd_proto.units import format_count, format_duration, format_rate, format_size, printable

MEANINGS = {str(fault): fault.meaning for fault in DiskFault}


def disk(context: typer.Context, directory: Directory = None, json: Json = False) -> int:
    """Show the disk tier's directories: use, age, errors.

    Exit status: 0 all serve, 1 one has failed or hangs, 2 an error.
    """
    with open_admin(context, directory) as admin:
        reply = admin.stats()
    print_listing(Disks(reply.disks, reply.tiers), disks_page(reply.disks, reply.tiers), as_json=json)
    return int(any(disk.state in ("failed", "hanging") for disk in reply.disks))


def disks_page(found: Sequence[DiskStats], tiers: TieringStats | None) -> RenderableType:
    """Some lines for each directory with its problems, then what moves between the disks and the pool."""
    if not found:
        return Text("There is no disk; start the daemon with --disk DIRECTORY=SIZE.")
    lines = [line for disk in found for line in (_disk_text(disk), *_problems(disk))]
    return Group(*lines, *([_traffic_text(tiers)] if tiers is not None else []))


def _disk_text(disk: DiskStats) -> Text:
    """Names and numbers in running text: a table of all of it would not fit a terminal of 80 columns."""
    next_hour_s = 3600.0 * (disk.oldest_seconds // 3600 + 1)  # it is known to the hour only
    oldest = f", the oldest < {format_duration(next_hour_s)}" if disk.blocks else ""
    return Text.assemble(
        (printable(disk.directory), "bold"),
        ": ",
        (printable(disk.state), "" if disk.state == "serving" else "yellow"),
        f", errors {format_count(sum(disk.errors.values()))}"
        f"\n    used {percent(disk.used_bytes, disk.size_bytes)} of {format_size(disk.size_bytes)}, "
        f"{format_count(disk.blocks)} blocks{oldest}"
        f"\n    read {format_size(disk.read_bytes)}, written {format_size(disk.written_bytes)} since the start and "
        f"{format_size(disk.lifetime_written_bytes)} ever",
    )


def _problems(disk: DiskStats) -> list[Text]:
    found = []
    if disk.problem:
        found.append(Text(printable(disk.problem), style="red"))
    for kind, count in sorted(disk.errors.items()):
        found.append(Text(f"    {kind} {format_count(count)}: {MEANINGS.get(kind, 'see the log')}", style="red"))
    if disk.errors:
        found.append(Text("    the daemon's log has the first of each kind", style="dim"))
    if disk.state == "serving" and not disk.direct:
        found.append(Text(f"{disk.directory}: goes through the page cache, since it refuses O_DIRECT", style="dim"))
    return found


def _traffic_text(tiers: TieringStats) -> Text:
    left = tiers.write_budget_left_bytes
    budget = "no bound for a day" if left is None else f"{format_size(left)} may be written now"
    speed = f", lately {format_rate(tiers.promotion_bytes_per_second)}" if tiers.promotion_bytes_per_second else ""
    failed = ", ".join(f"{kind} {format_count(count)}" for kind, count in sorted(tiers.promotions_failed.items()))
    return Text(
        f"promoted: {format_count(tiers.promoted_blocks)} blocks ({format_size(tiers.promoted_bytes)}){speed}, "
        f"{format_count(tiers.promotions_waiting)} pending, failed: {printable(failed) or 'none'}\n"
        "    a lookup promises what a disk has, and counts it as a hit of the disk; what failed was a miss after all\n"
        f"written: {format_count(tiers.demoted_blocks)} blocks ({format_size(tiers.demoted_bytes)}), write mode "
        f"{printable(tiers.write_mode)}, {budget}"
    )
