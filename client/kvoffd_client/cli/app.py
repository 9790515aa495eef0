"""``kvoffd-cli``: its commands and the options before them, and how errors become sentences and exit statuses."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer
from typer.core import TyperGroup

from kvoffd_client.cli import admin_commands, block_commands, monitor_commands, shared_commands
from kvoffd_client.cli.advise_command import advise
from kvoffd_client.cli.bench import bench_app
from kvoffd_client.cli.block_commands import block_app
from kvoffd_client.cli.curve_command import curve
from kvoffd_client.cli.disk_commands import disk
from kvoffd_client.cli.namespace_command import namespace_app
from kvoffd_client.cli.policy_command import policy
from kvoffd_client.cli.record_command import record
from kvoffd_client.cli.reference import JSON, epilog_of
from kvoffd_client.cli.simulate_command import simulate
from kvoffd_client.cli.target import CliError, Directory
from kvoffd_client.errors import KvoffdClientError

EXIT_REFUSED = 2
COMPLETION = "_KVOFFD_CLI_COMPLETE"
"""The variable by which a shell asks for completions."""
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="kvoffd-cli",
    help="Shows and administers the kvoffd daemon of this node.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
# In the order in which --help lists them.
app.command()(monitor_commands.stats)
app.command()(monitor_commands.health)
app.command()(admin_commands.sessions)
app.add_typer(admin_commands.namespaces_app, name="namespaces")
app.add_typer(namespace_app, name="namespace")
app.command()(admin_commands.clear)
app.command()(shared_commands.reset)
app.command()(admin_commands.scrub)
app.command()(monitor_commands.events)
app.command()(policy)
app.command()(advise)
app.command()(curve)
app.command()(record)
app.command()(simulate)
app.add_typer(bench_app, name="bench")
app.command()(disk)
app.command()(shared_commands.shared)
app.add_typer(block_app, name="block")
app.command()(block_commands.export)
app.command(name="import")(block_commands.import_)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``kvoffd-cli`` with ``arguments`` (the process's own where None); return the exit status.

    0 is success, 2 an error with one sentence on stderr, 130 Ctrl-C; each command's help names the others.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = command_tree(keys="--help" in given, brief="-h" in given)
    try:
        # Not Command.main(), which has its own way with Ctrl-C and with a reader that closes its pipe.
        if COMPLETION in os.environ:
            command.main(given, "kvoffd-cli")
        with command.make_context("kvoffd-cli", list(given)) as context:
            status: int | None = command.invoke(context)
        sys.stdout.flush()
        return status or 0
    except typer.Exit as ended:
        return ended.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader, such as head, has seen enough. Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CliError, KvoffdClientError) as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}.")
    except Exception as error:
        # Typer has its own copy of click or uses the installed one, depending on its release: known by what it can do.
        if (words := getattr(error, "format_message", None)) is None:
            raise
        option = getattr(error, "option_name", None)
        name = next((word for word in given if word in command.commands), None)
        if option in given and name is not None and given.index(option) < given.index(name):
            return _refuse(f"{option} is no option of all commands; write it behind one: kvoffd-cli {name} {option}.")
        return _refuse(f"{str(words()).rstrip('.')}; --help shows what can be given.")


def command_tree(*, keys: bool = True, brief: bool = False) -> TyperGroup:
    """All commands. With ``keys`` their help ends with those of their JSON; ``brief``, with where they are."""
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    if keys or brief:
        _add_keys(root, "", keys)
    return root


def _add_keys(group: TyperGroup, words: str, keys: bool) -> None:
    for name, command in group.commands.items():
        if f"{words}{name}" in JSON:
            command.epilog = epilog_of(f"{words}{name}") if keys else "--help names the keys of --json too."
        if isinstance(command, TyperGroup):
            _add_keys(command, f"{words}{name} ", keys)


def _refuse(sentence: str) -> int:
    print(f"kvoffd-cli: {sentence}", file=sys.stderr)
    return EXIT_REFUSED


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvoffd-cli {version('kvoffd')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def read_root_options(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the release.", callback=_print_version, is_eager=True)
    ] = False,
    directory: Directory = None,
) -> None:
    """Show and administer the kvoffd daemon of this node."""
    context.obj = directory
    if context.invoked_subcommand is None:
        print(context.get_help())
