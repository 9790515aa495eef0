"""``kvoffd-cli blocks``: single blocks, and files of them."""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvoffd_client.cli.format import (
    count_blocks,
    make_console,
    namespace_name,
    print_json,
    print_progress,
    print_status,
    print_table,
    say,
)
from kvoffd_client.cli.target import NAMESPACE_HELP, Directory, Json, local_directory
from kvoffd_proto.units import format_count, format_size, printable

if TYPE_CHECKING:
    # The commands that need them import them: they would make every other command start more slowly.
    from kvoffd_client import BlockClient

Namespace = Annotated[str, typer.Option("--namespace", metavar="NAME", help=NAMESPACE_HELP)]
Group = Annotated[int, typer.Option("--group", metavar="N", min=0, max=65535, help="KV cache group.")]
Prefixes = Annotated[
    list[str] | None,
    typer.Option("--prefix", metavar="HEX", help="Only keys that begin so; may be given several times."),
]

blocks_app = typer.Typer(help="List, export and import single blocks.", rich_markup_mode=None)


@blocks_app.command()
def ls(
    namespace: Namespace,
    group: Group = 0,
    prefix: Prefixes = None,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, max=1_000_000, help="Most blocks to show.")
    ] = 100,
    directory: Directory = None,
    json: Json = False,
) -> int:
    """List blocks, in no order.

    Exit status: 0 done, 1 no key begins with a --prefix, 2 an error.
    """
    with _open(directory) as client:
        fingerprint = client.find_namespace(namespace)
        every = (info for digits in prefix or [""] for info in client.list_blocks(fingerprint, group, digits))
        found = list(islice(every, limit + 1))
    more, found = len(found) > limit, found[:limit]
    if json:
        print_json({"blocks": found, "more": more})
    elif not found:
        begins = f" whose key begins with {' or '.join(map(printable, prefix))}" if prefix else ""
        say(f"There is no block in group {group}{begins}.")
    else:
        digits = max(12, make_console().width - 25)
        rows = [
            (info.key.hex()[:digits], info.state.name.lower(), format_size(info.slot_bytes), format_count(info.pins))
            for info in found
        ]
        print_table(("key", "state", ">size", ">pins"), rows)
        if len(rows[0][0]) < len(found[0].key.hex()):
            say("Keys are cut to fit here, not in a pipe.")
        if more:
            say(f"There are more blocks; --limit {10 * limit} shows more of them.")
    return int(bool(prefix) and not found)


@blocks_app.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of safetensors to write; it must not exist.")],
    namespace: Namespace,
    prefix: Prefixes = None,
    directory: Directory = None,
    json: Json = False,
) -> int:
    """Write the blocks of a namespace into a file.

    The file is safetensors, with all that import needs. Each block is compared with its checksum.
    """
    from kvoffd_client import export_blocks

    with _open(directory) as client:
        done = export_blocks(client, namespace, file, prefix or [], progress=print_progress)
    print_status()
    if json:
        print_json({"file": str(file), **vars(done)})
        return 0
    say(f"{count_blocks(done.blocks)} ({format_size(done.bytes)}) are in {file}.")
    if done.evicted:
        say(f"{count_blocks(done.evicted)} left the pool before they were written.")
    if done.damaged:
        say(f"Left out, since they do not match their checksums: {count_blocks(len(done.damaged))}; run scrub.")
    return 0


@blocks_app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File written by export.")],
    beside: Annotated[
        bool,
        typer.Option("--beside", help="Import although a namespace of that label and another fingerprint is open."),
    ] = False,
    directory: Directory = None,
    json: Json = False,
) -> int:
    """Put the blocks of a file into the pool.

    Opens the blocks' namespace where no engine has done so yet. Blocks that are in the pool are skipped, so that the
    command may be repeated. The eviction policy has no say: a full pool evicts others. A file that is damaged, or of
    an engine whose bytes differ, is refused.

    Exit status: 0 done, 1 some blocks are not in the pool at the end, 2 an error.
    """
    from kvoffd_client import BlockFile, import_blocks

    with _open(directory) as client, BlockFile(file) as source:
        done = import_blocks(client, source, beside=beside, progress=print_progress)
    print_status()
    geometry = source.geometry
    if json:
        print_json({"file": str(file), "namespace": geometry.fingerprint, **vars(done)})
    else:
        name = namespace_name(geometry.label, geometry.fingerprint)
        opened = f" Namespace {name} was opened." if done.created else f" They are of {name}."
        present = f", {format_count(done.present)} were in the pool already" if done.present else ""
        say(f"{count_blocks(done.blocks)} ({format_size(done.bytes)}) were put into the pool{present}.{opened}")
        if done.no_space:
            say(f"{count_blocks(done.no_space)} found no space: the pool, or the quota, is in use.")
        if done.evicted:
            say(f"{count_blocks(done.evicted)} of the file were evicted: the pool is too small for all.")
    return int(done.no_space + done.evicted > 0)


def _open(directory: Path | None) -> BlockClient:
    from kvoffd_client import BlockClient

    # Its engine's sessions log what they survive; the command prints the error that is raised.
    logging.getLogger("kvoffd_client").addHandler(logging.NullHandler())
    return BlockClient(local_directory(directory))
