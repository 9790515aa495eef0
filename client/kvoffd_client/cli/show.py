"""``kvoffd-cli health``, ``clients`` and ``namespaces``: what there is, and how it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from kvoffd_client.cli.format import (
    NO_NAMESPACE,
    namespace_name,
    print_json,
    print_page,
    print_table,
    say,
    table_of,
)
from kvoffd_client.cli.health import tell_health
from kvoffd_client.cli.target import (
    NAMESPACE_HELP,
    CliError,
    Directory,
    Json,
    Url,
    check_names_one,
    open_admin,
    parse_option,
)
from kvoffd_proto.admin import NamespaceInfo, SessionInfo, SetQuota
from kvoffd_proto.stats import namespace_id
from kvoffd_proto.units import exact_size, format_count, format_size, parse_size, printable


def health(
    live: Annotated[bool, typer.Option("--live", help="Exit status 0 when the daemon answers at all.")] = False,
    ready: Annotated[bool, typer.Option("--ready", help="Exit status 0 when it takes sessions and jobs.")] = False,
    directory: Directory = None,
    url: Url = "",
    json: Json = False,
) -> int:
    """Ask whether the daemon works: ok, degraded or down, and why.

    --live and --ready are for probes: a restart does not mend a daemon that is degraded.

    Exit status: 0 ok, 1 degraded, 2 down or not reachable.
    """
    if live and ready:
        raise CliError("--live and --ready ask for two things; give one of them.")
    check_names_one(directory, url)
    return tell_health(directory, url, live=live, ready=ready, as_json=json)


# --- who is connected ------------------------------------------------------------------------------


def clients(directory: Directory = None, json: Json = False) -> int:
    """List the open sessions, oldest first.

    An engine has one for its scheduler and one for each worker. stored, loaded: copied since it connected. pinned: pool
    memory that its leases keep from being evicted. registered: the engine's own memory, to and from which the daemon
    copies.
    """
    with open_admin(directory) as admin:
        found = [one for one in admin.sessions().sessions if one.session_id != admin.session_id]
    if json:
        print_json({"sessions": found})
    elif found:
        print_page(session_table(found))
    else:
        say("No engine is connected.")
    return 0


def session_table(found: Sequence[SessionInfo]) -> Table:
    return table_of(
        (">id", "client", "<namespace", ">pid", ">stored", ">loaded", ">pinned", ">registered"),
        [
            (
                str(one.session_id),
                printable(one.name) or one.role or "new",
                ", ".join(map(namespace_id, one.namespaces)) or "-",
                str(one.pid or "-"),
                *map(format_size, (one.stored_bytes, one.loaded_bytes, one.pinned_bytes, one.registered_bytes)),
            )
            for one in found
        ],
    )


# --- namespaces ------------------------------------------------------------------------------------

namespaces_app = typer.Typer(rich_markup_mode=None)


@namespaces_app.callback(invoke_without_command=True)
def namespaces(context: typer.Context, directory: Directory = None, json: Json = False) -> int:
    """List and limit namespaces.

    Engines share blocks within a namespace: same model, same settings that matter.
    """
    if context.invoked_subcommand is not None:
        return 0
    with open_admin(directory) as admin:
        found = admin.namespaces().namespaces
    if json:
        print_json({"namespaces": found})
    elif found:
        _show_namespaces(found)
    else:
        say(NO_NAMESPACE)
    return 0


def _show_namespaces(found: Sequence[NamespaceInfo]) -> None:
    limited = any(one.quota_bytes is not None for one in found)
    print_table(
        ("namespace", "<id", ">sessions", ">blocks", ">size", *([">at most"] if limited else []), ">tokens", ">ranks"),
        [
            (
                printable(one.label) or "(no label)",
                namespace_id(one.namespace),
                format_count(one.sessions),
                format_count(one.ready_blocks),
                format_size(one.ready_bytes),
                *(["-" if one.quota_bytes is None else format_size(one.quota_bytes)] if limited else []),
                _block_tokens(one),
                format_count(one.world_size),
            )
            for one in found
        ],
    )
    say("tokens: in a block. ranks: parts of a block, one for each worker of an engine.")


def _block_tokens(info: NamespaceInfo) -> str:
    known = sorted({group.tokens_per_block for group in info.groups if group.tokens_per_block})
    return " to ".join(dict.fromkeys(map(format_count, (known[0], known[-1])))) if known else "-"


@namespaces_app.command()
def quota(
    name: Annotated[str, typer.Argument(metavar="NAME", help=NAMESPACE_HELP)],
    most: Annotated[str, typer.Option("--max", metavar="SIZE", help="Such as 20GiB, or none.")],
    directory: Directory = None,
    json: Json = False,
) -> int:
    """Limit how much of the pool a namespace may have.

    A namespace that has its quota evicts its own blocks. The quota outlives the daemon.

    Exit status: 0 done, 2 an error, 3 done, but a kill may undo it.
    """
    quota_bytes = None if most == "none" else parse_option("--max", most, parse_size)
    with open_admin(directory) as admin:
        known = admin.namespace(name)
        block_bytes = max(map(sum, known.shard_bytes), default=0)
        if quota_bytes is not None and quota_bytes < block_bytes:  # it would evict all that the namespace has
            why = f"{most} is less than a block of {format_size(block_bytes)}; a number alone is bytes"
            raise CliError(f"--max: {why}: write {exact_size(2 * known.ready_bytes or block_bytes)}, for example.")
        admin.ask(SetQuota, known.namespace, quota_bytes)
        now = admin.namespace(name)
        pool_bytes = admin.stats().pool.size_bytes
    if json:
        print_json(now)
        return 0
    words = "no quota" if now.quota_bytes is None else f"at most {format_size(now.quota_bytes)}"
    hint = ""
    if now.quota_bytes is not None and now.quota_bytes >= pool_bytes:
        hint = f" That limits nothing: the whole pool has {format_size(pool_bytes)}."
    elif now.quota_bytes is not None and now.ready_bytes > now.quota_bytes:
        hint = f" It has {format_size(now.ready_bytes)} now; its next stores evict that down to the quota."
    say(f"Namespace {namespace_name(now.label, now.namespace)}: {words}.{hint}")
    return 0
