"""``kvoffd-cli health``, ``clients`` and ``namespaces``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.table import Table

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.cli.format import (
    NO_NAMESPACE,
    WIDE_CELLS,
    engine_lines,
    make_console,
    print_json,
    print_page,
    print_table,
    say,
    table_of,
)
from kvoffd_client.cli.health import tell_health
from kvoffd_client.cli.reuse import reuse
from kvoffd_client.cli.target import (
    NAMESPACE_HELP,
    CliError,
    Directory,
    Json,
    PlainJson,
    Url,
    check_one_daemon,
    open_admin,
    parse_option,
)
from kvoffd_proto.admin import FindBlock, ListPrompts, LoggedPrompt, NamespaceInfo, SessionInfo, SetQuota
from kvoffd_proto.engines import Engine, engines_of
from kvoffd_proto.messages import MAX_REQUEST_CHARACTERS, Role
from kvoffd_proto.namespace_differences import differences, explain, how_they_differ
from kvoffd_proto.prompts import request_sentence
from kvoffd_proto.stats import engine_name, namespace_id, namespace_name
from kvoffd_proto.units import exact_size, format_count, format_duration, format_size, parse_size, plural, printable


def health(
    live: Annotated[bool, typer.Option("--live", help="Exit status 0 if the daemon answers or is starting.")] = False,
    ready: Annotated[bool, typer.Option("--ready", help="Exit status 0 if it accepts sessions and jobs.")] = False,
    directory: Directory = None,
    url: Url = "",
    json: PlainJson = False,
) -> int:
    """Show the daemon's health: ok, degraded or down, and why.

    --live and --ready are for probes: a restart does not fix a degraded daemon.

    Exit status: 0 ok, 1 degraded, 2 down or not reachable.
    """
    if live and ready:
        raise CliError("--live and --ready exclude each other; give one of them.")
    check_one_daemon(directory, url)
    return tell_health(directory, url, live=live, ready=ready, as_json=json)


# --- who is connected ------------------------------------------------------------------------------


def clients(
    request: Annotated[str, typer.Argument(metavar="ID", help="With --requests: part of a request's id.")] = "",
    every: Annotated[bool, typer.Option("--all", help="Show each session; with --requests, each request.")] = False,
    requests: Annotated[
        bool, typer.Option("--requests", help="Show last requests, and why each hit or missed.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="With --requests: each as it comes.")] = False,
    directory: Directory = None,
    json: Json = False,
) -> int:
    """List the connected engines, oldest first.

    stored, loaded: bytes since it connected. pinned: pool memory under its leases.

    Exit status: 0; 1 if no request's id has ID; 2 an error.
    """
    if (request or follow) and not requests:
        what = "--follow prints requests" if follow else f"{request!r} looks like a request's id"
        raise CliError(f"{what}; add --requests.")
    if follow:
        _follow_requests(directory, request, as_json=json)
    if requests:
        return _show_requests(directory, request, every=every, as_json=json)
    with open_admin(directory) as admin:
        found = [one for one in admin.sessions().sessions if one.session_id != admin.session_id]
        rows = engines_of(found, labels_of(admin))
    if json:
        print_json({"sessions": found} if every else {"engines": list(map(vars, rows))})
    elif every:
        _show_sessions(found)
    elif rows:
        print_page(engine_table(rows, make_console().width))
        if without := sum(not row.workers for row in rows):
            say(
                f"{format_count(without)} without workers: the engine starts or sleeps, or its workers cannot connect "
                "here; their log says why."
            )
        for row in rows:
            if row.problem:
                say(f"{printable(row.name) or 'An engine'} stores and loads nothing: {printable(row.problem)}")
    else:
        say("No engine is connected.")
    return 0


def labels_of(admin: AdminClient) -> dict[bytes, str]:
    return {one.namespace: one.label for one in admin.namespaces().namespaces}


def engine_table(rows: Sequence[Engine], width: int) -> Table:
    """Return a table of engines, on a wide screen with the labels of their namespaces."""
    wide = width >= WIDE_CELLS
    return table_of(
        ("engine", "<namespace", ">last heard", ">stored", ">loaded", ">pinned"),
        [
            (
                f"{printable(row.name) or '-'}\n{_processes(row)}",
                ", ".join(map(namespace_name, row.labels if wide else [""] * len(row.labels), row.namespaces)) or "-",
                f"{format_duration(row.idle_seconds)} ago",
                *map(format_size, (row.stored_bytes, row.loaded_bytes, row.pinned_bytes)),
            )
            for row in rows
        ],
        gap=1,
    )


def _processes(row: Engine) -> str:
    """Return an engine's workers and pids by role; without pids its versions and host."""
    workers = f"{format_count(row.workers)} worker{plural(row.workers)}"
    if not row.pids:
        return ", ".join(filter(None, (workers, printable(row.software))))
    if len(row.pids) == 1:  # one process has all roles
        return f"{workers}, pid {row.pids[0]}"
    named = [f"{role} pid {', '.join(map(str, pids))}" for role, pids in row.processes.items()]
    # Their number follows from their pids.
    return ", ".join(named if row.processes.get(Role.WORKER) else [workers, *named])


