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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from kvoffd.cache.policies import DEFAULT_POLICY, POLICY_NAMES
from kvoffd.settings import (
    DiskSize,
    Kind,
    Value,
    address_setting,
    choice_setting,
    did_you_mean,
    directory_setting,
    disks_setting,
    duration_setting,
    file_setting,
    ids_setting,
    number_setting,
    path_setting,
    share_setting,
    size_setting,
    urls_setting,
)
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiers.shared.store import PASSWORD_VARIABLE, check_url
from kvoffd_proto.limits import MAX_JOBS
from kvoffd_proto.sockets import default_directory, is_utf8
from kvoffd_proto.units import exact_duration, exact_size, quoted

VARIABLE_PREFIX = "KVOFFD_"
CONFIG_VARIABLE = "KVOFFD_CONFIG"
# Kubernetes tells every pod about a Service named kvoffd by variables of these names: they are not ours.
_SERVICE_LINK = re.compile(r"KVOFFD(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_.+)?)")

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


class ConfigError(Exception):
    """The configuration is refused. The text is one sentence that names the setting, its value and its source."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """What the daemon runs with. Units end the names; 0 and nothing mean what the descriptions say."""

    directory: Path = field(
        default_factory=default_directory,
        metadata=directory_setting("Directory of the three sockets; made with mode 0750 where it is missing."),
    )
    pool_bytes: int = size_setting(4 * 1024**3, 1024**2, "Memory for blocks, taken at the start and kept.")
    log_level: str = choice_setting("info", LOG_LEVELS, "Lowest severity that is logged.")
    log_format: str = choice_setting("text", LOG_FORMATS, "One line of text, or one JSON object, per log record.")
    eviction_policy: str = choice_setting(
        DEFAULT_POLICY, POLICY_NAMES, "Which blocks are stored, and which are evicted first, when the pool is full."
    )
    pool_file: str = file_setting(
        "File on tmpfs or hugetlbfs that keeps the pool for the next daemon; nothing for plain memory."
    )
    numa: str = choice_setting(
        "auto",
        ("auto", "off"),
        "Whether the pool is spread over the NUMA nodes of the GPUs, each GPU's blocks on its own node.",
    )
    disk: tuple[DiskSize, ...] = disks_setting(
        "Directory of a local SSD for blocks that leave the pool, and the most to take there; may be given again."
    )
    disk_write: str = choice_setting(
        TieringSettings.mode.value,
        tuple(mode.value for mode in WriteMode),
        "Which blocks are written to disk: every block, those used twice or next to be evicted while the disk is idle, "
        "all that are next to be evicted, or none.",
    )
    disk_write_bytes_per_day: int = size_setting(
        0, 0, "Bytes that may be written to disk in a day, for its wear; 0 for no bound."
    )
    disk_write_bytes_per_s: int = size_setting(0, 0, "Bytes that may be written to disk in a second; 0 for no bound.")
    disk_deadline_s: float = duration_setting(
        TieringSettings.deadline_s,
        0.1,
        "Time for a block to come from disk; a block that has not come by then is a miss.",
    )
    shared: tuple[str, ...] = urls_setting(
        check_url,
        "URL of a store that nodes share; may be repeated: redis://host:port, rediss:// for TLS, redis+cluster:// and "
        "any server of a cluster, s3://bucket/prefix?endpoint=url&region=name.",
    )
    shared_password_file: str = path_setting(
        "File with the password for the shared store, or user:password, in its first line; for the n-th URL in the "
        "n-th.",
        "a file, such as /etc/kvoffd/shared.password",
    )
    shared_write: str = choice_setting(
        TieringSettings.mode.value,
        tuple(mode.value for mode in WriteMode),
        "Which blocks are written to each shared store, as of disk_write.",
    )
    shared_write_bytes_per_s: int = size_setting(
        0, 0, "Bytes that may be written to each shared store in a second; 0 for no bound."
    )
    shared_ask_deadline_s: float = duration_setting(
        0.0,
        0.0,
        "Time for a shared store to answer whether it has a block; without an answer it is a miss. 0 is 20 ms, of S3 "
        "100 ms.",
    )
    shared_deadline_s: float = duration_setting(
        2.0, 0.1, "Time for a block to come from a shared store; a block that has not come by then is a miss."
    )
    touch_threads: int = number_setting(
        0, 0, 256, "Threads that touch the pool at the start; 0 chooses their number by the cores."
    )
    copy_threads: int = number_setting(
        1, 1, 64, "Threads that copy between host memory and the pool, for each direction."
    )
    verify_share: float = share_setting(
        1 / 64, "Share of the loads that compare blocks with their checksums; at 0 only adopted blocks and scrubs do."
    )
    allowed_uids: tuple[int, ...] = ids_setting(
        "Users that may connect, beside root and the daemon's own user, who always may."
    )
    allowed_gids: tuple[int, ...] = ids_setting(
        "Groups whose users may connect; where nothing is given, the daemon's own group."
    )
    admin_uids: tuple[int, ...] = ids_setting(
        "Users that may administer; where nothing is given, all that may connect."
    )
    http_address: str = address_setting(
        "127.0.0.1:9464", "Address of /metrics, /healthz and /readyz; nothing switches it off."
    )
    credit_bytes: int = size_setting(
        0, 0, "Bytes of stores a session may have outstanding; 0 takes an eighth of the pool, at most 1GiB."
    )
    lease_ttl_s: float = duration_setting(30.0, 0.1, "Lifetime of a lease that nobody renews.")
    half_stored_timeout_s: float = duration_setting(
        60.0,
        0.1,
        "Time after which a block that still lacks a shard is dropped; it is earlier where such blocks have more than "
        "a quarter of the pool and others need room.",
    )
    job_deadline_s: float = duration_setting(30.0, 0.1, "Time after which an unfinished job is failed.")
    shutdown_deadline_s: float = duration_setting(10.0, 0.0, "How long running jobs may finish after SIGTERM.")
    heartbeat_interval_s: float = duration_setting(2.0, 0.01, "Interval at which clients send a heartbeat.")
    event_buffer_steps: int = number_setting(10_000, 1, 10_000_000, "KV event messages kept for replay.")
    max_frame_bytes: int = size_setting(2 * 1024**2, 4096, "Largest frame of a request.")
    max_sessions: int = number_setting(256, 1, 65_536, "Most open sessions.")
    max_namespaces: int = number_setting(1024, 1, 65_536, "Most open namespaces.")
    max_jobs_in_flight: int = number_setting(4096, 1, 1_000_000, "Most unfinished jobs of a session.")
    namespaces_bytes: int = size_setting(
        64 * 1024**2, 1024**2, "Memory for all namespaces beside their blocks; one may take an eighth of it."
    )
    sessions_bytes: int = size_setting(
        192 * 1024**2,
        16 * 1024**2,
        "Memory for what sessions have open: leases, jobs, completions, registrations. Half of it is kept for all "
        "sessions in equal parts, the rest for those that need more.",
    )
    index_bytes: int = size_setting(
        0,
        64 * 1024,
        "Memory for what is known of the blocks in the pool, 600 bytes for each and 56 for each further slot of it; 0 "
        "takes a 64th of the pool, at least 128MiB. Beyond it blocks are evicted.",
    )
    max_jobs_per_message: int = number_setting(1024, 1, MAX_JOBS, "Most stores and loads in one message.")
    max_keys_per_job: int = number_setting(4096, 1, 1_000_000, "Most keys in one store or load.")
    max_pieces_per_job: int = number_setting(
        16_384, 1, 10_000_000, "Most pieces of one store or load: its block ids times the layers of their group."
    )
    max_pieces_in_flight: int = number_setting(
        262_144, 1, 100_000_000, "Most pieces of a session's unfinished jobs; a key counts as eight or more."
    )
    max_keys_per_request: int = number_setting(
        8192, 1, 10_000_000, "Most keys in one request: a lookup, an invalidation, or the jobs of one message together."
    )
    max_leases: int = number_setting(16_384, 1, 1_000_000, "Most live leases of a session.")
    leased_share: float = share_setting(
        0.875,
        "Share of the pool that leases may hold; once half of it is taken, the sessions that hold leases get equal "
        "parts, and lookups beyond them are told of fewer keys.",
        least=0.01,
    )
    max_leased_keys: int = number_setting(1_048_576, 1, 100_000_000, "Most keys under all leases of a session.")
    max_registrations: int = number_setting(8, 1, 1024, "Most registrations of a session.")
    max_segments: int = number_setting(16_384, 1, 65_536, "Most memory segments of a session.")
    cuda_library: str = path_setting(
        "Path of the CUDA driver's library; nothing for the system's library.",
        "a library, such as /usr/lib/libcuda.so.1",
    )
    cuda_batches: str = choice_setting(
        "auto",
        ("auto", "off"),
        "Whether small pieces are copied in batches where the CUDA driver knows them, or always one by one.",
    )
    cuda_gather: str = choice_setting(
        "off",
        ("off", "on"),
        "Whether pieces under 32 KiB go by way of a buffer on the GPU, which a kernel of the daemon fills and empties.",
    )
    pin_pool: str = choice_setting(
        "start",
        ("start", "use"),
        "When the pool is pinned for GPUs: at the start where one is visible, or with the first engine on one.",
    )
    pin_linger_s: float = duration_setting(
        600.0, 0.0, "How long the pool stays pinned after the last engine on a GPU has left."
    )


_ENDINGS = {"_bytes_per_day": "_per_day", "_bytes_per_s": "_rate", "_bytes": "_size", "_s": ""}
"""What the name of a setting has in place of the unit that ends its field's name."""


