"""What ``kvoffd-cli block``, ``export`` and ``import`` do. Each returns the exit status."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from kvoffd_client.blocks import (
    Block,
    BlockClient,
    BlockFile,
    Layer,
    export_blocks,
    import_blocks,
)
from kvoffd_client.blocks.block_transfer import Progress as TellProgress
from kvoffd_client.cli.failure import CliError
from kvoffd_client.cli.json_output import Plain, named, to_json
from kvoffd_client.cli.resolve_namespace import choose_namespace
from kvoffd_client.cli.screen import PIPE_LIST_CELLS, emit, make_console, show
from kvoffd_client.cli.text import GAP, add_numbers, printable, section, short_fingerprint
from kvoffd_client.errors import BlockDamaged
from kvoffd_proto.blocks import BlockInfo
from kvoffd_proto.messages import READY
from kvoffd_proto.units import format_count, format_size

DONE = 0
NOT_ALL = 1


def ls(directory: Path, wanted: str, group: int, prefix: str, *, pinned: bool, limit: int, as_json: bool) -> int:
    """List blocks of one group."""
    with BlockClient(directory) as client:
        namespace = _namespace(client, wanted)
        found = list(islice(client.list_blocks(namespace, group, prefix, pinned=pinned), limit + 1))
    more, found = len(found) > limit, found[:limit]
    if as_json:
        emit(to_json({"blocks": named(found), "more": more}))
        return DONE
    show(make_console(pipe_cells=PIPE_LIST_CELLS), _blocks_table(found))
    if more:
        emit(f"and more; --limit {10 * limit} shows more of them")
    return DONE


def _blocks_table(blocks: Sequence[BlockInfo]) -> Table | Text:
    if not blocks:
        return Text("There is no such block.")
    table = section("key")
    table.add_column("state", no_wrap=True)
    add_numbers(table, ("size", "pins"))
    table.add_column("", no_wrap=True)
    for block in blocks:
        table.add_row(
            Text(block.key.hex(), no_wrap=True),
            "ready" if block.state == READY else "writing",
            format_size(block.slot_bytes),
            format_count(block.pins),
            "pinned by an operator" if block.pinned else "",
        )
    return table


def show_block(directory: Path, wanted: str, group: int, digits: str, *, as_json: bool) -> int:
    """Show one block; 1 where its bytes do not have their checksum."""
    with BlockClient(directory) as client:
        namespace = _namespace(client, wanted)
        (key,) = _keys(client, namespace, group, [digits])
        with client.get_block(namespace, key, group, verify=False) as block:
            try:
                block.verify()
                sound = True
            except BlockDamaged:
                sound = False
            if as_json:
                emit(to_json(_block_object(block, sound)))
            else:
                _print_block(block, sound)
    return DONE if sound else NOT_ALL


def _block_object(block: Block, sound: bool) -> dict[str, Plain]:
    shards: list[Plain] = [
        {
            "rank": shard.rank,
            "bytes": int(shard.data.nbytes),
            "checksum": f"{shard.checksum:016x}",
            "layers": [
                {"name": layer.name, "dtype": layer.dtype, "shape": list(layer.shape), "layout": layer.layout}
                for layer in shard.layers
            ],
        }
        for shard in block.shards
    ]
    return {
        "namespace": block.geometry.fingerprint.hex(),
        "group": block.group,
        "key": block.key.hex(),
        "first_block": block.first_block,
        "sound": sound,
        "shards": shards,
    }


def _print_block(block: Block, sound: bool) -> None:
    geometry = block.geometry
    kind = geometry.groups[block.group].kind
    size = sum(shard.data.nbytes for shard in block.shards)
    emit(f"block {block.key.hex()}")
    emit(f"of {printable(geometry.label)} ({short_fingerprint(geometry.fingerprint)}), group {block.group} ({kind})")
    checksums = "the bytes have their checksums" if sound else "THE BYTES DO NOT HAVE THEIR CHECKSUMS"
    count = f"{len(block.shards)} shard{'' if len(block.shards) == 1 else 's'}"
    emit(f"{format_size(size)} in {count}; {checksums}\n")
    table = Table(box=None, padding=GAP, pad_edge=False, header_style="bold")
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
                *_spread(layer),
            )
    show(make_console(pipe_cells=PIPE_LIST_CELLS), table)


def _spread(layer: Layer) -> tuple[str, str, str]:
    """Least, mean and largest value; dashes for dtypes that only torch can read."""
    values = layer.array
    if layer.dtype == "bfloat16":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    elif layer.dtype != str(values.dtype):
        return "-", "-", "-"
    with np.errstate(invalid="ignore", over="ignore"):
        found = values.min(), values.mean(dtype=np.float64), values.max()
    return f"{found[0]:.4g}", f"{found[1]:.4g}", f"{found[2]:.4g}"


def get(directory: Path, wanted: str, group: int, digits: str, file: Path) -> int:
    """Write one block into a file."""
    with BlockClient(directory) as client:
        namespace = _namespace(client, wanted)
        (key,) = _keys(client, namespace, group, [digits])
        done = export_blocks(client, namespace, file, keys=[(group, key)])
        if not done.blocks:
            file.unlink()
            raise CliError(f"Block {key.hex()} is damaged, or went while it was written; the file was removed.")
    emit(f"Block {key.hex()} ({format_size(done.nbytes)}) is in {file}.")
    return DONE


def put(directory: Path, wanted: str, file: Path, digits: str) -> int:
    """Put the one block of a file into the pool; 1 where one of that key is there."""
    with BlockFile(file) as source, BlockClient(directory) as client:
        namespace = _namespace(client, wanted)
        if len(source.entries) != 1:
            raise CliError(f"{file} holds {len(source.entries)} blocks, not one; `kvoffd-cli import` puts all of them.")
        if why := client.geometry(namespace).mismatch(source.geometry):
            raise CliError(f"The block of {file} does not fit the namespace: {why}.")
        key = _whole_key(digits, source.geometry.key_bytes) if digits else source.entries[0].key
        stored = client.put_block(namespace, key, source.block(0))
    emit(f"Block {key.hex()} {'is in the pool' if stored else 'was in the pool already; nothing was changed'}.")
    return DONE if stored else NOT_ALL


def pin(directory: Path, wanted: str, group: int, digits: Sequence[str], *, pin: bool) -> int:
    """Pin blocks, or unpin them."""
    with BlockClient(directory) as client:
        namespace = _namespace(client, wanted)
        keys = _keys(client, namespace, group, digits)
        count = client.pin(namespace, keys, group) if pin else client.unpin(namespace, keys, group)
    said = f"{format_count(count)} block{'' if count == 1 else 's'} {'was' if count == 1 else 'were'}"
    rest = len(keys) - count
    before = f"; {format_count(rest)} {'was' if rest == 1 else 'were'} before" if rest else ""
    emit(f"{said} {'pinned' if pin else 'unpinned'}{before}.")
    return DONE


def run_export(directory: Path, wanted: str, file: Path, prefixes: Sequence[str], *, as_json: bool) -> int:
    """Write blocks into a file, with a progress bar on a terminal's stderr."""
    with BlockClient(directory) as client, _progress(f"exporting to {file.name}") as tell:
        namespace = _namespace(client, wanted)
        done = export_blocks(client, namespace, file, prefixes, progress=tell)
    if as_json:
        emit(
            to_json(
                {
                    "file": str(file),
                    "blocks": done.blocks,
                    "bytes": done.nbytes,
                    "resumed": done.resumed,
                    "evicted": done.evicted,
                    "damaged": [key.hex() for key in done.damaged],
                    "late": done.late,
                }
            )
        )
        return DONE
    resumed = f", {format_count(done.resumed)} of them from an earlier attempt" if done.resumed else ""
    emit(f"{format_count(done.blocks)} blocks ({format_size(done.nbytes)}) are in {file}{resumed}.")
    if done.evicted:
        emit(f"{format_count(done.evicted)} blocks went out of the pool before their turn.")
    if done.damaged:
        emit(f"{format_count(len(done.damaged))} blocks do not have their checksums and were left out; run scrub.")
    if done.late:
        emit(f"{format_count(done.late)} blocks came too late for this file; export them into another one.")
    return DONE


