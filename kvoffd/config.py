"""The daemon's configuration: one frozen object, filled from flags over variables over a TOML file.

The fields of ``Config`` are the only list of settings there is: flags, ``KVOFFD_*`` variables, TOML keys, help texts
and the output of ``kvoffd config`` are made from it. A value carries its unit, so the unit that ends a field's name
is not part of the setting's name: ``pool_bytes`` is ``pool_size`` in the file, ``--pool-size`` on the command line
and ``KVOFFD_POOL_SIZE`` in the environment; ``lease_ttl_s`` is ``lease_ttl``.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from kvoffd.disks import DiskSize, parse_disks, show_disks
from kvoffd_proto.sockets import SocketPaths, default_directory
from kvoffd_proto.units import UnitError, exact_duration, exact_size, parse_duration, parse_size, quoted

VARIABLE_PREFIX = "KVOFFD_"
CONFIG_VARIABLE = "KVOFFD_CONFIG"
# Kubernetes tells every pod about a Service named kvoffd by variables of these names: they are not ours.
_SERVICE_LINK = re.compile(r"KVOFFD(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_.+)?)")

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
EVICTION_POLICIES = ("lru", "arc")
BLOCK_ACCESS = ("off", "read", "write")
MIN_POOL_BYTES = 1024 * 1024

DISK_WRITES = ("always", "reuse", "evict", "never")

Value: TypeAlias = int | float | str | Path | tuple[int, ...] | tuple[DiskSize, ...]


class ConfigError(Exception):
    """The configuration is refused. The text is one sentence that names the setting, its value and its source."""


@dataclass(frozen=True)
class Kind:
    """How values of one kind are read and shown.

    ``parse`` takes a text or a TOML value and raises ValueError with half a sentence; ``show`` gives the text that
    ``parse`` reads back; ``metavar`` stands for the value in a help text; ``repeated`` lets a flag be given again.
    """

    metavar: str
    parse: Callable[[object], Value]
    show: Callable[[Value], str]
    repeated: bool = False


@dataclass(frozen=True)
class Address:
    """Where the HTTP server listens."""

    host: str
    port: int


def parse_address(text: str) -> Address:
    """Read ``host:port``, with brackets round an IPv6 host. Raises ValueError with half a sentence."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not (host and colon and re.fullmatch("[0-9]{1,5}", port) and int(port) < 65536) or any(map(str.isspace, host)):
        raise ValueError(
            f"{quoted(text)} is not an address; write host:port, such as 127.0.0.1:9464, or nothing to switch it off"
        )
    return Address(host, int(port))


def _size(default: int, minimum: int, description: str) -> int:
    def parse(value: object) -> int:
        # parse_size refuses what is neither text nor a whole number.
        size = parse_size(value)  # type: ignore[arg-type]
        if size < minimum:
            raise ValueError(f"{quoted(value)} is too small; at least {exact_size(minimum)} is needed")
        return size

    kind = Kind("SIZE", parse, lambda value: exact_size(_whole(value)))
    return field(default=default, metadata={"kind": kind, "description": description})


def _duration(default: float, minimum: float, description: str) -> float:
    def parse(value: object) -> float:
        seconds = parse_duration(value)  # type: ignore[arg-type]
        if seconds < minimum:
            raise ValueError(f"{quoted(value)} is too short; at least {exact_duration(minimum)} is needed")
        return seconds

    kind = Kind("DURATION", parse, lambda value: exact_duration(float(str(value))))
    return field(default=default, metadata={"kind": kind, "description": description})


def _number(default: int, minimum: int, maximum: int, description: str) -> int:
    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,20}\s*", value):
            number = int(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            number = value
        else:
            raise ValueError(f"{quoted(value)} is not a whole number; {minimum} to {maximum} are allowed")
        if not minimum <= number <= maximum:
            raise ValueError(f"{quoted(value)} is out of range; {minimum} to {maximum} are allowed")
        return number

    return field(default=default, metadata={"kind": Kind("N", parse, str), "description": description})


def _share(default: float, description: str) -> float:
    def parse(value: object) -> float:
        try:
            share = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else -1.0
        except ValueError:
            share = -1.0
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"{quoted(value)} is not a share; 0 to 1 are allowed, such as 0.015625 for one in 64")
        return share

    kind = Kind("SHARE", parse, lambda value: f"{float(str(value)):.12g}")
    return field(default=default, metadata={"kind": kind, "description": description})