def _show_sessions(found: Sequence[SessionInfo]) -> None:
    if not found:
        say("No session is open.")
        return
    titles = ">id", "<role", "name", "<namespace", ">pid", ">idle", ">jobs", ">pinned", ">registered"
    rows = [
        (
            str(one.session_id),
            one.role or "new",
            " ".join(map(printable, filter(None, (one.name, one.software)))) or "-",
            ", ".join(map(namespace_id, one.namespaces)) or "-",
            str(one.pid or "-"),
            format_duration(one.idle_seconds),
            format_count(one.jobs),
            format_size(one.pinned_bytes),
            format_size(one.registered_bytes),
        )
        for one in found
    ]
    print_page(table_of(titles, rows, gap=1))


# --- requests --------------------------------------------------------------------------------------

MAX_SHOWN = 20
"""Latest prompts that are shown if neither a request nor all are asked for."""
FOLLOW_S = 1.0
"""Interval at which new requests are asked for; engines report once a second."""
MAX_SOUGHT = 50
"""Latest prompts whose missing keys are sought in other namespaces."""


def _prompts_of(admin: AdminClient, name: str) -> list[LoggedPrompt]:
    """Return the latest prompts whose request id has ``name``, in the order of their decisions.

    A report has the beginning of a long id, behind what the engine puts before it: ``name`` may continue after that.
    """
    begin = name[: MAX_REQUEST_CHARACTERS // 2]
    found = sorted(admin.ask(ListPrompts, begin).prompts, key=lambda one: one.report.decided_at)

    def has_name(request: str) -> bool:
        is_cut = len(request) == MAX_REQUEST_CHARACTERS
        return name in request or (is_cut and name.startswith(request[request.find(begin) :]))

    return [one for one in found if has_name(one.report.request)]


def _show_requests(directory: Path | None, name: str, *, every: bool, as_json: bool) -> int:
    with open_admin(directory) as admin:
        found = _prompts_of(admin, name)
        if as_json:
            print_json({"requests": found})
            return int(bool(name) and not found)
        names = {one.session_id: engine_name(one.name, one.role) for one in admin.sessions().sessions}
        infos = {one.namespace: one for one in admin.namespaces().namespaces}
        labels = {fingerprint: one.label for fingerprint, one in infos.items()}
        shown = found if every or name else found[-MAX_SHOWN:]
        elsewhere = dict(_elsewhere(admin, shown, infos))
    if not found:
        say(
            f"No engine has reported a request {printable(name)!r}."
            if name
            else "No connected engine has reported a request. Reports come once a second, and are lost with the engine."
        )
    for (session_id, fingerprint), prompts in groupby(shown, lambda one: (one.session_id, one.namespace)):
        namespace = namespace_name(labels.get(fingerprint, ""), fingerprint)
        say(f"Engine {printable(names.get(session_id, '')) or 'without a name'}, namespace {namespace}:")
        for one in prompts:
            say(request_sentence(one) + elsewhere.get((fingerprint, one.report.missing_key), ""))
    if earlier := len(found) - len(shown):
        say((f"and {format_count(earlier)} earlier: kvoffd-cli clients --requests --all", "dim"))
    return int(bool(name) and not found)


def _follow_requests(directory: Path | None, name: str, *, as_json: bool) -> NoReturn:
    """Print each request whose id has ``name`` from now on, a line each."""
    known: set[tuple[int, str, float]] | None = None
    """Requests that were listed before; None before the first list, of which none is printed."""
    names: dict[int, str] = {}
    with open_admin(directory) as admin:
        while True:
            prompts = _prompts_of(admin, name)
            listed = {(one.session_id, one.report.request, one.report.decided_at): one for one in prompts}
            if known is None and sys.stderr.isatty():
                print("Waiting for requests; Ctrl-C ends.", file=sys.stderr)
            for identity, one in listed.items():
                if known is None or identity in known:
                    continue
                if as_json:
                    print_json(one)
                    continue
                if one.session_id not in names:
                    names |= {each.session_id: engine_name(each.name, each.role) for each in admin.sessions().sessions}
                say(f"{request_sentence(one)} ({printable(names.get(one.session_id, '')) or 'an engine that left'})")
            sys.stdout.flush()
            known = {*listed}
            time.sleep(FOLLOW_S)


def _elsewhere(
    admin: AdminClient, found: Sequence[LoggedPrompt], infos: Mapping[bytes, NamespaceInfo]
) -> Iterator[tuple[tuple[bytes, bytes], str]]:
    """Yield, by namespace and key, a sentence if a namespace of the same label has the missing key."""
    asked = dict.fromkeys(
        (one.namespace, one.report.missing_group, one.report.missing_key)
        for one in found[-MAX_SOUGHT:]
        if one.report.reason in ("unknown", "forgotten")
    )
    for fingerprint, group, key in asked:
        if (own := infos.get(fingerprint)) is None:
            continue  # it was forgotten since
        for other in infos.values():
            if other.label != own.label or other is own or not other.ready_blocks or group >= len(other.groups):
                continue
            if admin.ask(FindBlock, other.namespace, group, key).state:
                differs = how_they_differ(own.description, other.description)
                sentence = f" Namespace {namespace_id(other.namespace)} has this key, but differs: {differs}."
                yield (fingerprint, key), sentence
                break


# --- namespaces ------------------------------------------------------------------------------------

namespaces_app = typer.Typer(rich_markup_mode=None)


@namespaces_app.callback(invoke_without_command=True)
def namespaces(context: typer.Context, directory: Directory = None, json: Json = False) -> int:
    """List, compare and limit namespaces.

    Engines share blocks within a namespace: same model, same relevant settings.
    """
    if context.invoked_subcommand is not None:
        return 0
    with open_admin(directory) as admin:
        found, now = admin.namespaces().namespaces, admin.stats()
    if json:
        print_json({"namespaces": found})
    elif found:
        _show_namespaces(found)
        say(*engine_lines(now))
    else:
        say(NO_NAMESPACE)
    return 0


def _show_namespaces(found: Sequence[NamespaceInfo]) -> None:
    limited = any(one.quota_bytes is not None for one in found)
    print_table(
        ("namespace", "<id", ">sessions", ">blocks", ">size", *([">quota"] if limited else []), ">tokens", ">ranks"),
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
    say("tokens: per block. ranks: parts of a block, one for each worker of an engine.")
    firsts: dict[str, NamespaceInfo] = {}
    for one in found:
        if (first := firsts.setdefault(one.label, one)) is not one and one.label:
            ids = " and ".join(namespace_id(each.namespace) for each in (first, one))
            say(f"{ids} differ: {how_they_differ(first.description, one.description)}")


def _block_tokens(info: NamespaceInfo) -> str:
    known = sorted({group.tokens_per_block for group in info.groups if group.tokens_per_block})
    return " to ".join(dict.fromkeys(map(format_count, (known[0], known[-1])))) if known else "-"


@namespaces_app.command()
def diff(
    one: Annotated[str, typer.Argument(metavar="A", help=f"{NAMESPACE_HELP} Or an engine's name or pid.")],
    other: Annotated[str, typer.Argument(metavar="B", help="The same for the other namespace.")],
    directory: Directory = None,
    json: PlainJson = False,
) -> int:
    """Show why two namespaces, or two engines, do not share blocks.

    One line for each cause, with the option that sets it.

    Exit status: 0 same namespace, 1 they differ, 2 an error.
    """
    with open_admin(directory) as admin:
        first, second = _namespace_of(admin, one), _namespace_of(admin, other)
    causes = explain(first.description, second.description)
    names = [namespace_name(info.label, info.namespace) for info in (first, second)]
    if json:
        fields = differences(first.description, second.description)
        found_in = [{"field": name, "a": here, "b": there} for name, here, there in fields]
        print_json({"causes": list(map(str, causes)), "differences": found_in})
    elif first.namespace == second.namespace:
        say(f"Both are the namespace {names[0]}.")
    elif not causes:
        say(f"{names[0]} and {names[1]} differ, but their descriptions do not say how.")
    else:
        say(f"{names[0]} and {names[1]} share no blocks:")
        for cause in causes:
            say(f"  {cause}")
    return int(first.namespace != second.namespace)


def _namespace_of(admin: AdminClient, name: str) -> NamespaceInfo:
    """Return the namespace of the engine with this name, its first word, or pid; else of this label or fingerprint."""
    found = set[bytes]()
    for one in admin.sessions().sessions:
        engine = engine_name(one.name, one.role)
        if name and name in (str(one.pid), engine, engine.partition(" ")[0]):
            found.update(one.namespaces)
    return admin.namespace(found.pop().hex() if len(found) == 1 else name)


@namespaces_app.command()
def quota(
    name: Annotated[str, typer.Argument(metavar="NAME", help=NAMESPACE_HELP)],
    most: Annotated[str, typer.Option("--max", metavar="SIZE", help="Such as 20GiB, or none.")],
    directory: Directory = None,
    json: Json = False,
) -> int:
    """Limit how much of the pool a namespace may use.

    A namespace at its quota evicts its own blocks. The quota survives restarts.

    Exit status: 0 done, 2 an error, or done but a kill may undo it.
    """
    quota_bytes = None if most == "none" else parse_option("--max", most, parse_size)
    with open_admin(directory) as admin:
        known = admin.namespace(name)
        block_bytes = max(map(sum, known.shard_bytes), default=0)
        if quota_bytes is not None and quota_bytes < block_bytes:  # it would evict all blocks
            why = f"{most} is less than a block of {format_size(block_bytes)}; plain numbers are bytes"
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
        hint = f" That limits nothing: the pool has {format_size(pool_bytes)}."
    elif now.quota_bytes is not None and now.ready_bytes > now.quota_bytes:
        hint = f" It has {format_size(now.ready_bytes)} now; its next stores evict down to the quota."
    say(f"Namespace {namespace_name(now.label, now.namespace)}: {words}.{hint}")
    return 0


namespaces_app.command()(reuse)
