"""The daemon's command line: ``kvoffd serve``, ``kvoffd config``, ``kvoffd --version``.

argparse and not typer: the options are made from the table of settings, and typer makes options from signatures.
Nothing heavy is imported before the arguments are parsed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from textwrap import wrap
from typing import NoReturn

from kvoffd import __version__
from kvoffd.config import (
    CONFIG_VARIABLE,
    SETTINGS,
    VARIABLE_PREFIX,
    Config,
    ConfigError,
    Limits,
    did_you_mean,
    load_config,
    settings_in_force,
)

EXIT_REFUSED = 2
_DEFAULTS = Config()
GROUPS = {
    "directory": "sockets and pool",
    "disk": "disks",
    "shared": "store that nodes share",
    "copy_threads": "copies",
    "allowed_uids": "who may connect",
    "max_sessions": "sessions",
    "http_address": "monitoring",
    "cuda_library": "GPUs",
}
"""By its first setting, the title of a group of settings in --help."""
EPILOG = (
    "A flag overrides its KVOFFD_ variable, the variable overrides the key in the file. Examples: kvoffd serve "
    "--pool-size 64GiB; kvoffd serve --pool-size 64GiB --disk /mnt/nvme=1TiB; kvoffd serve --config /etc/kvoffd.toml"
)
_UNKNOWN = "unrecognized arguments: "
_NO_MEMORY = "the system gives it too little memory: see ulimit -d and ulimit -v"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix(_UNKNOWN).split()[0].split("=")[0] if message.startswith(_UNKNOWN) else ""
        if nearest := unknown and did_you_mean(unknown, self._option_string_actions):
            message = f"{message} ({nearest})"
        hint = f"{self.prog} --help shows what can be given"
        if "argument COMMAND" in message:
            hint = "kvoffd serve runs the daemon, kvoffd-cli looks at one; each has a --help"
        _refuse(f"{message}; {hint}.", _asked_format())
        self.exit(EXIT_REFUSED)


def main(arguments: Sequence[str] | None = None, limits: Limits | None = None) -> int:
    """Run ``kvoffd`` with ``arguments`` (the process's own where None); return the exit status. ``limits``: a test's.

    0 is success, 2 a refusal with one sentence on stderr; ``serve`` returns what the daemon returns.
    """
    open_standard_streams()
    parser = make_parser()
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        given.parser.error(f"{_UNKNOWN}{' '.join(unknown)}")
    if given.command is None:
        parser.print_help()
        return 0
    flags = {setting.name: getattr(given, setting.name) for setting in SETTINGS}
    try:
        config = load_config(flags, os.environ, given.config, limits)
    except ConfigError as error:
        return _refuse(str(error), flags["log_format"] or _asked_format())
    return serve(config) if given.command == "serve" else show(config, as_json=given.json)


def open_standard_streams() -> None:
    """Put /dev/null where standard input, output or error is closed, as some programs start their children. Else a
    socket or a file of the daemon would have its number: what a library prints would go there, and libuv ends the
    process when it is to close one.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        if fd == 1 and sys.stdout is None:
            sys.stdout = os.fdopen(fd, "w", closefd=False)
        if fd == 2 and sys.stderr is None:
            sys.stderr = os.fdopen(fd, "w", closefd=False)
    os.close(fd)


def serve(config: Config) -> int:
    """Run the daemon until it is to stop; return its exit status."""
    from kvoffd.errors import KvoffdError, NoMoreThreads

    # For NumPy's import: the loop would wait while the kernel makes a huge page for an array, up to 5 ms each time.
    os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
    try:
        from kvoffd.observe.logging import configure_logging
        from kvoffd.server.daemon import run
    except (MemoryError, OSError) as error:
        return _refuse(f"The daemon cannot be loaded ({str(error) or _NO_MEMORY}).", config.log_format)
    try:
        configure_logging(config.log_level, config.log_format)
        return run(config)
    except KvoffdError as error:
        return _refuse(str(error), config.log_format)
    except RuntimeError as error:
        if str(error) != "can't start new thread":
            raise
        return _refuse(str(NoMoreThreads()), config.log_format)


def _asked_format() -> str:
    """The log format that the environment asks for: the configuration could not be read."""
    return os.environ.get(f"{VARIABLE_PREFIX}LOG_FORMAT", "")


def _refuse(sentence: str, log_format: str) -> int:
    from kvoffd.observe.logging import print_refusal

    print_refusal(sentence, log_format)
    return EXIT_REFUSED


def show(config: Config, *, as_json: bool) -> int:
    """Print what is in force and where it came from."""
    try:
        print(config_as_json(config) if as_json else config_as_toml(config), end="", flush=True)
    except OSError as error:
        # Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader, such as head, has seen enough
            return _refuse(f"standard output: {error.strerror}.", config.log_format)
    return 0


def config_as_toml(config: Config) -> str:
    """A TOML file that gives the same configuration, with each value's source, and the memory it needs, as comments."""
    from kvoffd.memory_estimate import memory_summary

    pairs: list[tuple[str, str]] = []
    for setting, (name, text, source) in zip(SETTINGS, settings_in_force(config), strict=True):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
        quoted = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
        pairs.append((f"{name} = {text if setting.metavar == 'N' else quoted}", source))
    width = max(len(left) for left, _ in pairs)
    lines = [f"{left:<{width}}  # {source}" for left, source in pairs]
    return "\n".join([*lines, "", *(f"# {line}" for line in wrap(memory_summary(config), 78))]) + "\n"


def config_as_json(config: Config) -> str:
    """One JSON object: by setting, the value (bytes and seconds as numbers), the text that gives it and its source."""
    shown = {}
    for setting, (name, text, source) in zip(SETTINGS, settings_in_force(config), strict=True):
        value = getattr(config, setting.field_name)
        plain = value if isinstance(value, (int, float, str, tuple)) else str(value)
        shown[name] = {"value": plain, "text": text, "source": source}
    return json.dumps(shown, indent=2) + "\n"


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``kvoffd``. Values stay text here: ``load_config`` judges them, whatever their source."""
    parser = _Parser(
        prog="kvoffd",
        description="Keeps the KV cache blocks of this node's LLM engines: in host memory, on local disks, and in "
        "stores that nodes share.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvoffd {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    serving = commands.add_parser(
        "serve",
        help="run the daemon",
        allow_abbrev=False,
        usage="kvoffd serve [OPTION]...",
        description="Runs the daemon, until SIGTERM. Most need --pool-size alone.",
    )
    showing = commands.add_parser(
        "config",
        help="print the configuration that serve would use, and where each value comes from",
        allow_abbrev=False,
        description="Prints the configuration that serve would use with the same flags, as TOML that --config reads. "
        "Settings of a running daemon: kvoffd-cli stats settings.",
    )
    showing.add_argument("--json", action="store_true", help="print JSON: bytes and seconds as numbers")
    for one in (parser, serving, showing):
        one.set_defaults(parser=one)  # whose --help has the options
    for command in (serving, showing):
        command.epilog = EPILOG
        _add_settings(command)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    group: argparse._ActionsContainer = parser
    for setting in SETTINGS:
        if setting.name in GROUPS:
            group = parser.add_argument_group(GROUPS[setting.name])
        default = setting.show(getattr(_DEFAULTS, setting.field_name))
        text = f"{setting.description} [{setting.variable}{default and f', default {default}'}]"
        # argparse takes a % in a help text, such as one in the default directory, for a placeholder.
        group.add_argument(
            setting.flag,
            dest=setting.name,
            metavar=setting.metavar,
            help=text.replace("%", "%%"),
            action="append" if setting.repeated else "store",
        )
        if setting.name == "pool_size":
            text = f"TOML file with settings. [{CONFIG_VARIABLE}]"
            group.add_argument("--config", metavar="FILE", help=text)
