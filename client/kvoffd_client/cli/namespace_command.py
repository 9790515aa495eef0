"""``kvoffd-cli namespace set``: how much of the pool a namespace may have."""

from __future__ import annotations

from typing import Annotated

import typer

from kvoffd_client.cli.console import namespace_name, print_line
from kvoffd_client.cli.json_output import print_json
from kvoffd_client.cli.target import NAMESPACE_HELP, CliError, Directory, Json, open_admin, resolve_namespace
from kvoffd_proto.units import format_size, parse_size

NONE = "none"

namespace_app = typer.Typer(help="Say how much of the pool a namespace may have.", rich_markup_mode=None)


@namespace_app.callback()
def namespace() -> None:
    """Say how much of the pool a namespace may have. `kvoffd-cli namespaces` lists them."""


@namespace_app.command(name="set")
def set_(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help=NAMESPACE_HELP)],
    most: Annotated[
        str, typer.Option("--max", metavar="SIZE", help="The most that it may have of the pool, or `none`.")
    ],
    directory: Directory = None,
    json: Json = False,
) -> int:
    """Set the most that a namespace may have of the pool: its quota, from now on, also after restarts of the daemon.

    A namespace that has its quota takes from itself. One that has more already loses blocks with its next stores.

    Exit status: 0 done, 2 an error, as where the daemon cannot write the quota down for the next one.
    """
    quota_bytes = _parsed(most)
    with open_admin(context, directory) as admin:
        chosen = resolve_namespace(admin.namespaces().namespaces, name)
        admin.set_quota(chosen.namespace, quota_bytes)
        found = next((one for one in admin.namespaces().namespaces if one.namespace == chosen.namespace), chosen)
    if json:
        print_json(found)
    else:
        quota = "no quota" if found.quota_bytes is None else f"at most {format_size(found.quota_bytes)}"
        print_line(f"Namespace {namespace_name(found.label, found.namespace)}: {quota}.")
    return 0


def _parsed(text: str) -> int | None:
    if text == NONE:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise CliError(f"--max {text!r} is not a size, such as 20GiB, nor {NONE!r}.") from error