def run_import(directory: Path, file: Path, wanted: str | None, *, beside: bool, as_json: bool) -> int:
    """Put the blocks of a file into the pool; 1 where some found no room."""
    with BlockFile(file) as source, BlockClient(directory) as client:
        namespace = None if wanted is None else _namespace(client, wanted)
        with _progress(f"importing {file.name}") as tell:
            done = import_blocks(client, source, namespace, beside=beside, progress=tell)
    if as_json:
        emit(
            to_json(
                {
                    "file": str(file),
                    "namespace": source.geometry.fingerprint.hex(),
                    "created": done.created,
                    "blocks": done.blocks,
                    "bytes": done.nbytes,
                    "present": done.present,
                    "no_room": done.no_room,
                }
            )
        )
    else:
        label = f"{printable(source.geometry.label)} ({short_fingerprint(source.geometry.fingerprint)})"
        opened = f" Namespace {label} was opened." if done.created else f" They are of {label}."
        present = f", {format_count(done.present)} were there already" if done.present else ""
        emit(
            f"{format_count(done.blocks)} blocks ({format_size(done.nbytes)}) were put into the pool{present}.{opened}"
        )
        if done.no_room:
            emit(f"{format_count(done.no_room)} blocks found no room: what is in the pool is pinned or being written.")
    return NOT_ALL if done.no_room else DONE


