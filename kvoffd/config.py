"""The daemon's configuration: flags override ``KVOFFD_*`` variables, a TOML file and defaults, in this order.

The fields of ``Config`` are the only list of settings: flags, variables, TOML keys, help and ``kvoffd config`` are made
from it. A value carries its unit, so a setting's name has none: ``pool_bytes`` is ``pool_size`` in the file,
``--pool-size`` on the command line and ``KVOFFD_POOL_SIZE`` in the environment. ``ServerLimits`` are constants, which
only tests change.
"""

from __future__ import annotations

import dataclasses
import grp
import ipaddress
import os
import pwd
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from kvoffd.cache import DEFAULT_POLICY, POLICY_NAMES
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiers import DISK_NAME
from kvoffd.tiers.store import PASSWORD_VARIABLE, check_url
from kvoffd_proto.paths import SocketPaths, default_directory, is_utf8
from kvoffd_proto.units import exact_duration, exact_size, format_size, is_host, parse_duration, parse_size, quoted

VARIABLE_PREFIX = "KVOFFD_"
CONFIG_VARIABLE = "KVOFFD_CONFIG"
# Kubernetes sets variables of these names in every pod for a Service named kvoffd: they are ignored.
_SERVICE_LINK = re.compile(r"KVOFFD(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_.+)?)")

MAX_PEERS = 8
"""Peers that can be named."""
PEER_PLACES = 8
"""Nodes of networks and behind names that are connected at once."""
DNS = "dns+"
"""Beginning of a name in ``peers`` all of whose addresses are nodes."""
MIN_DISK_BYTES = 16 * 1024**2


class ConfigError(Exception):
    """An invalid configuration. The text is one sentence that names the setting, its value and its source."""


class DiskSize(NamedTuple):
    """A directory and the bytes that the daemon allocates there."""

    directory: str
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.directory}={exact_size(self.size_bytes)}"


class SettingKind(NamedTuple):
    """Type of a setting's values."""

    parse: Callable[[Any], Any]
    """Parser of a text or a TOML value. Raises ValueError with half a sentence that says what is allowed."""
    metavar: str
    show: Callable[[Any], str] = str
    """Inverse of ``parse``: the text of a value."""
    repeated: bool = False
    """Whether the flag may be repeated."""

    def setting(self, default: Any, description: str) -> Any:
        """Return a field of ``Config``; its description says what it does, then when to change it."""
        metadata = {"kind": self, "description": description}
        given = {"default_factory" if callable(default) else "default": default}
        return field(**given, metadata=metadata)


# --- how values are read --------------------------------------------------------------------------


def size(minimum: int) -> SettingKind:
    def parse(value: Any) -> int:
        if (found := parse_size(value)) >= minimum:
            return found
        digits, hint = str(value).strip(), ""
        if digits.isdecimal() and found > 0:
            hint = f". A number without a unit is bytes: write {digits}GiB"
        raise ValueError(f"{quoted(value)} is too small; at least {exact_size(minimum)} is needed{hint}")

    return SettingKind(parse, "SIZE", exact_size)


def duration(minimum: float) -> SettingKind:
    def parse(value: Any) -> float:
        if (found := parse_duration(value)) < minimum:
            raise ValueError(f"{quoted(value)} is too short; at least {exact_duration(minimum)} is needed")
        return found

    return SettingKind(parse, "DURATION", exact_duration)


def number(minimum: int, maximum: int) -> SettingKind:
    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,20}\s*", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{quoted(value)} is not a whole number; {minimum} to {maximum} are allowed")
        if not minimum <= value <= maximum:
            raise ValueError(f"{quoted(str(value))} is out of range; {minimum} to {maximum} are allowed")
        return value

    return SettingKind(parse, "N")


def _share(value: object) -> float:
    try:
        part = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else -1.0
    except ValueError:
        part = -1.0
    if not 0.0 <= part <= 1.0:
        raise ValueError(f"{quoted(value)} is not a share; 0 to 1 are allowed, such as 0.015625 for one in 64")
    return part


def choice(*choices: str) -> SettingKind:
    def parse(value: object) -> str:
        if not isinstance(value, str) or value.strip().lower() not in choices:
            raise ValueError(f"{quoted(value)} is unknown; choose {' or '.join(choices)}")
        return value.strip().lower()

    return SettingKind(parse, "|".join(choices))


def _per_day(value: object) -> int | None:
    """Return bytes a day, 0 for no limit; None for ``auto``."""
    if isinstance(value, str) and value.strip().lower() == AUTO:
        return None
    try:
        return parse_size(value)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{error}; or auto, or 0 for no limit") from None


