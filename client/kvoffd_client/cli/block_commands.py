"""``kvoffd-cli block``, ``export`` and ``import``: single blocks, and files of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from kvoffd_client.cli.console import (
    Column,
    Listing,
    add_numbers,
    namespace_name,
    plain_table,
    print_line,
    print_list,
    progress_bar,
    section,
)
from kvoffd_client.cli.json_objects import (
    BlockLayer,
    BlockParts,
    Blocks,
    BlockShard,
    ExportDone,
    FileBlock,
    FileContent,
    ImportDone,
)
from kvoffd_client.cli.json_output import print_json, print_listing
from kvoffd_client.cli.target import NAMESPACE_OPTION, CliError, Directory, Json, local_directory, resolve_namespace
from kvoffd_proto.admin import BlockInfo, KeyWorth
from kvoffd_proto.units import format_count, format_size, plural, printable

if TYPE_CHECKING:
    # The commands that need them import them: they would make every other command start more slowly.
    from kvoffd_client import Block, BlockClient, BlockFile, Layer


Namespace = Annotated[str, NAMESPACE_OPTION]
Group = Annotated[int, typer.Option("--group", metavar="N", min=0, max=65535, help="KV cache group.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="The block's key in hex, or enough of its first digits.")]

block_app = typer.Typer(help="Show and write single blocks.", rich_markup_mode=None)


@block_app.command()
def ls(
    context: typer.Context,
    namespace: Namespace,
    group: Group = 0,
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="HEX", help="Only keys that begin with these digits.")
    ] = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Most blocks to show.")] = 100,
    directory: Directory = None,
    json: Json = False,
) -> int:
    """List blocks, in no order."""
    with _open_client(context, directory) as client:
        fingerprint = _fingerprint(client, namespace)
        found = list(islice(client.list_blocks(fingerprint, group, prefix), limit + 1))
    more, found = len(found) > limit, found[:limit]
    print_listing(Blocks(found, more), _blocks_table(found), as_json=json)
    if more and not json:
        print_line(f"There are more blocks; --limit {10 * limit} shows more of them.")
    return 0


def _blocks_table(blocks: Sequence[BlockInfo]) -> Listing | Text:
    if not blocks:
        return Text("There is no such block.")
    return Listing(
        [
            Column("key", [block.key.hex() for block in blocks], 0, 32),
            Column("state", [block.state.name.lower() for block in blocks]),
            Column("size", [format_size(block.slot_bytes) for block in blocks], right=True),
            Column("pins", [format_count(block.pins) for block in blocks], right=True),
        ]
    )


@block_app.command()
def show(
    context: typer.Context,
    key: Key,
    namespace: Namespace,
    group: Group = 0,
    directory: Directory = None,
    json: Json = False,
) -> int:
    """Show the parts of a block and what is in them.

    Lists the block's shards and layers with dtype, shape and layout, the least, mean and largest value of each, and
    whether the bytes match their checksum; with a policy that learns, why the block is kept, and what would go before.
    """
    with _open_client(context, directory) as client:
        fingerprint = _fingerprint(client, namespace)
        whole_key = _whole_key(client, fingerprint, group, key)
        block = client.get_block(fingerprint, whole_key, group, verify=False)
        worth = client.describe_policy(fingerprint, group, whole_key).key
    sound = block.damaged_rank is None
    if json:
        print_json(_block_object(block, sound, worth))
    else:
        _print_block(block, sound)
        if worth is not None:
            print_line(f"\n{_key_sentence(worth)}")
    return int(not sound)


def _key_sentence(key: KeyWorth) -> str:
    """Why a block is kept, and what would go before it."""
    turn = f", the last one turn {key.turn} of its conversation" if key.turn else ""
    requests = f"{format_count(key.requests)} request{plural(key.requests)}"
    return (
        f"kept as: {key.kind}; asked for by {requests}{turn}, {key.age:.2f} pool lifetimes ago; "
        f"{key.worth:.3f} hits to be expected in a lifetime; {format_size(key.bytes_before)} would go before it"
    )


def _block_object(block: Block, sound: bool, worth: KeyWorth | None) -> BlockParts:
    shards = []
    for shard in block.shards:
        layers = [BlockLayer(layer.name, layer.dtype, list(layer.shape), layer.layout) for layer in shard.layers]
        shards.append(BlockShard(shard.rank, int(shard.data.nbytes), f"{shard.checksum:016x}", layers))
    return BlockParts(block.geometry.fingerprint, block.group, block.key, block.first_block, sound, shards, worth)


def _print_block(block: Block, sound: bool) -> None:
    geometry = block.geometry
    kind = geometry.groups[block.group].kind
    size = sum(shard.data.nbytes for shard in block.shards)
    print_line(f"block {block.key.hex()}")
    print_line(f"of {namespace_name(geometry.label, geometry.fingerprint)}, group {block.group} ({kind})")
    checksums = "the bytes match their checksums" if sound else "THE BYTES DO NOT HAVE THEIR CHECKSUMS"
    count = f"{len(block.shards)} shard{plural(len(block.shards))}"
    print_line(f"{format_size(size)} in {count}; {checksums}\n")
    table = plain_table()
    table.add_column("rank", justify="right", no_wrap=True)
    for title in ("layer", "dtype", "shape", "layout"):
        table.add_column(title, no_wrap=True)
    for title in ("min", "mean", "max"):
        table.add_column(title, justify="right", no_wrap=True)
    for shard in block.shards:
        for number, layer in enumerate(shard.layers):
            table.add_row(
                str(shard.rank),
                Text(printable(layer.name or str(number))),
                layer.dtype,
                " x ".join(map(str, layer.shape)),
                printable(layer.layout or "-"),
                *_value_range(layer),
            )
    print_list(table)


def _value_range(layer: Layer) -> tuple[str, str, str]:
    """Return the least, mean and largest value; dashes for dtypes that only torch can read."""
    import numpy as np

    values = layer.array
    if layer.dtype == "bfloat16":  # The upper half of a float32.
        values = (values.astype(np.uint32) << 16).view(np.float32)
    elif layer.dtype != str(values.dtype):
        return "-", "-", "-"
    with np.errstate(invalid="ignore", over="ignore"):
        found = values.min(), values.mean(dtype=np.float64), values.max()
    return f"{found[0]:.4g}", f"{found[1]:.4g}", f"{found[2]:.4g}"


@block_app.command()
def get(
    context: typer.Context,
    key: Key,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of safetensors to write.")],
    namespace: Namespace,
    group: Group = 0,
    directory: Directory = None,
) -> int:
    """Write one block into a file of safetensors."""
    from kvoffd_client import export_blocks

    with _open_client(context, directory) as client:
        fingerprint = _fingerprint(client, namespace)
        whole_key = _whole_key(client, fingerprint, group, key)
        done = export_blocks(client, fingerprint, file, keys=[(group, whole_key)])
        if not done.blocks:
            file.unlink()
            raise CliError(
                f"Block {whole_key.hex()} is damaged, or left the pool while it was written; the file was removed."
            )
    print_line(f"Block {whole_key.hex()} ({format_size(done.nbytes)}) is in {file}.")
    return 0


@block_app.command()
def put(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File with one block, written by block get or export.")],
    namespace: Namespace,
    key: Annotated[
        str, typer.Option("--key", metavar="HEX", help="The whole key for the block. [default: the block's own]")
    ] = "",
    directory: Directory = None,
) -> int:
    """Put one block from a file into the pool.

    Exit status: 0 done, 1 a block of that key was in the pool already, 2 an error.
    """
    from kvoffd_client import BlockFile

    with _open_client(context, directory) as client, BlockFile(file) as source:
        fingerprint = _fingerprint(client, namespace)
        if len(source.entries) != 1:
            raise CliError(f"{file} holds {len(source.entries)} blocks, not one; `kvoffd-cli import` puts all of them.")
        if why := client.geometry(fingerprint).mismatch(source.geometry):
            raise CliError(f"The block of {file} does not fit the namespace: {why}.")
        whole_key = _parse_key(key, source.geometry.key_bytes) if key else source.entries[0].key
        stored = client.put_block(fingerprint, whole_key, source.read(0))
    outcome = "is in the pool" if stored else "was in the pool already; nothing was changed"
    print_line(f"Block {whole_key.hex()} {outcome}.")
    return int(not stored)


def export(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of safetensors to write; it must not exist.")],
    namespace: Namespace,
    prefix: Annotated[
        list[str] | None,
        typer.Option(
            "--prefix", metavar="KEY", help="Only keys that begin with these digits; may be given several times."
        ),
    ] = None,
    directory: Directory = None,
    json: Json = False,
) -> int:
    """Write the blocks of a namespace into a file.

    The file is safetensors, with all that import needs. Each block is compared with its checksum. The same command
    resumes an export that was killed.
    """
    from kvoffd_client import export_blocks

    with _open_client(context, directory) as client, progress_bar(f"exporting to {file.name}") as progress:
        done = export_blocks(client, _fingerprint(client, namespace), file, prefix or [], progress=progress)
    if json:
        print_json(ExportDone(str(file), done.blocks, done.nbytes, done.resumed, done.evicted, done.damaged, done.late))
        return 0
    resumed = f", {format_count(done.resumed)} of them from an earlier attempt" if done.resumed else ""
    print_line(f"{format_count(done.blocks)} blocks ({format_size(done.nbytes)}) are in {file}{resumed}.")
    if done.evicted:
        print_line(f"{format_count(done.evicted)} blocks left the pool before they were written.")
    if done.damaged:
        print_line(
            f"{format_count(len(done.damaged))} blocks do not match their checksums and were left out; run scrub."
        )
    if done.late:
        print_line(
            f"{format_count(done.late)} blocks were stored too late for this file; export them into another one."
        )
    return 0


def import_(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File written by export.")],
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", metavar="NAME", help="Namespace that the blocks must be of. [default: as the file says]"
        ),
    ] = None,
    beside: Annotated[
        bool,
        typer.Option("--beside", help="Import although a namespace of that label and another fingerprint is open."),
    ] = False,
    show_list: Annotated[bool, typer.Option("--list", help="Show what is in the file, and import nothing.")] = False,
    directory: Directory = None,
    json: Json = False,
) -> int:
    """Put the blocks of a file into the pool.

    Opens the blocks' namespace where no engine has done so yet. Blocks that are in the pool already are skipped, so
    that the command may be repeated. A file that is damaged, or of an engine whose bytes differ, is refused.

    Exit status: 0 done, 1 some blocks found no room or were declined by the eviction policy, 2 an error.
    """
    from kvoffd_client import BlockFile, import_blocks

    if show_list:
        if namespace is not None or beside:
            raise CliError("--list imports nothing; leave --namespace and --beside away.")
        with BlockFile(file) as source:
            _print_file(file, source, as_json=json)
        return 0
    with _open_client(context, directory) as client, BlockFile(file) as source:
        fingerprint = None if namespace is None else _fingerprint(client, namespace)
        with progress_bar(f"importing {file.name}") as progress:
            done = import_blocks(client, source, fingerprint, beside=beside, progress=progress)
    if json:
        namespace_of = source.geometry.fingerprint
        print_json(
            ImportDone(
                str(file),
                namespace_of,
                done.created,
                done.blocks,
                done.nbytes,
                done.present,
                done.declined,
                done.no_room,
            )
        )
    else:
        label = namespace_name(source.geometry.label, source.geometry.fingerprint)
        opened = f" Namespace {label} was opened." if done.created else f" They are of {label}."
        present = f", {format_count(done.present)} were in the pool already" if done.present else ""
        print_line(
            f"{format_count(done.blocks)} blocks ({format_size(done.nbytes)}) were put into the pool{present}.{opened}"
        )
        if done.no_room:
            print_line(f"{format_count(done.no_room)} blocks found no room: the whole pool is pinned or being written.")
        if done.declined:
            print_line(f"{format_count(done.declined)} blocks were declined: the eviction policy keeps others.")
    return int(done.no_room + done.declined > 0)


def _print_file(file: Path, source: BlockFile, *, as_json: bool) -> None:
    geometry, entries = source.geometry, source.entries
    counts = [sum(entry.group == group for entry in entries) for group in range(len(geometry.groups))]
    if as_json:
        print_json(
            FileContent(
                str(file),
                geometry.fingerprint,
                geometry.label,
                geometry.world_size,
                geometry.description,
                source.data_bytes,
                [FileBlock(entry.group, entry.key) for entry in entries],
            )
        )
        return
    print_line(f"{format_count(len(entries))} blocks ({format_size(source.data_bytes)})")
    print_line(f"of {printable(geometry.label)}, fingerprint {geometry.fingerprint.hex()}")
    print_line(f"{geometry.world_size} rank{plural(geometry.world_size)}, keys of {geometry.key_bytes} bytes\n")
    table = section("group")
    table.add_column("kind", no_wrap=True)
    add_numbers(table, ("blocks", "block size", "layers"))
    for group, spec in enumerate(geometry.groups):
        layers = [len(shards[group].pages) for shards in geometry.shards]
        table.add_row(
            str(group),
            printable(spec.kind),
            format_count(counts[group]),
            format_size(geometry.block_bytes(group)),
            format_count(max(layers)),
        )
    print_list(table)


def _open_client(context: typer.Context, directory: Path | None) -> BlockClient:
    from kvoffd_client import BlockClient

    # Its engine's sessions log what they survive; the command prints the error that is raised.
    logging.getLogger("kvoffd_client").addHandler(logging.NullHandler())
    return BlockClient(local_directory(context, directory))


def _fingerprint(client: BlockClient, namespace: str) -> bytes:
    return resolve_namespace(client.namespaces().namespaces, namespace).namespace


def _whole_key(client: BlockClient, namespace: bytes, group: int, digits: str) -> bytes:
    """Return the key that begins with the digits. Raises CliError where they fit no block, or several."""
    found = [info.key for info in islice(client.list_blocks(namespace, group, digits.lower()), 3)]
    if len(found) != 1:
        begins = "Several keys begin" if found else "No key begins"
        raise CliError(f"{begins} with {printable(digits)!r} in group {group}; `kvoffd-cli block ls` lists them.")
    return found[0]


def _parse_key(digits: str, key_bytes: int) -> bytes:
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if len(key) != key_bytes:
        raise CliError(f"--key {printable(digits)} is not a whole key; give {2 * key_bytes} hex digits.")
    return key
