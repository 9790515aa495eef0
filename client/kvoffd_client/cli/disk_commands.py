"""``kvoffd-cli disk``: shows, attaches, drains and detaches the directories of the disk tier."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from kvoffd_client.admin_client import OPERATOR_OPTIONS, AdminClient
from kvoffd_client.cli.console import percent, print_line
from kvoffd_client.cli.json_objects import Disks
from kvoffd_client.cli.json_output import print_listing
from kvoffd_client.cli.target import CliError, Directory, Json, local_directory, open_admin
from kvoffd_proto.messages import DiskStats, TieringStats
from kvoffd_proto.units import UnitError, format_count, format_duration, format_rate, format_size, parse_size, printable

POLL_S = 0.1
"""Between two questions for the state of a directory that is attached or detached."""

Disk = Annotated[str, typer.Argument(metavar="DISK", help="Directory of the disk tier.")]

disk_app = typer.Typer(help="Show and change the disk tier.", rich_markup_mode=None)


@disk_app.callback(invoke_without_command=True)
def show(context: typer.Context, directory: Directory = None, json: Json = False) -> int:
    """Show the disk tier's directories: use, age, what was written, errors.

    Exit status: 0 all serve, 1 one has failed or hangs, 2 an error.
    """
    if context.invoked_subcommand is not None:
        return 0
    with open_admin(context, directory) as admin:
        reply = admin.stats()
    print_listing(Disks(reply.disks, reply.below), disks_page(reply.disks, reply.below), as_json=json)
    return int(any(disk.state in ("failed", "hanging") for disk in reply.disks))


def disks_page(found: Sequence[DiskStats], below: TieringStats | None) -> RenderableType:
    """Some lines for each directory with its problems, then what moves between the disks and the pool."""
    if not found:
        return Text("No disk is attached; start the daemon with --disk DIRECTORY=SIZE, or use kvoffd-cli disk attach.")
    lines = [line for disk in found for line in (_disk_text(disk), *_problems(disk))]
    return Group(*lines, *([_traffic_text(below)] if below is not None else []))


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
        found.append(Text(f"    {kind} {format_count(count)}: {kind.meaning}", style="red"))
    if disk.errors:
        found.append(Text("    the daemon's log has the first of each kind", style="dim"))
    if disk.state == "serving" and not disk.direct:
        found.append(Text(f"{disk.directory}: goes through the page cache, since it refuses O_DIRECT", style="dim"))
    return found


def _traffic_text(below: TieringStats) -> Text:
    left = below.budget_left_bytes
    budget = "no bound for a day" if left is None else f"{format_size(left)} may be written now"
    speed = f", lately {format_rate(below.read_bytes_per_second)}" if below.read_bytes_per_second else ""
    failed = ", ".join(f"{kind} {format_count(count)}" for kind, count in sorted(below.failed_promotions.items()))
    return Text(
        f"promoted: {format_count(below.promoted_blocks)} blocks ({format_size(below.promoted_bytes)}){speed}, "
        f"{format_count(below.pending_blocks)} pending, failed: {printable(failed) or 'none'}\n"
        "    a lookup promises what a disk has, and counts it as a hit of the disk; what failed was a miss after all\n"
        f"written: {format_count(below.written_blocks)} blocks ({format_size(below.written_bytes)}), write mode "
        f"{printable(below.write_mode)}, {budget}"
    )


@disk_app.command()
def attach(
    context: typer.Context,
    disk: Annotated[
        str,
        typer.Argument(
            metavar="DIRECTORY=SIZE", help="Directory and the most to take there, as /mnt/nvme0/kvoffd=500GiB."
        ),
    ],
    directory: Directory = None,
) -> int:
    """Use one more directory, until the daemon ends.

    Name it in the daemon's configuration to use it beyond that. The blocks in its file are found.

    Exit status: 0 it serves, 1 it cannot be used, 2 an error.
    """
    name, equals, size = disk.rpartition("=")
    if not equals or not name:
        raise CliError(f"{disk!r} is not a directory and a size; write them as in /mnt/nvme0/kvoffd=500GiB.")
    try:
        size_bytes = parse_size(size)
    except UnitError as error:
        raise CliError(f"{disk!r} cannot be used: {error}.") from error
    path = _absolute(name)
    with _open_here(context, directory) as admin:
        known = _disk_at(admin, path)
        admin.attach_disk(path, size_bytes)
        while (state := _disk_at(admin, path)) is not None and state.state == "opening":
            time.sleep(POLL_S)
        if state is not None and state.state == "failed" and known is None:
            admin.detach_disk(path)  # what was mistyped is no problem of the daemon's
    if state is None or state.state == "failed":
        print_line(printable(state.problem) if state is not None else f"{path} is not attached.")
        return 1
    print_line(f"{path} serves: {format_size(state.size_bytes)}, {format_count(state.blocks)} blocks are there.")
    return 0


@disk_app.command()
def drain(context: typer.Context, disk: Disk, directory: Directory = None) -> int:
    """Stop writing to a directory. Blocks in it are still read."""
    path = _absolute(disk)
    with _open_here(context, directory) as admin:
        admin.drain_disk(path)
    print_line(f"{path} is drained: nothing more is written there, its blocks are still read.")
    return 0


@disk_app.command()
def detach(context: typer.Context, disk: Disk, directory: Directory = None) -> int:
    """Stop using a directory. Its blocks stay in its file, for when it is attached again."""
    path = _absolute(disk)
    with _open_here(context, directory) as admin:
        admin.detach_disk(path)
        while (state := _disk_at(admin, path)) is not None:
            if state.state == "hanging":
                print_line(f"{path} is detached, but a call to it has not returned; its file stays open until it does.")
                return 1
            time.sleep(POLL_S)
    print_line(f"{path} is detached; its blocks stay in its file.")
    return 0


def _open_here(context: typer.Context, directory: Path | None) -> AdminClient:
    """Directories are of the daemon's own machine. Raises CliError."""
    return AdminClient(local_directory(context, directory), OPERATOR_OPTIONS)


def _disk_at(admin: AdminClient, path: str) -> DiskStats | None:
    return next((disk for disk in admin.stats().disks if disk.directory == path), None)


def _absolute(name: str) -> str:
    return os.path.abspath(os.path.expanduser(name))