def _choice(default: str, choices: tuple[str, ...], description: str) -> str:
    def parse(value: object) -> str:
        if not isinstance(value, str) or value.strip().lower() not in choices:
            raise ValueError(f"{quoted(value)} is unknown; choose {' or '.join(choices)}")
        return value.strip().lower()

    return field(default=default, metadata={"kind": Kind("|".join(choices), parse, str), "description": description})


def _ids(description: str) -> tuple[int, ...]:
    def parse(value: object) -> tuple[int, ...]:
        parts = value.replace(",", " ").split() if isinstance(value, str) else value
        if not isinstance(parts, list):
            raise ValueError(f"{quoted(value)} is not a list of numeric ids; write them with commas, such as 0,1000")
        ids = []
        for part in parts:
            text = str(part) if isinstance(part, (int, str)) and not isinstance(part, bool) else ""
            if not re.fullmatch("[0-9]{1,10}", text) or int(text) >= 2**32 - 1:
                raise ValueError(
                    f"{quoted(part)} is not a numeric id; 0 to {2**32 - 2} are allowed, separated by commas"
                )
            ids.append(int(text))
        return tuple(sorted(set(ids)))

    def show(value: Value) -> str:
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    return field(default=(), metadata={"kind": Kind("IDS", parse, show), "description": description})


def _disks(description: str) -> tuple[DiskSize, ...]:
    kind = Kind("DIRECTORY=SIZE", parse_disks, show_disks, repeated=True)
    return field(default=(), metadata={"kind": kind, "description": description})


def _directory(description: str) -> dict[str, object]:
    def parse(value: object) -> Path:
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise ValueError(f"{quoted(value)} is not a path; name a directory, such as /run/kvoffd")
        try:
            path = Path(value).expanduser().absolute()
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{quoted(value)} cannot be used; {error}") from error
        if problem := SocketPaths(path).problem():
            raise ValueError(f"{quoted(value)} cannot be used; {problem[0].lower()}{problem[1:].rstrip('.')}")
        return path

    return {"kind": Kind("PATH", parse, str), "description": description}


def _file(description: str) -> str:
    def parse(value: object) -> str:
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"{quoted(value)} is not a path; name a file, such as /dev/shm/kvoffd.pool, or nothing")
        if not value.strip():
            return ""
        try:
            path = Path(value.strip()).expanduser().absolute()
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{quoted(value)} cannot be used; {error}") from error
        if not path.name or value.endswith("/"):
            raise ValueError(f"{quoted(value)} names a directory; name a file in it, such as {path}/kvoffd.pool")
        return str(path)

    return field(default="", metadata={"kind": Kind("PATH", parse, str), "description": description})


def _address(default: str, description: str) -> str:
    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{quoted(value)} is not an address; write host:port, such as 127.0.0.1:9464")
        text = value.strip()
        if text:
            parse_address(text)
        return text

    return field(default=default, metadata={"kind": Kind("HOST:PORT", parse, str), "description": description})


def _path(description: str, example: str) -> str:
    def parse(value: object) -> str:
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"{quoted(value)} is not a path; name {example}")
        return value.strip()

    return field(default="", metadata={"kind": Kind("PATH", parse, str), "description": description})


def _whole(value: Value) -> int:
    assert isinstance(value, int)
    return value