def _ids(id_of: Callable[[str], int], value: object) -> tuple[int, ...]:
    """Return ids; ``id_of`` returns that of a name, or raises KeyError."""
    parts = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise ValueError(f"{quoted(value)} is not a list of names or ids; write them with commas, such as 0,vllm")
    found = set()
    for part in parts:
        text = str(part).strip() if isinstance(part, (int, str)) and not isinstance(part, bool) else ""
        try:
            number = int(text) if re.fullmatch("[0-9]{1,10}", text) else id_of(text)
        except (KeyError, ValueError):
            number = -1
        if not 0 <= number < 2**32 - 1:
            raise ValueError(f"{quoted(part)} is neither a name that this machine knows nor an id below {2**32 - 1}")
        found.add(number)
    return tuple(sorted(found))


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{quoted(value)} is not {what}")
    return value.strip()


def _absolute(name: str, value: object) -> Path:
    """Return the absolute path of a part of a value, whose text has no space around it. Raises ValueError."""
    try:
        return Path(name).expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{quoted(value)} cannot be used; {error}") from error


def listed(
    metavar: str, what: str, read: Callable[[str], Any], most: int = 0, name_of: Callable[[Any], str] = str
) -> SettingKind:
    """Return the kind of a list, or of a text with commas, of at most ``most`` parts (0: any number).

    ``read`` checks a part and returns it. Two parts of one name are refused; ``name_of`` returns a part's.
    """

    def parse(value: object) -> tuple[Any, ...]:
        parts = [value] if isinstance(value, str) else value
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise ValueError(f"it is not a list of {what}")
        found = tuple(read(one.strip()) for part in parts for one in part.split(",") if one.strip())
        names = [name_of(one) for one in found]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{quoted(name)} is given twice; give each once")
        if most and len(found) > most:
            raise ValueError(f"it has {len(found)} parts; at most {most} are allowed")
        return found

    return SettingKind(parse, metavar, lambda values: ",".join(map(str, values)), repeated=True)


def _disk(value: str) -> DiskSize:
    name, _, size_text = _text(value, "a directory and a size").rpartition("=")
    if not (directory := name.strip()):
        raise ValueError(f"{quoted(value)} is not a directory and a size; write them as in /mnt/nvme0/kvoffd=500GiB")
    path = _absolute(directory, value)
    try:
        return DiskSize(str(path), size(MIN_DISK_BYTES).parse(size_text))
    except ValueError as error:
        raise ValueError(f"{quoted(value)} cannot be used; {error}") from error


def _directory(value: object) -> Path:
    what = "a path; name a directory, such as /run/kvoffd"
    if not (text := _text(value, what)):
        raise ValueError(f"{quoted(value)} is not {what}")
    path = _absolute(text, value)
    if problem := SocketPaths(path).problem():
        raise ValueError(f"{quoted(value)} cannot be used; {problem[0].lower()}{problem[1:].rstrip('.')}")
    return path


def _pool_file(value: object) -> str:
    text = _text(value, "a path; name a file, such as /dev/shm/kvoffd.pool, or nothing")
    if not text:
        return ""
    path = _absolute(text, value)
    if not path.name or text.endswith("/"):
        raise ValueError(f"{quoted(value)} names a directory; name a file in it, such as {path}/kvoffd.pool")
    return str(path)


def file(example: str) -> SettingKind:
    return SettingKind(lambda value: _text(value, f"a path; name a file, such as {example}"), "PATH")


def _address(value: object) -> str:
    if text := _text(value, "an address; write host:port, such as 127.0.0.1:9464"):
        parse_address(text)
    return text


