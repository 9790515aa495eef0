"""The daemon's command line: ``kvoffd serve``, ``kvoffd config``, ``kvoffd --version``.

The options are made from the list of settings, so argparse fits; typer makes options from signatures. Nothing heavy is
imported before the arguments are parsed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from errno import ECONNREFUSED, ENOENT
from pathlib import Path
from textwrap import wrap
from typing import NoReturn

from kvoffd import __version__
from kvoffd.config import (
    CONFIG_VARIABLE,
    SETTINGS,
    VARIABLE_PREFIX,
    Config,
    ConfigError,
    ServerLimits,
    check_disks,
    did_you_mean,
    load_config,
    parse_address,
    settings_in_force,
)
from kvoffd.errors import KvoffdError

EXIT_REFUSED = 2
_DEFAULTS = Config()
GROUPS = {
    "directory": "sockets and pool",
    "disk": "disks",
    "shared": "store that nodes share",
    "peers": "memory of other nodes",
    "copy_threads": "copies",
    "allowed_uids": "who may connect",
    "max_sessions": "sessions",
    "http_address": "monitoring",
    "cuda_library": "GPUs",
}
"""Titles of the groups of settings in --help, by the first setting of each."""
EPILOG = (
    "A flag overrides its KVOFFD_ variable, the variable overrides the key in the file. Examples: kvoffd serve "
    "--pool-size 64GiB; kvoffd serve --pool-size 64GiB --disk /mnt/nvme=1TiB; kvoffd serve --config /etc/kvoffd.toml"
)
_UNKNOWN = "unrecognized arguments: "
_NO_MEMORY = "not enough memory: see ulimit -d and ulimit -v"


class _Parser(argparse.ArgumentParser):
    """Prints one sentence for an error instead of the usage."""

    def error(self, message: str) -> NoReturn:
        if message.startswith(_UNKNOWN):
            first = message.removeprefix(_UNKNOWN).partition(" ")[0].partition("=")[0]
            if nearest := did_you_mean(first, self._option_string_actions):
                message = f"{message} ({nearest})"
        hint = f"{self.prog} --help shows the options"
        if "argument COMMAND" in message:
            hint = "kvoffd serve runs the daemon, kvoffd-cli inspects one; each has a --help"
        _refuse(f"{message}; {hint}.", _log_format_variable())
        self.exit(EXIT_REFUSED)


def main(arguments: Sequence[str] | None = None, limits: ServerLimits | None = None) -> int:
    """Run ``kvoffd`` with ``arguments`` (default: the process's); return the exit status. ``limits`` is for tests.

    0 is success, 2 an error with one sentence on stderr; ``serve`` returns the daemon's status.
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
        return _refuse(str(error), flags["log_format"] or _log_format_variable())
    if given.command == "config":
        return show_and_check(config, as_json=given.json)
    try:
        check_disks(config)
    except ConfigError as error:
        return _refuse(str(error), config.log_format)
    return serve(config)


def _check_machine(config: Config) -> None:
    """Raise KvoffdError if the machine lacks what a start would need.

    A daemon that listens in the directory has port and memory: neither is checked.
    """
    import socket

    from kvoffd.system.listening import listen
    from kvoffd_proto.paths import SocketPaths

    paths = SocketPaths(config.directory)
    if problem := paths.problem():
        raise KvoffdError(problem)
    # A daemon's listener refuses a datagram socket with EPROTOTYPE, and the daemon does not notice.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        if probe.connect_ex(str(paths.lifeline)) not in (ENOENT, ECONNREFUSED):
            return
    if config.http_address:
        for listener in listen(*parse_address(config.http_address)):
            listener.close()
    _check_pool(config)


def _check_pool(config: Config) -> None:
    """Raise KvoffdError if a start would find no memory for its pool, or would not take the pool file."""
    from kvoffd.system.limits import check_fits, fits_reserved, memory_limit

    path = Path(config.pool_file)
    is_made_by_start = path.parent in (config.directory, *config.directory.parents) and not os.path.lexists(path.parent)
    if config.pool_file and not is_made_by_start:
        # Only here, as it imports NumPy.
        from kvoffd.pool.allocator import default_region_bytes
        from kvoffd.pool.backing import FileBacking
        from kvoffd.pool.slot_table import TableGeometry

        with closing(FileBacking(path)) as backing:
            table_bytes = TableGeometry(config.pool_bytes, default_region_bytes(config.pool_bytes)).size_bytes
            limit = backing.limit(config.pool_bytes)
            check_fits(config.pool_bytes, limit)  # as ``Pool`` does
            check_fits(config.pool_bytes + table_bytes, limit)
    elif config.pool_file or config.reserved_pages != "auto" or not fits_reserved(config.pool_bytes):
        check_fits(config.pool_bytes, memory_limit())


def open_standard_streams() -> None:
    """Open /dev/null for closed standard streams. Otherwise a socket or file of the daemon would get their number:
    libraries would print into it, and libuv aborts the process when it closes one.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        if fd == 1 and sys.stdout is None:
            sys.stdout = os.fdopen(fd, "w", closefd=False)
        if fd == 2 and sys.stderr is None:
            sys.stderr = os.fdopen(fd, "w", closefd=False)
    os.close(fd)


def serve(config: Config) -> int:
    """Run the daemon until it ends; return its exit status."""
    from kvoffd.errors import NoMoreThreads
    from kvoffd.system.limits import check_start
    from kvoffd.system.threads import is_refused_thread

    try:
        check_start(config.pool_file)
    except KvoffdError as error:
        return _refuse(str(error), config.log_format)
    # Read when NumPy is imported. The kernel takes up to 5 ms for a huge page, and the loop would wait for it.
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
        # Threads of the loop's executor and of the log are not started by ``threads.start``.
        if not is_refused_thread(error):
            raise
        return _refuse(str(NoMoreThreads()), config.log_format)


def _log_format_variable() -> str:
    """Return the log format of the environment, for errors of the configuration."""
    return os.environ.get(f"{VARIABLE_PREFIX}LOG_FORMAT", "").strip().lower()


def _refuse(sentence: str, log_format: str) -> int:
    from kvoffd.observe.logging import print_refusal

    print_refusal(sentence, log_format)
    return EXIT_REFUSED


def show_and_check(config: Config, *, as_json: bool) -> int:
    """Print the configuration with each value's source, then check that a daemon could start with it."""
    status = show(config, as_json=as_json)
    try:
        check_disks(config)
        _check_machine(config)
    except (ConfigError, KvoffdError) as error:
        return _refuse(str(error), config.log_format)
    return status


def show(config: Config, *, as_json: bool) -> int:
    """Print the configuration with each value's source."""
    try:
        print(config_as_json(config) if as_json else config_as_toml(config), end="", flush=True)
    except OSError as error:
        # Python would print the error again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # as when piped to head
            return _refuse(f"standard output: {error.strerror}.", config.log_format)
    return 0


def config_as_toml(config: Config) -> str:
    """Return a TOML file of the configuration; its comments are each value's source and the memory that is needed."""
    from kvoffd.memory_estimate import memory_summary

    pairs: list[tuple[str, str]] = []
    for setting, (name, text, source) in zip(SETTINGS, settings_in_force(config), strict=True):
        # TOML has the same escapes as JSON, but also requires one for DEL.
        quoted = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
        pairs.append((f"{name} = {text if setting.metavar == 'N' else quoted}", source))
    width = max(len(left) for left, _ in pairs)
    lines = [f"{left:<{width}}  # {source}" for left, source in pairs]
    return "\n".join([*lines, "", *(f"# {line}" for line in wrap(memory_summary(config), 78))]) + "\n"


def config_as_json(config: Config) -> str:
    """Return JSON: by setting, the value (bytes and seconds as numbers), its text and its source."""
    shown = {}
    for setting, (name, text, source) in zip(SETTINGS, settings_in_force(config), strict=True):
        value = getattr(config, setting.field_name)
        plain = value if isinstance(value, (int, float, str, tuple)) else str(value)
        shown[name] = {"value": plain, "text": text, "source": source}
    return json.dumps(shown, indent=2) + "\n"


class _PrintVersion(argparse.Action):
    """Prints the release, and the protocol, whose module is slow to import."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from kvoffd_proto.build import with_commit
        from kvoffd_proto.messages import PROTOCOL_VERSION

        print(f"kvoffd {with_commit(__version__)} (protocol {PROTOCOL_VERSION})")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``kvoffd``. It leaves values as text: ``load_config`` checks those of all sources."""
    parser = _Parser(
        prog="kvoffd",
        description="Keeps the KV cache blocks of this node's LLM engines: in host memory, on local disks, and in "
        "stores that nodes share.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print release and protocol, and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    serving = commands.add_parser(
        "serve",
        help="run the daemon",
        allow_abbrev=False,
        usage="kvoffd serve [OPTION]...",
        description="Runs the daemon until SIGTERM. Most users need only --pool-size.",
    )
    showing = commands.add_parser(
        "config",
        help="print the configuration that serve would use, with each value's source",
        allow_abbrev=False,
        description="Prints the configuration that serve would use with the same flags, as TOML for --config. For a "
        "running daemon use kvoffd-cli stats settings.",
    )
    showing.add_argument("--json", action="store_true", help="print JSON: bytes and seconds as numbers")
    for one in (parser, serving, showing):
        one.set_defaults(parser=one)  # the parser that main reports unknown arguments with
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
        # argparse takes a % in help for a placeholder, and the default directory may have one.
        group.add_argument(
            setting.flag,
            dest=setting.name,
            metavar=setting.metavar,
            help=text.replace("%", "%%"),
            action="append" if setting.repeated else "store",
        )
        if setting.name == "pool_size":  # after the settings that every user needs
            text = f"TOML file with settings. [{CONFIG_VARIABLE}]"
            group.add_argument("--config", metavar="FILE", help=text)