@dataclass(frozen=True, kw_only=True)
class Config:
    """What the daemon runs with. Units end the names; 0 and nothing mean what the descriptions say."""

    directory: Path = field(
        default_factory=default_directory,
        metadata=_directory("Directory of the three sockets; made with mode 0750 where it is missing."),
    )
    pool_bytes: int = _size(4 * 1024**3, MIN_POOL_BYTES, "Memory for blocks, taken at the start and kept.")
    log_level: str = _choice("info", LOG_LEVELS, "Least severity that is logged.")
    log_format: str = _choice("text", LOG_FORMATS, "One line of text, or one JSON object, per log record.")
    eviction_policy: str = _choice("lru", EVICTION_POLICIES, "Which blocks go first when the pool is full.")
    pool_file: str = _file(
        "File on tmpfs or hugetlbfs to keep the pool in, for the next daemon to go on with; nothing for plain memory."
    )
    numa: str = _choice(
        "auto",
        ("auto", "off"),
        "Whether the pool is spread over the NUMA nodes of the GPUs, each GPU's blocks on its own.",
    )
    disk: tuple[DiskSize, ...] = _disks(
        "Directory of a local SSD that keeps blocks which leave the pool, and how much of it; may be given again."
    )
    disk_write: str = _choice(
        "reuse",
        DISK_WRITES,
        "What is written to disk: every block, those used twice or next to be evicted while the disk is idle, all that "
        "are next to be evicted, or none.",
    )
    disk_write_per_day: int = _size(0, 0, "Bytes that may be written to disk in a day, for its wear; 0 for no bound.")
    disk_write_rate: int = _size(0, 0, "Bytes that may be written to disk in a second; 0 for no bound.")
    disk_deadline_s: float = _duration(
        5.0, 0.1, "A block that was asked for and has not come from disk by then is a miss."
    )
    touch_threads: int = _number(0, 0, 256, "Threads that touch the pool at the start; 0 chooses by the cores.")
    copy_threads: int = _number(1, 1, 64, "Threads that copy between host memory and the pool, for each direction.")
    verify_share: float = _share(
        1 / 64, "Share of the loads that compare blocks with their checksums; 0 leaves it to adopted blocks and scrubs."
    )
    allowed_uids: tuple[int, ...] = _ids("Users that may connect; where nothing is given, root and the daemon's own.")
    allowed_gids: tuple[int, ...] = _ids("Groups whose users may connect; where nothing is given, the daemon's own.")
    admin_uids: tuple[int, ...] = _ids("Of those, users that may administer; where nothing is given, all of them.")
    block_access: str = _choice(
        "off", BLOCK_ACCESS, "Whether operators may read single blocks, as export does, or write and pin them too."
    )
    block_uids: tuple[int, ...] = _ids("Users who may do so; where nothing is given, root and the daemon's own.")
    http_address: str = _address(
        "127.0.0.1:9464", "Address of /metrics, /healthz and /readyz; nothing switches it off."
    )
    admin_address: str = _address("", "TCP address of administration, for known keys only; nothing switches it off.")
    admin_key_file: str = _path(
        "File of the daemon's secret key for admin_address; kvoffd-cli keygen makes it.",
        "a file, such as /etc/kvoffd/admin.key",
    )
    admin_clients_file: str = _path(
        "File of the public keys that may administer over admin_address, one on a line.",
        "a file, such as /etc/kvoffd/admin.clients",
    )
    credit_bytes: int = _size(
        0, 0, "Bytes of stores a session may have outstanding; 0 takes an eighth of the pool, at most 1GiB."
    )
    lease_ttl_s: float = _duration(30.0, 0.1, "Life of a lease that nobody renews.")
    half_stored_timeout_s: float = _duration(60.0, 0.1, "After this long a block that still lacks a shard is dropped.")
    job_deadline_s: float = _duration(30.0, 0.1, "A job that has not ended by then is failed.")
    shutdown_deadline_s: float = _duration(10.0, 0.0, "How long running jobs may finish after SIGTERM.")
    heartbeat_interval_s: float = _duration(2.0, 0.01, "How often clients are told to send a heartbeat.")
    event_buffer_steps: int = _number(10_000, 1, 10_000_000, "KV event messages kept for replay.")
    max_frame_bytes: int = _size(16 * 1024**2, 4096, "Largest request frame.")
    max_sessions: int = _number(256, 1, 65_536, "Open sessions.")
    max_namespaces: int = _number(1024, 1, 65_536, "Open namespaces.")
    max_jobs_in_flight: int = _number(4096, 1, 1_000_000, "Unfinished jobs of a session.")
    max_keys_per_request: int = _number(65_536, 1, 10_000_000, "Keys in one request.")
    max_leases: int = _number(16_384, 1, 1_000_000, "Live leases of a session.")
    max_registrations: int = _number(8, 1, 1024, "Registrations of a session.")
    max_segments: int = _number(16_384, 1, 65_536, "Memory segments of a session.")
    cuda_library: str = _path(
        "Path of the CUDA driver's library; empty for the system's.", "a library, such as /usr/lib/libcuda.so.1"
    )


@dataclass(frozen=True)
class Setting:
    """One field of Config as users see it."""

    field_name: str
    kind: Kind
    description: str

    @property
    def name(self) -> str:
        """Key in TOML and in ``kvoffd config``."""
        if self.field_name.endswith("_bytes"):
            return f"{self.field_name.removesuffix('_bytes')}_size"
        return self.field_name.removesuffix("_s")

    @property
    def flag(self) -> str:
        """Option on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """Variable of the environment."""
        return f"{VARIABLE_PREFIX}{self.name.upper()}"


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(item.name, item.metadata["kind"], item.metadata["description"]) for item in dataclasses.fields(Config)
)


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and, per field of it, where the value came from (``default``, ``flag --pool-size``, ...)."""

    config: Config
    sources: dict[str, str]