def parse_address(text: str) -> tuple[str, int]:
    """Read ``host:port``, with brackets around an IPv6 host. Raises ValueError with half a sentence."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not (colon and re.fullmatch("[0-9]{1,5}", port) and int(port) < 65536 and is_host(host)):
        raise ValueError(
            f"{quoted(text)} is not an address; write host:port, such as 127.0.0.1:9464, or an empty text to disable it"
        )
    return host, int(port)


Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


class Peer(NamedTuple):
    """A part of the setting ``peers``: one node, the nodes of a network, or the nodes behind a name.

    Attributes:
        text: as it is configured.
        has_many: ``host`` is a name all of whose addresses are nodes.
    """

    text: str
    host: str | Network
    port: int
    has_many: bool = False

    @property
    def is_one(self) -> bool:
        """Whether it is a single node."""
        return isinstance(self.host, str) and not self.has_many


def parse_peer(text: str) -> Peer:
    """Read ``host:port``, ``network:port`` as ``10.0.0.0/16:7400``, or ``dns+host:port`` for all addresses of a name.

    Raises ValueError with half a sentence.
    """
    try:
        if text.startswith(DNS):
            return Peer(text, *parse_address(text.removeprefix(DNS)), has_many=True)
        network, _, port = text.rpartition(":")
        if "/" in network:
            _, number = parse_address(f"localhost:{port}")  # any host: only the port is read
            return Peer(text, ipaddress.ip_network(network.strip("[]")), number)
        return Peer(text, *parse_address(text))
    except ValueError:
        raise ValueError(
            f"{quoted(text)} is not a peer; write node-b:7400, a network by its first address as 10.0.0.0/16:7400, or "
            "dns+NAME:7400"
        ) from None


def peer_addresses(peers: Collection[str]) -> list[str]:
    """Return the address of each peer that is connected at once, "" for a place that many peers share."""
    fixed = [one for one in peers if parse_peer(one).is_one]
    return fixed if len(fixed) == len(peers) else [*fixed, *[""] * PEER_PLACES]


def _checked(check: Callable[[str], object], text: str) -> str:
    check(text)
    return text


def _host_name(text: str) -> str:
    if text != "*" and not (is_host(text) and ":" not in text and "/" not in text):
        raise ValueError(
            f"{quoted(text)} is not a name; write it as in kvoffd.example.com, without a port, or * for all"
        )
    return text.lower().rstrip(".")


DIRECTORY = SettingKind(_directory, "PATH")
UIDS, GIDS = (
    SettingKind(partial(_ids, id_of), "IDS", lambda ids: ",".join(map(str, ids)))
    for id_of in (lambda name: pwd.getpwnam(name).pw_uid, lambda name: grp.getgrnam(name).gr_gid)
)
WRITE_MODE = choice(*(mode.value for mode in WriteMode))
AUTO = "auto"
PER_DAY = SettingKind(_per_day, f"SIZE|{AUTO}", lambda nbytes: AUTO if nbytes is None else exact_size(nbytes))

# --- the settings ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerLimits:
    """Limits and deadlines that no user needs to change. Units end the names.

    They let one request block the loop for at most 5 ms (``make bench ARGS=loop``). Clients get theirs in Welcome
    and split larger requests.
    """

    max_frame_bytes: int = 2 * 1024**2
    max_keys_per_request: int = 8192
    max_keys_per_submit: int = 512
    max_jobs_per_message: int = 1024
    max_jobs_in_flight: int = 4096
    max_pieces_in_flight: int = 65_536
    """Limit per session on pieces (block ids times layers) of unfinished jobs, or twice the pieces of its memory if
    more: only a client that copies blocks several times at once reaches it."""
    max_registrations: int = 8
    max_leases: int = 16_384
    max_leased_keys: int = 1_048_576
    """Limit per session, as those of jobs, registrations and leases."""
    max_segments: int = 16_384
    """Limit per session; a GPU's KV cache may consist of thousands of chunks."""
    max_namespaces: int = 64
    """Limit of namespaces that are open or have blocks. A node serves one to ten models; each change of their weights
    makes another namespace."""
    max_quotas: int = 1024
    """Limit of namespaces with a quota, open or not."""
    credit_bytes: int = 0
    """Bytes of stores that all clients together are asked to have outstanding at most; 0 is an eighth of the pool, at
    most 1 GiB."""
    leased_share: float = 0.875
    """Share of the pool that all leases together may pin, promoted blocks included; beyond half of it a session gets at
    most an equal part, and never more than what is left."""
    lease_ttl_s: float = 600.0
    partial_timeout_s: float = 60.0
    """Time after which a block that lacks a rank's shard is dropped."""
    job_deadline_s: float = 30.0
    totals_every_s: float = 10.0
    """Interval between saves of the totals that outlive the daemon; a killed daemon loses the last interval."""
    pin_linger_s: float = 600.0
    """Time for which the pool stays pinned after the last engine on a GPU has left."""
    resolve_s: float = 30.0
    """Interval at which names of many peers are resolved, as long as a cluster's DNS keeps an answer."""
    touch_threads: int = 0
    """Threads that touch the pool at the start; 0 derives their number from the cores."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the daemon. Units end the names."""

    directory: Path = DIRECTORY.setting(  # noqa: RUF009 - it is a field
        default_directory,
        "Directory of the daemon's three sockets, created with mode 0750 if missing. Change it for a second daemon on "
        "one machine, or to a volume that pods share.",
    )
    pool_bytes: int = size(1024**2).setting(
        4 * 1024**3,
        "Memory for blocks, allocated at the start. Set it to what the machine can spare: more memory, more hits.",
    )
    pool_file: str = SettingKind(_pool_file, "PATH").setting(
        "",
        "File on tmpfs or hugetlbfs that keeps the pool for the next daemon. Set it if systemd cannot keep the memory "
        "over a restart, as in containers.",
    )
    numa: str = choice("auto", "off").setting(
        "auto",
        "Whether the pool is spread over the NUMA nodes of the GPUs, with each GPU's blocks on its own node. Switch it "
        "off if something else places memory.",
    )
    reserved_pages: str = choice("auto", "off").setting(
        "auto",
        "Whether a new pool of 1 GiB or more takes huge pages that the administrator reserved (vm.nr_hugepages), if "
        "all of it fits into them. Switch it off if they are for other programs.",
    )
    eviction_policy: str = choice(*POLICY_NAMES).setting(
        DEFAULT_POLICY,
        "Which blocks are stored, and which are evicted first when the pool is full: by what was learned of their "
        "reuse, the least recently used, or in two queues for blocks used once and used again. Before you change it, "
        "compare policies on a recording of your own traffic with `kvoffd-cli trace replay`.",
    )
    disk: tuple[DiskSize, ...] = listed(
        "DIRECTORY=SIZE",
        "directories and sizes, such as /mnt/nvme0/kvoffd=500GiB",
        _disk,
        name_of=attrgetter("directory"),
    ).setting(
        (),
        "Directory of a local SSD for blocks that leave the pool, and the bytes to allocate there. Repeat it for each "
        "SSD.",
    )
    disk_start: str = choice("required", "optional").setting(
        "required",
        "Whether the daemon refuses to start if a disk's directory is missing, not writable or too full (required), or "
        "starts without that disk (optional). Choose optional if a pool without disks is better than none.",
    )
    disk_write: str = WRITE_MODE.setting(
        TieringSettings.mode.value,
        "Which blocks are written to disk: every block while the disk has space, then those that are likely to be "
        "reused (auto); every block (always); or none (never). Choose never to only read a disk.",
    )
    disk_write_bytes_per_day: int | None = PER_DAY.setting(
        None,
        "Bytes that may be written to all disks in a day after each was filled once; 0 is no limit; auto is the disks' "
        "size, but no limit with disk_write always. Set it to the rated endurance of your SSDs.",
    )
    disk_deadline_s: float = duration(0.1).setting(
        TieringSettings.deadline_s,
        "Time for a disk to read a block, without queueing; later it is a miss. Raise it for disks that pause.",
    )
    shared: tuple[str, ...] = listed(
        "URL", "URLs, such as redis://valkey.example:6379", partial(_checked, check_url)
    ).setting(
        (),
        "Store that nodes share: redis://host:port, rediss:// for TLS, redis+cluster:// and any server of a cluster, "
        "s3://bucket/prefix?endpoint=url&region=name. Repeat it for each store.",
    )
    shared_password_file: str = file("/etc/kvoffd/shared.password").setting(
        "",
        "File with a password, or user:password, in its n-th line for the n-th shared store. Set it if a store "
        "requires one.",
    )
    shared_write: str = WRITE_MODE.setting(
        TieringSettings.mode.value,
        "Which blocks are written to each shared store; see disk_write. Choose never on nodes that only read.",
    )
    shared_ask_deadline_s: float = duration(0.001).setting(
        0.5,
        "Time for a shared store to answer whether it has a block; later it is a miss. Engines wait less for short "
        "prompts. Raise it for a store behind a very slow network.",
    )
    shared_deadline_s: float = duration(0.1).setting(
        2.0,
        "Time for a shared store to send a block, without queueing; later it is a miss. Raise it for a store behind a "
        "very slow network.",
    )
    peers: tuple[str, ...] = listed(
        "HOST:PORT", "addresses, such as node-b:7400", partial(_checked, parse_peer), MAX_PEERS
    ).setting(
        (),
        "Another node's kvoffd whose pool is read for what this node lacks, as host:port of its peer_listen. Repeat it "
        "for each peer; they are asked after the shared stores, within the same deadlines. Nodes of a network, such as "
        "10.0.0.0/16:7400, are asked only for requests that name them. dns+NAME:7400 are all addresses of a name.",
    )
    peer_listen: str = SettingKind(_address, "HOST:PORT").setting(
        "",
        "Address at which other nodes ask for blocks of this pool; an empty one lends nothing. NIXL listens on "
        "other ports too, and neither encrypts nor authenticates: use it in a network that you trust.",
    )
    peer_secret_file: str = file("/etc/kvoffd/peers.secret").setting(
        "",
        "File with the secret that nodes prove to each other, the same on all. Needed for peers and peer_listen.",
    )
    copy_threads: int = number(1, 64).setting(
        1,
        "Threads that copy between engines' host memory and the pool, for each direction. Raise it for CPU engines if "
        "the machine has idle cores; GPUs have threads of their own.",
    )
    verify_share: float = SettingKind(_share, "SHARE", "{:.12g}".format).setting(
        1 / 64,
        "Share of the loads that compare blocks with their checksums. Set 1 if memory is unreliable; blocks of an "
        "earlier daemon are always compared.",
    )
    allowed_uids: tuple[int, ...] = UIDS.setting(
        (),
        "Users that may connect, by name or id, besides root and the daemon's own user. Name those that run engines.",
    )
    allowed_gids: tuple[int, ...] = GIDS.setting(
        (),
        "Groups whose users may connect, by name or id; the daemon's own group if empty. Only a process's primary "
        "group counts.",
    )
    admin_uids: tuple[int, ...] = UIDS.setting(
        (),
        "Users that may administer, by name or id; all that may connect if empty. Set it if engines of several users "
        "share the daemon.",
    )
    max_sessions: int = number(1, 65_536).setting(
        256,
        "Limit of open sessions: an engine has one for its scheduler and one for each worker. Raise it for more "
        "engines.",
    )
    shutdown_deadline_s: float = duration(0.0).setting(
        10.0,
        "Time for running jobs to finish after SIGTERM. Keep it below TimeoutStopSec and "
        "terminationGracePeriodSeconds.",
    )
    http_address: str = SettingKind(_address, "HOST:PORT").setting(
        "127.0.0.1:9464",
        "Address of /metrics, /healthz, /readyz, /stats.json and the page; an empty one disables HTTP. Change it so "
        "that your monitoring reaches it; there is no password.",
    )
    http_hosts: tuple[str, ...] = listed("NAME", "names, such as kvoffd.example.com", _host_name).setting(
        (),
        "Name by which HTTP may be asked, besides addresses, names without a dot or in .svc, .local and .internal, and "
        "this machine's; * is any. Set it for a proxy or a name of your own; it keeps pages of other sites out.",
    )
    log_level: str = choice("debug", "info", "warning", "error").setting(
        "info",
        "Lowest severity that is logged. Choose debug to see single sessions and requests.",
    )
    log_format: str = choice("text", "json").setting(
        "text",
        "One line of text, or one JSON object, per log record. Choose json for a log collector.",
    )
    cuda_library: str = file("/usr/lib/libcuda.so.1").setting(
        "",
        "Path of the CUDA driver's library; an empty one is the system's. Set it if the system does not find it.",
    )
    pin_pool: str = choice("start", "use").setting(
        "start",
        "When the pool is pinned for GPUs: at the start if a GPU is visible, or with the first engine on one. Choose "
        "use if the daemon must not take memory of an idle GPU.",
    )
    limits: ServerLimits = field(default_factory=ServerLimits)
    """Constants that tests replace; not a setting."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Sources of the settings, such as ``flag --pool-size``; defaults are left out."""


