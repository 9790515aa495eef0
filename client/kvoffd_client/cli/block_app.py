"""The command line of single blocks: ``kvoffd-cli block``, ``export`` and ``import``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvoffd_client.cli.arguments import Action, Directory, Json, near_of
from kvoffd_client.cli.failure import CliError

MIN_LIMIT = 1

Namespace = Annotated[
    str,
    typer.Option("--namespace", metavar="NAME", help="A label, or the first digits (4 or more) of a fingerprint."),
]
Group = Annotated[int, typer.Option("--group", metavar="N", min=0, max=65535, help="KV cache group.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="The block's key in hex, or enough of its first digits.")]
Keys = Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys in hex, or enough of their first digits.")]

block_app = typer.Typer(
    help="Look into single blocks, write and pin them. The daemon's setting block_access must allow it.",
    rich_markup_mode=None,
)


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(block_app, name="block")
    app.command()(export)
    app.command(name="import")(import_)


@block_app.command()
def ls(
    context: typer.Context,
    namespace: Namespace,
    group: Group = 0,
    prefix: Annotated[str, typer.Option("--prefix", metavar="HEX", help="First digits of the keys wanted.")] = "",
    pinned: Annotated[bool, typer.Option("--pinned", help="Only those that operators have pinned.")] = False,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=MIN_LIMIT, help="Blocks to show.")] = 100,
    directory: Directory = None,
    json: Json = False,
) -> Action:
    """List blocks, in the order in which they came."""
    from kvoffd_client.cli import blocks

    return partial(
        blocks.ls, near_of(context, directory), namespace, group, prefix, pinned=pinned, limit=limit, as_json=json
    )


@block_app.command()
def show(
    context: typer.Context,
    key: Key,
    namespace: Namespace,
    group: Group = 0,
    directory: Directory = None,
    json: Json = False,
) -> Action:
    """Show what a block is made of, and what is in it.

    Its shards and layers with dtype, shape and layout, the least, mean and largest value of each, and whether its bytes
    have their checksum.
    """
    from kvoffd_client.cli import blocks

    return partial(blocks.show_block, near_of(context, directory), namespace, group, key, as_json=json)


@block_app.command()
def get(
    context: typer.Context,
    key: Key,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of safetensors to write.")],
    namespace: Namespace,
    group: Group = 0,
    directory: Directory = None,
) -> Action:
    """Write one block into a file of safetensors."""
    from kvoffd_client.cli import blocks

    return partial(blocks.get, near_of(context, directory), namespace, group, key, file)


@block_app.command()
def put(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What block get or export wrote, with one block in it.")],
    namespace: Namespace,
    key: Annotated[
        str, typer.Option("--key", metavar="HEX", help="The whole key to put it under. [default: the block's own]")
    ] = "",
    directory: Directory = None,
) -> Action:
    """Put one block from a file into the pool.

    Exit status: 0 done, 1 a block of that key was there already, 2 an error.
    """
    from kvoffd_client.cli import blocks

    return partial(blocks.put, near_of(context, directory), namespace, file, key)


@block_app.command()
def pin(
    context: typer.Context, keys: Keys, namespace: Namespace, group: Group = 0, directory: Directory = None
) -> Action:
    """Keep blocks in the pool.

    Until they are unpinned, dropped (as by clear), or the daemon ends. Half of the pool may be pinned.
    """
    from kvoffd_client.cli import blocks

    return partial(blocks.pin, near_of(context, directory), namespace, group, keys, pin=True)


@block_app.command()
def unpin(
    context: typer.Context, keys: Keys, namespace: Namespace, group: Group = 0, directory: Directory = None
) -> Action:
    """Let pinned blocks go when their time comes."""
    from kvoffd_client.cli import blocks

    return partial(blocks.pin, near_of(context, directory), namespace, group, keys, pin=False)


def export(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of safetensors to write; it must not exist.")],
    namespace: Namespace,
    prefix: Annotated[
        list[str] | None,
        typer.Option("--prefix", metavar="KEY", help="First digits of the keys wanted; may be given several times."),
    ] = None,
    directory: Directory = None,
    json: Json = False,
) -> Action:
    """Write the blocks of a namespace into a file.

    As safetensors with all that import needs. Blocks are pinned a few at a time while they are written. Killed in the
    middle, the same command goes on where it was.
    """
    from kvoffd_client.cli import blocks

    return partial(blocks.run_export, near_of(context, directory), namespace, file, prefix or [], as_json=json)


def import_(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What export wrote.")],
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", metavar="NAME", help="That the blocks must be of. [default: as the file says]"),
    ] = None,
    beside: Annotated[
        bool, typer.Option("--beside", help="Although a namespace of that label and another fingerprint is open.")
    ] = False,
    show_list: Annotated[bool, typer.Option("--list", help="Show what is inside, and import nothing.")] = False,
    directory: Directory = None,
    json: Json = False,
) -> Action:
    """Put the blocks of a file into the pool.

    Opens their namespace where no engine has done so yet. Blocks that are there already are passed over, so that the
    command may be given again. A file that is damaged, or of an engine whose bytes differ, is refused.

    Exit status: 0 done, 1 some blocks found no room, 2 an error.
    """
    from kvoffd_client.cli import blocks

    if show_list:
        if namespace is not None or beside:
            raise CliError("--list imports nothing; leave --namespace and --beside away.")
        return partial(blocks.list_file, file, as_json=json)
    return partial(blocks.run_import, near_of(context, directory), file, namespace, beside=beside, as_json=json)