@dataclass(frozen=True)
class Setting:
    """One field of Config as users see it."""

    field_name: str
    kind: Kind
    description: str

    @property
    def name(self) -> str:
        for unit, ending in _ENDINGS.items():
            if self.field_name.endswith(unit):
                return self.field_name.removesuffix(unit) + ending
        return self.field_name

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
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
                if not all(map(is_utf8, given if isinstance(given, list) else [given])):
                    raise ConfigError(f"{setting.name} ({source}): what is given is not UTF-8; choose another name.")
                try:
                    values[setting.field_name] = setting.kind.parse(given)
                except ValueError as error:
                    raise ConfigError(f"{setting.name} ({source}): {error}.") from error
                sources[setting.field_name] = source
    config = dataclasses.replace(Config(), **values)  # type: ignore[arg-type]
    _check_together(config, sources)
    return LoadedConfig(config, sources)


def given_log_format(
    flags: Mapping[str, str | list[str] | None], environ: Mapping[str, str], config_path: str | Path | None = None
) -> str:
    """The log format that a configuration asks for which is refused: how to say so. Arguments as of ``load_config``."""
    path = config_path if config_path is not None else environ.get(CONFIG_VARIABLE) or None
    given = flags.get("log_format") or environ.get(f"{VARIABLE_PREFIX}LOG_FORMAT")
    if not given and path is not None:
        try:
            found = re.search(
                r"""^\s*log_format\s*=\s*["'](\w+)""", Path(path).read_text(errors="replace"), re.MULTILINE
            )
        except OSError:
            found = None
        given = found[1] if found else None
    return "json" if given == "json" else "text"


