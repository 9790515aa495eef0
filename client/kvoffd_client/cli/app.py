"""``kvoffd-cli``: its commands and the options before them, and how errors become sentences and exit statuses."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer
from typer.core import TyperGroup

from kvoffd_client.cli import actions, show
from kvoffd_client.cli.bench import bench_app
from kvoffd_client.cli.blocks import blocks_app
from kvoffd_client.cli.doctor import doctor
from kvoffd_client.cli.stats import stats
from kvoffd_client.cli.target import CliError
from kvoffd_client.cli.top import top
from kvoffd_client.cli.trace import trace_app
from kvoffd_client.errors import KvoffdClientError
from kvoffd_proto.errors import ErrorCode

EXIT_REFUSED, EXIT_NOT_NOTED = 2, 3
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


def _examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  kvoffd-cli {line}" for line in lines)


# In the order in which --help lists them.
app.command(epilog=_examples("top", "top --interval 5s", "top | tee stats.txt"))(top)
app.command(epilog=_examples("stats", "stats --misses", "stats tiers --url http://node:9464"))(stats)
app.command(epilog=_examples("health", "health --ready", "health --json"))(show.health)
app.command(
    epilog=_examples("doctor", "doctor --engine http://localhost:8000 --self-test", "doctor --json | jq .findings")
)(doctor)
app.command(epilog=_examples("clients", "clients --requests", "clients --requests cmpl-7f2a"))(show.clients)
app.add_typer(
    show.namespaces_app,
    name="namespaces",
    epilog=_examples("namespaces", "namespaces diff 106ed1a3 9c1d02aa", "namespaces quota llama-70b --max 100GiB"),
)
app.command(epilog=_examples("clear llama-70b", "clear --all --yes", "clear 106ed1a3 --all-nodes"))(actions.clear)
app.command(epilog=_examples("scrub", "scrub --json"))(actions.scrub)
app.command(epilog=_examples("events", "events --json"))(actions.events)
app.add_typer(
    trace_app,
    name="trace",
    epilog=_examples(
        "trace record trace.jsonl.gz --duration 1h",
        "trace replay trace.jsonl.gz",
        "trace replay trace.jsonl.gz --size 64GiB,128GiB",
    ),
)
app.add_typer(bench_app, name="bench", epilog=_examples("bench lookup", "bench copy", "bench copy --json"))
app.add_typer(
    blocks_app,
    name="blocks",
    epilog=_examples(
        "blocks ls --namespace m", "blocks export m.safetensors --namespace m", "blocks import m.safetensors"
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``kvoffd-cli`` with ``arguments`` (the process's own where None); return the exit status.

    0 is success, 2 an error with one sentence on stderr, 3 done but not written down, 130 Ctrl-C; each command's help
    names the others.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
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
        _refuse(str(error))
        return EXIT_NOT_NOTED if getattr(error, "code", None) is ErrorCode.NOT_NOTED else EXIT_REFUSED
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
        said = str(words()).replace("Value error, ", "").rstrip(".")
        return _refuse(f"{said}{'' if said.endswith('?') else ';'} --help shows what can be given.")


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
) -> None:
    """Show and administer the kvoffd daemon of this node."""
    if context.invoked_subcommand is None:
        print(context.get_help())