_ENDINGS = {"_bytes_per_day": "_per_day", "_bytes": "_size", "_s": "", "": ""}
"""Endings of fields' names, and what replaces them in the setting's name. The first that fits counts."""


class Setting:
    """A field of ``Config`` as users see it; ``name`` is its key in the file."""

    def __init__(self, field_name: str, kind: SettingKind, description: str) -> None:
        self.field_name, self.description = field_name, description
        self.parse, self.metavar, self.show, self.repeated = kind
        ending = next(filter(field_name.endswith, _ENDINGS))
        self.name = field_name.removesuffix(ending) + _ENDINGS[ending]
        self.flag = f"--{self.name.replace('_', '-')}"
        self.variable = f"{VARIABLE_PREFIX}{self.name.upper()}"


SETTINGS = tuple(Setting(one.name, **one.metadata) for one in dataclasses.fields(Config) if one.metadata)


def settings_in_force(config: Config) -> list[tuple[str, str, str]]:
    """Return name, value as text, and source of each setting."""
    return [
        (one.name, one.show(getattr(config, one.field_name)), config.sources.get(one.name, "default"))
        for one in SETTINGS
    ]


# --- loading --------------------------------------------------------------------------------------


def load_config(
    flags: Mapping[str, str | list[str] | None],
    environ: Mapping[str, str],
    config_path: str | Path | None = None,
    limits: ServerLimits | None = None,
) -> Config:
    """Merge the configuration from its sources.

    Args:
        flags: texts of the command line by setting name (``pool_size``); a list if the flag may be repeated, None if it
            was not given.
        environ: the environment; its ``KVOFFD_CONFIG`` names the file if ``config_path`` is None.
        config_path: a TOML file.
        limits: for tests.

    Raises:
        ConfigError: a file that cannot be read, an unknown setting, an invalid value.
    """
    path = config_path if config_path is not None else environ.get(CONFIG_VARIABLE, "").strip() or None
    by_flag = {one.name: (flags[one.name], f"flag {one.flag}") for one in SETTINGS if flags.get(one.name) is not None}
    # Each overrides those before it. An overridden value must be valid too: it would count without the flag.
    layers = [_from_file(Path(path)) if path is not None else {}, _from_environ(environ), by_flag]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        for one in SETTINGS:
            if one.name in layer:
                given, source = layer[one.name]
                if not all(map(is_utf8, given if isinstance(given, list) else [given])):
                    raise ConfigError(f"{one.name} ({source}): the value is not UTF-8; choose another name.")
                try:
                    values[one.field_name] = one.parse(given)
                except ValueError as error:
                    raise ConfigError(f"{one.name} ({source}): {error}.") from error
                sources[one.name] = source
    return Config(**values, limits=limits or ServerLimits(), sources=sources)