_Layer: TypeAlias = dict[str, tuple[object, str]]


def _from_file(path: Path) -> _Layer:
    try:
        table = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"The configuration file {path} is not valid TOML: {error}. Sizes, durations and other text need quotes, "
            'as in pool_size = "64MiB".'
        ) from error
    names = [setting.name for setting in SETTINGS]
    for key, value in table.items():
        _check_known(key, names, f"The key {quoted(key)} (value {quoted(value)}) in {path}")
    return {key: (value, f"file {path}") for key, value in table.items()}


def _from_environ(environ: Mapping[str, str]) -> _Layer:
    by_variable = {setting.variable: setting.name for setting in SETTINGS}
    layer: _Layer = {}
    for variable in sorted(environ):
        ours = variable.startswith(VARIABLE_PREFIX) and variable not in (CONFIG_VARIABLE, PASSWORD_VARIABLE)
        if ours and not _SERVICE_LINK.fullmatch(variable):
            where = f"The environment variable {variable} (value {quoted(environ[variable])})"
            _check_known(variable, by_variable, where)
            layer[by_variable[variable]] = (environ[variable], f"variable {variable}")
    return layer


def _from_flags(flags: Mapping[str, str | list[str] | None]) -> _Layer:
    flag_of = {setting.name: setting.flag for setting in SETTINGS}
    for name, text in flags.items():
        _check_known(name, flag_of, f"The flag {quoted(name)} (value {quoted(text)})")
    return {name: (text, f"flag {flag_of[name]}") for name, text in flags.items() if text is not None}


def _check_known(key: str, names: Collection[str], where: str) -> None:
    if key not in names:
        advice = did_you_mean(key, names) or f"known are {', '.join(sorted(names))}."
        raise ConfigError(f"{where} is unknown; {advice}")


def _check_together(config: Config, sources: Mapping[str, str]) -> None:
    """Refuse values that are possible one by one but not together."""
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
