"""``kvoffd-cli disk``: the directories of the disk tier, shown, attached, drained and detached."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvoffd_client.admin_client import Administration
from kvoffd_client.cli.failure import CliError
from kvoffd_client.cli.json_output import named, to_json
from kvoffd_client.cli.screen import PIPE_LIST_CELLS, emit, make_console, show
from kvoffd_client.cli.target import Where, open_admin
from kvoffd_client.cli.text import add_numbers, fitting, percent, printable, section
from kvoffd_proto.messages import BelowStats, DiskStats, StatsReply
from kvoffd_proto.units import UnitError, format_count, format_duration, format_rate, format_size, parse_size

DONE = 0
FAILED = 1
LOOK_S = 0.1
"""How often the daemon is asked how far an attached or detached directory is."""


def disks(where: Where, *, as_json: bool) -> int:
    """Show every directory; 1 where one has failed or hangs."""
    with open_admin(where) as admin:
        reply = admin.stats()
    if as_json:
        emit(to_json({"disks": named(reply.disks), "below": named(reply.below)}))
    else:
        show(make_console(pipe_cells=PIPE_LIST_CELLS), disks_page(reply.disks, reply.below))
    return FAILED if any(disk.state in ("failed", "hanging") for disk in reply.disks) else DONE


def disks_page(found: Sequence[DiskStats], below: BelowStats | None) -> RenderableType:
    """Some lines per directory, what is wrong with it, and what moves."""
    if not found:
        return Text("No disk is attached; start the daemon with --disk DIRECTORY=SIZE, or use kvoffd-cli disk attach.")
    lines = [line for disk in found for line in (_directory(disk), *_problems(disk))]
    return Group(*lines, *([_traffic(below)] if below is not None else []))


def _directory(disk: DiskStats) -> Text:
    """Names and numbers together, since a table of all of it would not fit a terminal of 80 columns."""
    oldest = f", the oldest {_within(disk.oldest_seconds)}" if disk.blocks else ""
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


def _within(seconds: float) -> str:
    """An age that is known to the hour, and may be less."""
    return f"< {format_duration(3600.0 * (seconds // 3600 + 1))}"


def _problems(disk: DiskStats) -> list[Text]:
    found = []
    if disk.problem:
        found.append(Text(printable(disk.problem), style="red"))
    if disk.errors:
        kinds = ", ".join(f"{kind} {format_count(count)}" for kind, count in sorted(disk.errors.items()))
        found.append(Text(f"{disk.directory}: {printable(kinds)}; the daemon's log has the sentences", style="red"))
    if disk.state == "serving" and not disk.direct:
        found.append(Text(f"{disk.directory}: goes through the page cache, since it refuses O_DIRECT", style="dim"))
    return found


def _traffic(below: BelowStats) -> Text:
    budget = "no bound" if below.budget_left_bytes is None else f"{format_size(below.budget_left_bytes)} may be written"
    speed = f", lately {format_rate(below.read_bytes_per_second)}" if below.read_bytes_per_second else ""
    missed = sum(below.failed_promotions.values())
    return Text(
        f"up: {format_count(below.promoted_blocks)} blocks ({format_size(below.promoted_bytes)}){speed}, "
        f"{format_count(below.pending_blocks)} on their way, {format_count(missed)} did not come\n"
        f"down: {format_count(below.written_blocks)} blocks ({format_size(below.written_bytes)}), write mode "
        f"{printable(below.write_mode)}, now {budget}"
    )


def disk_section(now: StatsReply, title_cells: int) -> Table:
    """The lines of the page of ``kvoffd-cli stats``: all directories together."""
    table = section("Disk", title_cells)
    add_numbers(table, ("used", "blocks", "hits", "read", "written", "pending", "errors"))
    asked = sum(namespace.keys_asked for namespace in now.namespaces)
    table.add_row(
        fitting("all"),
        percent(sum(disk.used_bytes for disk in now.disks), sum(disk.size_bytes for disk in now.disks)),
        format_count(sum(disk.blocks for disk in now.disks)),
        percent(sum(namespace.keys_pending for namespace in now.namespaces), asked),
        format_size(sum(disk.read_bytes for disk in now.disks)),
        format_size(sum(disk.written_bytes for disk in now.disks)),
        format_count(now.below.pending_blocks if now.below is not None else 0),
        format_count(sum(sum(disk.errors.values()) for disk in now.disks)),
    )
    return table


def attach(where: Where, text: str) -> int:
    """Attach ``DIRECTORY=SIZE`` and wait until it serves; 1 where it does not."""
    name, equals, size = text.rpartition("=")
    if not equals or not name:
        raise CliError(f"{text!r} is not a directory and a size; write them as in /mnt/nvme0/kvoffd=500GiB.")
    try:
        size_bytes = parse_size(size)
    except UnitError as error:
        raise CliError(f"{text!r} cannot be used: {error}.") from error
    path = _absolute(name)
    with open_admin(where) as admin:
        admin.attach_disk(path, size_bytes)
        disk = _look(admin, path)
        while disk is not None and disk.state == "opening":
            time.sleep(LOOK_S)
            disk = _look(admin, path)
    if disk is None or disk.state == "failed":
        emit(printable(disk.problem) if disk is not None else f"{path} is not attached.")
        return FAILED
    emit(f"{path} serves: {format_size(disk.size_bytes)}, {format_count(disk.blocks)} blocks are there.")
    return DONE


def drain(where: Where, name: str) -> int:
    """Have nothing more written to a directory."""
    path = _absolute(name)
    with open_admin(where) as admin:
        admin.drain_disk(path)
    emit(f"{path} is drained: nothing more is written there, what is there is read.")
    return DONE


def detach(where: Where, name: str) -> int:
    """Give a directory up, and wait until the daemon has closed it."""
    path = _absolute(name)
    with open_admin(where) as admin:
        admin.detach_disk(path)
        while (disk := _look(admin, path)) is not None:
            if disk.state == "hanging":
                emit(f"{path} is given up, but a call to it does not come back; its file stays open until it does.")
                return FAILED
            time.sleep(LOOK_S)
    emit(f"{path} is detached; its blocks stay in its file.")
    return DONE


def _look(admin: Administration, path: str) -> DiskStats | None:
    return next((disk for disk in admin.stats().disks if disk.directory == path), None)


def _absolute(name: str) -> str:
    return os.path.abspath(os.path.expanduser(name))