_Layer: TypeAlias = dict[str, tuple[Any, str]]


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
    names = [one.name for one in SETTINGS]
    for key, value in table.items():
        _check_known(key, names, f"The key {quoted(key)} (value {quoted(value)}) in {path}")
    return {key: (value, f"file {path}") for key, value in table.items()}


def _from_environ(environ: Mapping[str, str]) -> _Layer:
    by_variable = {one.variable: one.name for one in SETTINGS}
    layer: _Layer = {}
    for variable in sorted(environ):
        ours = variable.startswith(VARIABLE_PREFIX) and variable not in (CONFIG_VARIABLE, PASSWORD_VARIABLE)
        if ours and not _SERVICE_LINK.fullmatch(variable):
            where = f"The environment variable {variable} (value {quoted(environ[variable])})"
            _check_known(variable, by_variable, where)
            layer[by_variable[variable]] = (environ[variable], f"variable {variable}")
    return layer


def _check_known(key: str, names: Collection[str], where: str) -> None:
    if key not in names:
        advice = did_you_mean(key, names) or f"known are {', '.join(sorted(names))}."
        raise ConfigError(f"{where} is unknown; {advice}")


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return a question with the most similar of ``names``; empty if none is similar."""
    import difflib  # only errors need it

    close = difflib.get_close_matches(name, sorted(names), n=1)
    return f"did you mean {close[0]}?" if close else ""


def check_disks(config: Config) -> None:
    """Raise ConfigError if a disk that is required at the start cannot be used."""
    if config.disk_start != "required":
        return
    seen: dict[tuple[int, int], str] = {}
    for disk in config.disk:
        path, hint = disk.directory, "name another, or set disk_start to optional to start without it"
        try:
            status, space = os.stat(f"{path}/."), os.statvfs(path)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"disk: the directory {path} cannot be used ({why}); make it, {hint}.") from error
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"disk: the daemon's user may not write to {path}; change its owner or mode, {hint}.")
        directory = status.st_dev, status.st_ino
        if directory in seen:
            other = seen[directory]
            raise ConfigError(f"disk: {path} is the same directory as {other}; give each disk its own, {hint}.")
        seen[directory] = path
        try:
            there_bytes = os.lstat(f"{path}/{DISK_NAME}").st_blocks * 512
        except OSError:
            there_bytes = 0
        if (free := space.f_frsize * space.f_bavail + there_bytes) < disk.size_bytes:
            raise ConfigError(
                f"disk: {format_size(disk.size_bytes)} do not fit into the file system of {path}, where "
                f"{format_size(free)} can be used; choose a smaller size, {hint}."
            )