def load_config(
    flags: Mapping[str, str | list[str] | None], environ: Mapping[str, str], config_path: str | Path | None = None
) -> LoadedConfig:
    """Put the configuration together.

    Args:
        flags: By setting name (``pool_size``), the text given on the command line, or the texts where a flag may be
            given again; None where it was not given.
        environ: The environment; ``KVOFFD_CONFIG`` in it names the file when ``config_path`` is None.
        config_path: The TOML file; None for none.

    Raises:
        ConfigError: a file that cannot be read, an unknown setting, an impossible value.
    """
    path = config_path if config_path is not None else environ.get(CONFIG_VARIABLE) or None
    layers = [_from_file(Path(path)) if path is not None else {}, _from_environ(environ), _from_flags(flags)]
    values: dict[str, Value] = {}
    sources = {setting.field_name: "default" for setting in SETTINGS}
    for layer in layers:
        for setting in SETTINGS:
            if setting.name in layer:
                given, source = layer[setting.name]
                values[setting.field_name] = _parse(setting, given, source)
                sources[setting.field_name] = source
    config = dataclasses.replace(Config(), **values)  # type: ignore[arg-type]
    _check_together(config, sources)
    return LoadedConfig(config, sources)


_Layer: TypeAlias = dict[str, tuple[object, str]]


def _from_file(path: Path) -> _Layer:
    try:
        table = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"The configuration file {path} is not valid TOML: {error}.") from error
    names = {setting.name for setting in SETTINGS}
    for key, value in table.items():
        if key not in names:
            raise ConfigError(_unknown(f"The key {quoted(key)} (value {quoted(value)}) in {path}", key, names))
    return {key: (value, f"file {path}") for key, value in table.items()}


def _from_environ(environ: Mapping[str, str]) -> _Layer:
    by_variable = {setting.variable: setting.name for setting in SETTINGS}
    layer: _Layer = {}
    for variable in sorted(environ):
        if not variable.startswith(VARIABLE_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if variable in by_variable:
            layer[by_variable[variable]] = (environ[variable], f"variable {variable}")
        elif not _SERVICE_LINK.fullmatch(variable):
            where = f"The environment variable {variable} (value {quoted(environ[variable])})"
            raise ConfigError(_unknown(where, variable, set(by_variable)))
    return layer


def _from_flags(flags: Mapping[str, str | list[str] | None]) -> _Layer:
    by_name = {setting.name: setting for setting in SETTINGS}
    layer: _Layer = {}
    for name, text in flags.items():
        if name not in by_name:
            raise ConfigError(_unknown(f"The flag {quoted(name)} (value {quoted(text)})", name, set(by_name)))
        if text is not None:
            layer[name] = (text, f"flag {by_name[name].flag}")
    return layer


def _unknown(where: str, key: str, names: set[str]) -> str:
    import difflib  # only errors need it

    close = difflib.get_close_matches(key, sorted(names), n=1)
    advice = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(names))}."
    return f"{where} is unknown; {advice}"


def _parse(setting: Setting, given: object, source: str) -> Value:
    try:
        return setting.kind.parse(given)
    except (UnitError, ValueError) as error:
        raise ConfigError(f"{setting.name} ({source}): {error}.") from error


def _check_together(config: Config, sources: Mapping[str, str]) -> None:
    """Refuse values that are possible one by one but not together."""
    if config.admin_address and not (config.admin_key_file and config.admin_clients_file):
        raise ConfigError(
            f"admin_address is {config.admin_address} ({sources['admin_address']}), but admin_key_file or "
            "admin_clients_file is not set; administration over TCP is for known keys only."
        )
    heartbeat_interval, lease_ttl = exact_duration(config.heartbeat_interval_s), exact_duration(config.lease_ttl_s)
    if config.heartbeat_interval_s >= config.lease_ttl_s:
        raise ConfigError(
            f"heartbeat_interval is {heartbeat_interval} ({sources['heartbeat_interval_s']}), but lease_ttl is "
            f"{lease_ttl} ({sources['lease_ttl_s']}); heartbeats renew leases and must be more frequent."
        )
    if config.credit_bytes > config.pool_bytes:
        raise ConfigError(
            f"credit_size is {exact_size(config.credit_bytes)} ({sources['credit_bytes']}), but pool_size is "
            f"{exact_size(config.pool_bytes)} ({sources['pool_bytes']}); credits cannot exceed the pool."
        )
