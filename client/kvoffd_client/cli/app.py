"""``kvoffd-cli``: its commands and global options, and the translation of errors into sentences and exit statuses."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from itertools import takewhile
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvoffd_client.cli.health import fitted
from kvoffd_client.cli.target import CliError, Directory
from kvoffd_client.errors import KvoffdClientError
from kvoffd_proto.paths import is_utf8

EXIT_REFUSED = 2
COMPLETION = "_KVOFFD_CLI_COMPLETE"
"""Variable by which a shell requests completions."""

COMMANDS = {
    "top": ("top", "top", "top", "top --interval 5s", "top --url http://node:9464"),
    "stats": ("stats", "stats", "stats", "stats --misses", "stats tiers --url http://node:9464"),
    "health": ("show", "health", "health", "health --ready", "health --json"),
    "doctor": (
        "doctor", "doctor",
        "doctor", "doctor --engine http://localhost:8000 --self-test", "doctor --json | jq .findings",
    ),
    "verify": (
        "verify", "verify",
        "verify http://localhost:8000 --prompts mine.jsonl", "verify localhost:8000 --cold localhost:8001",
    ),
    "clients": ("show", "clients", "clients", "clients --requests", "clients --requests cmpl-7f2a"),
    "namespaces": (
        "show", "namespaces_app",
        "namespaces", "namespaces diff 106ed1a3 9c1d02aa", "namespaces quota llama-70b --max 100GiB",
        "namespaces reuse --engine http://localhost:8000",
    ),
    "clear": ("actions", "clear", "clear llama-70b", "clear --all --yes", "clear 106ed1a3 --all-nodes"),
    "scrub": ("actions", "scrub", "scrub", "scrub --json"),
    "log-level": ("actions", "log_level", "log-level debug", "log-level info"),
    "events": ("actions", "events", "events", "events --json"),
    "trace": (
        "trace", "trace_app",
        "trace record trace.jsonl.gz --duration 1h", "trace replay trace.jsonl.gz",
        "trace replay trace.jsonl.gz --size 64GiB,128GiB",
    ),
    "bench": ("bench", "bench_app", "bench lookup", "bench copy", "bench copy --json"),
}  # fmt: skip
"""Module, function or group, and examples of each command, in the order of --help."""


def make_command(names: Iterable[str] = COMMANDS) -> TyperGroup:
    """Build ``kvoffd-cli`` with these commands. Building all of them takes longer than most commands run."""
    app = typer.Typer(
        name="kvoffd-cli",
        help="Shows this node's kvoffd daemon on one screen; with a command, does more.",
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(read_root_options)
    for name in names:
        module, member, *examples = COMMANDS[name]
        command = getattr(import_module(f"kvoffd_client.cli.{module}"), member)
        epilog = "\b\nExamples:\n" + "\n".join(f"  kvoffd-cli {line}" for line in examples)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, epilog=epilog)
        else:
            app.command(epilog=epilog)(command)
    made = typer.main.get_command(app)
    assert isinstance(made, TyperGroup)
    made.commands = {name: made.commands[name] for name in names}
    for option in made.params:
        if option.name == "show_completion":
            option.hidden = True  # type: ignore[attr-defined]  # --install-completion is what people use
    return made


def run(given: list[str]) -> int:
    """Run ``kvoffd-cli`` with these arguments; return the exit status.

    0 is success, 2 an error with one sentence on stderr, 130 Ctrl-C; each command's help lists others.
    """
    for word in given:
        if not is_utf8(word):
            return _refuse(f"{os.fsencode(word)!r} is not UTF-8; give it in UTF-8.")
    # The overview needs no command, and a command only itself; --help, completion and wrong commands need all.
    is_enough = given[0] in COMMANDS if given else COMPLETION not in os.environ
    command = make_command(given[:1] if is_enough else COMMANDS)
    try:
        # Not Command.main(), which handles Ctrl-C and closed pipes differently.
        if COMPLETION in os.environ:
            command.main(given, "kvoffd-cli")
        with command.make_context("kvoffd-cli", [*given], obj=given) as context:
            status: int | None = command.invoke(context)
        sys.stdout.flush()
        return status or 0
    except typer.Exit as ended:
        return ended.exit_code
    except BrokenPipeError:
        # The reader, such as head, has ended. Python would report that again when it closes stdout.
        _output_that_fails()
        return 0
    except (CliError, KvoffdClientError) as error:
        return _refuse(str(error))
    except OSError as error:
        where = error.filename or _output_that_fails()
        return _refuse(f"{f'{where}: ' if where else ''}{error.strerror or error}.")
    except Exception as error:
        # Not isinstance: depending on its release, typer has its own copy of click or uses the installed one.
        if not hasattr(error, "format_message"):
            raise
        return _refuse(_usage_sentence(error, given))


def _usage_sentence(error: Any, given: list[str]) -> str:
    """Return the sentence for click's UsageError about these arguments."""
    option = getattr(error, "option_name", None)
    name = next((word for word in given if word in COMMANDS), None)
    if option in given and name is not None and given.index(option) < given.index(name):
        return _behind_command(option, name, given)
    said = str(error.format_message()).replace("Value error, ", "").rstrip(".")
    said = re.sub(r"\.? \(?(Did you mean|Possible options:) ([^?)]+)[?)]", r"; did you mean \2?", said)
    return said if said.endswith("?") else f"{said}; see --help."


def _behind_command(option: str, name: str, given: list[str]) -> str:
    """Return the sentence for an option before the command ``name``."""
    behind = " ".join(takewhile(lambda word: not word.startswith("-"), given[given.index(name) :]))
    return f"{option} is not a global option; write it after a command: kvoffd-cli {behind} {option}."


def _output_that_fails() -> str:
    """Return ``standard output`` if writing to it fails, and drop its buffer, which Python would write at exit."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return "standard output"
    return ""


def _refuse(sentence: str) -> int:
    print(fitted(f"kvoffd-cli: {sentence}", sys.stderr), file=sys.stderr)
    return EXIT_REFUSED


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from kvoffd_proto.build import with_commit
        from kvoffd_proto.messages import PROTOCOL_VERSION

        print(f"kvoffd-cli {with_commit(version('kvoffd'))} (protocol {PROTOCOL_VERSION})")
        raise typer.Exit


def read_root_options(
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print release and protocol.", callback=_print_version, is_eager=True),
    ] = False,
    directory: Directory = None,
) -> int:
    """Show and administer the kvoffd daemon of this node."""
    if (name := context.invoked_subcommand) is None:
        from kvoffd_client.cli.overview import show_overview

        return show_overview(directory)
    if directory is not None:
        raise CliError(_behind_command("--directory", name, context.obj))
    return 0