def list_file(file: Path, *, as_json: bool) -> int:
    """Show what a file holds."""
    with BlockFile(file) as source:
        geometry, entries = source.geometry, source.entries
    counts = [sum(entry.group == group for entry in entries) for group in range(len(geometry.groups))]
    if as_json:
        emit(
            to_json(
                {
                    "file": str(file),
                    "namespace": geometry.fingerprint.hex(),
                    "label": geometry.label,
                    "world_size": geometry.world_size,
                    "description": geometry.description,
                    "bytes": source.data_bytes,
                    "blocks": [{"group": entry.group, "key": entry.key.hex()} for entry in entries],
                }
            )
        )
        return DONE
    emit(f"{format_count(len(entries))} blocks ({format_size(source.data_bytes)})")
    emit(f"of {printable(geometry.label)}, fingerprint {geometry.fingerprint.hex()}")
    emit(f"{geometry.world_size} rank{'' if geometry.world_size == 1 else 's'}, keys of {geometry.key_bytes} bytes\n")
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
    show(make_console(pipe_cells=PIPE_LIST_CELLS), table)
    return DONE


# --- what they share -------------------------------------------------------------------------------


def _namespace(client: BlockClient, wanted: str) -> bytes:
    return choose_namespace(client.namespaces().namespaces, wanted).namespace


def _keys(client: BlockClient, namespace: bytes, group: int, given: Sequence[str]) -> list[bytes]:
    """Whole keys from their first digits. Raises CliError where none or several blocks are meant."""
    keys: list[bytes] = []
    for digits in given:
        found = [info.key for info in islice(client.list_blocks(namespace, group, digits.lower()), 3)]
        if len(found) != 1:
            begins = "Several keys begin" if found else "No key begins"
            raise CliError(f"{begins} with {printable(digits)!r} in group {group}; `kvoffd-cli block ls` lists them.")
        keys += found
    return keys


def _whole_key(digits: str, key_bytes: int) -> bytes:
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if len(key) != key_bytes:
        raise CliError(f"--key {printable(digits)} is no whole key; give {2 * key_bytes} hex digits.")
    return key


@contextmanager
def _progress(what: str) -> Iterator[TellProgress]:
    """A progress bar on stderr; silence where that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
