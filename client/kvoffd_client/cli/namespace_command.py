"""``kvoffd-cli namespace set``: how much of the pool a namespace may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer
from msgspec.structs import replace

from kvoffd_client.cli.console import namespace_name, print_line
from kvoffd_client.cli.json_output import print_json
from kvoffd_client.cli.target import NAMESPACE_HELP, CliError, Directory, Json, open_admin, resolve_namespace
from kvoffd_proto.messages import NamespaceInfo, NamespaceLimits
from kvoffd_proto.units import format_size, parse_size

NONE = "none"
ValueT = TypeVar("ValueT")

namespace_app = typer.Typer(help="Say how much of the pool a namespace may have.", rich_markup_mode=None)


@namespace_app.callback()
def namespace() -> None:
    """Say how much of the pool a namespace may have. `kvoffd-cli namespaces` lists them."""


@namespace_app.command(name="set")
def set_(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help=NAMESPACE_HELP)],
    least: Annotated[
        str | None, typer.Option("--min", metavar="SIZE", help="Below that it loses nothing to others.")
    ] = None,
    most: Annotated[
        str | None, typer.Option("--max", metavar="SIZE", help="From there on it takes room from itself alone.")
    ] = None,
    weight: Annotated[
        str | None,
        typer.Option("--weight", metavar="NUMBER", help="Its weight in the sharing of what the minima leave."),
    ] = None,
    directory: Directory = None,
    json: Json = False,
) -> int:
    """Set how much of the pool a namespace may have, from now on, also after restarts of the daemon.

    What is not named stays as it is; `none` takes a limit away. Minima may take three quarters of the pool together.
    As soon as one namespace has a weight all those in use have a share of what the minima leave, with weight 1 where
    none is set: a namespace that has its share takes from itself first, one that has less takes from those that have
    more. Nothing goes before somebody needs room.

    Exit status: 0 done, 2 an error, as where the daemon cannot write them down for the next one.
    """
    if least is most is weight is None:
        raise CliError("Say what to set: --min, --max, --weight, or several of them.")
    with open_admin(context, directory) as admin:
        chosen = resolve_namespace(admin.namespaces().namespaces, name)
        limits = chosen.limits
        if least is not None:
            limits = replace(limits, minimum_bytes=_parsed("--min", least, parse_size) or 0)
        if most is not None:
            limits = replace(limits, maximum_bytes=_parsed("--max", most, parse_size))
        if weight is not None:
            limits = replace(limits, weight=_parsed("--weight", weight, float))
        admin.set_namespace_limits(chosen.namespace, limits)
        found = next((one for one in admin.namespaces().namespaces if one.namespace == chosen.namespace), chosen)
    if json:
        print_json(found.limits)
    else:
        print_line(f"Namespace {namespace_name(found.label, found.namespace)}: {limits_of(found)}.")
    return 0


def limits_of(one: NamespaceInfo) -> str:
    limits, parts = one.limits, []
    if limits == NamespaceLimits():
        return "no limits"
    if limits.minimum_bytes:
        parts.append(f"at least {format_size(limits.minimum_bytes)}")
    if limits.maximum_bytes is not None:
        parts.append(f"at most {format_size(limits.maximum_bytes)}")
    if limits.weight is not None:
        parts.append(f"weight {limits.weight:g}")
    kept = f"; {format_size(one.kept_bytes)} are kept for it now" if limits.minimum_bytes or limits.weight else ""
    return f"{', '.join(parts)}{kept}"


def _parsed(option: str, text: str, parse: Callable[[str], ValueT]) -> ValueT | None:
    if text == NONE:
        return None
    try:
        return parse(text)
    except ValueError as error:
        wanted = "a number" if parse is float else "a size, such as 20GiB,"
        raise CliError(f"{option} {text!r} is not {wanted} nor {NONE!r}.") from error
