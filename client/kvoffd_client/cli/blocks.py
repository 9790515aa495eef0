"""``kvoffd-cli blocks``: single blocks."""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvoffd_client.cli.format import (
    make_console,
    namespace_name,
    print_json,
    print_line,
    print_table,
    say,
)
from kvoffd_client.cli.target import NAMESPACE_HELP, CliError, Directory, Json, local_directory
from kvoffd_proto.units import format_count, format_size, plural, printable

if TYPE_CHECKING:
    # Slow to import.
    from kvoffd_client import Block, BlockClient, Layer

Namespace = Annotated[str, typer.Option("--namespace", metavar="NAME", help=NAMESPACE_HELP)]
Group = Annotated[int, typer.Option("--group", metavar="N", min=0, max=65535, help="KV cache group.")]
Prefixes = Annotated[
    list[str] | None,
    typer.Option("--prefix", metavar="HEX", help="Only keys with this prefix; may be repeated."),
]

MOST_LISTED = 1_000_000

blocks_app = typer.Typer(help="Show single blocks.", rich_markup_mode=None)


@blocks_app.command()
def ls(
    namespace: Namespace,
    group: Group = 0,
    prefix: Prefixes = None,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, max=MOST_LISTED, help="Most blocks to show.")
    ] = 100,
    directory: Directory = None,
    json: Json = False,
) -> int:
    """List blocks, in no order.

    Exit status: 0 done, 1 no key has a --prefix, 2 an error.
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
            say("Keys are cut, but not in a pipe; `blocks show` accepts their first digits.")
        if more:
            wider = f"--limit {min(10 * limit, MOST_LISTED)}" if limit < MOST_LISTED else "--prefix"
            say(f"There are more blocks; {wider} shows more of them.")
    return int(bool(prefix) and not found)


@blocks_app.command()
def show(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The block's key in hex, or enough of its first digits.")],
    namespace: Namespace,
    group: Group = 0,
    directory: Directory = None,
    json: Json = False,
) -> int:
    """Show dtype, shape, layout and range of values of a block's layers.

    Bytes that do not match their checksum are an error.
    """
    from kvoffd_client import checksum_of

    with _open(directory) as client:
        fingerprint = client.find_namespace(namespace)
        found = [info.key for info in islice(client.list_blocks(fingerprint, group, key.lower()), 2)]
        if len(found) != 1:
            begins = "Several keys begin" if found else "No key in the pool begins"
            raise CliError(f"{begins} with {printable(key)!r} in group {group}; `kvoffd-cli blocks ls` lists them.")
        block = client.get_block(fingerprint, found[0], group)
    if json:
        shards = [
            {
                "rank": shard.rank,
                "bytes": int(shard.data.nbytes),
                "checksum": None if block.first_block else f"{checksum_of(shard.data):016x}",
                "layers": [
                    {"name": one.name, "dtype": one.dtype, "shape": list(one.shape), "layout": one.layout}
                    for one in shard.layers
                ],
            }
            for shard in block.shards
        ]
        facts = {"namespace": fingerprint, "group": group, "key": block.key, "first_block": block.first_block}
        print_json({**facts, "sound": None if block.first_block else True, "shards": shards})
    else:
        _print_block(block)
    return 0


def _print_block(block: Block) -> None:
    geometry = block.geometry
    print_line(f"block {block.key.hex()}")
    kind = printable(geometry.groups[block.group].kind)
    say(f"of {namespace_name(geometry.label, geometry.fingerprint)}, group {block.group} ({kind})")
    size, count = format_size(sum(shard.data.nbytes for shard in block.shards)), len(block.shards)
    sound = "" if block.first_block else "; the bytes match their checksums"  # the checksums cover the hole
    say(f"{size} in {count} shard{plural(count)}{sound}", "")
    rows = [
        (
            str(shard.rank),
            printable(layer.name or str(number)),
            layer.dtype,
            " x ".join(map(str, layer.shape)),
            printable(layer.layout or "-"),
            *_value_range(layer),
        )
        for shard in block.shards
        for number, layer in enumerate(shard.layers)
    ]
    print_table((">rank", "layer", "dtype", "shape", "layout", ">min", ">mean", ">max"), rows)


def _value_range(layer: Layer) -> tuple[str, str, str]:
    """Return minimum, mean and maximum; dashes for dtypes that only torch can read."""
    import numpy as np

    values = layer.array
    if layer.dtype == "bfloat16":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    elif layer.dtype != str(values.dtype):
        return "-", "-", "-"
    with np.errstate(invalid="ignore", over="ignore"):
        return f"{values.min():.4g}", f"{values.mean(dtype=np.float64):.4g}", f"{values.max():.4g}"


def _open(directory: Path | None) -> BlockClient:
    from kvoffd_client import BlockClient

    # The sessions log errors, which the command prints anyway.
    logging.getLogger("kvoffd_client").addHandler(logging.NullHandler())
    return BlockClient(local_directory(directory))
