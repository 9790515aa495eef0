"""The interface of shared stores, and the stores by URL scheme."""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from kvoffd.errors import KvoffdError
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.units import UnitError, is_host, parse_duration, quoted

if TYPE_CHECKING:  # `kvoffd config` imports nothing heavy
    from kvoffd.tiers.header import Block, BlockGroup

logger = logging.getLogger(__name__)

REDIS_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster")
MAX_TTL_S = 10 * 365 * 86400
MAX_PASSWORD_CHARACTERS = 65_536
PASSWORD_VARIABLE = "KVOFFD_SHARED_PASSWORD"
_S3_QUERY = {"endpoint": r"https?://[^/?#@\s]+(/[^?#@\s]*)?", "region": r"[\w-]+"}
SCHEMES = (*REDIS_SCHEMES, "s3")


class StoreFault(StrEnum):
    """Kinds of a store's failures. ``SHARED_ERRORS`` has what operators read of each that is counted.

    Attributes:
        is_answer: whether the server answered. If it refuses a write so, writes pause, and the breaker does not count
            it (``StoreThread.report``).
        is_lasting: whether trying it again at once is useless: a single one opens the breaker.
        skips_server: whether a cluster's other servers are used without this one for a while.
    """

    is_answer: bool
    is_lasting: bool
    skips_server: bool

    def __new__(cls, kind: str, *columns: bool) -> StoreFault:
        fault = str.__new__(cls, kind)
        fault._value_ = kind
        fault.is_answer, fault.is_lasting, fault.skips_server = columns
        return fault

    # is_answer, is_lasting, skips_server
    UNREACHABLE = "unreachable", False, True, True
    TIMEOUT = "timeout", False, False, True
    DISCONNECTED = "disconnected", False, False, True
    TLS = "tls", False, True, False
    HELPER = "helper", False, True, False
    INTERNAL = "internal", False, False, False
    BUSY = "busy", True, False, True
    CREDENTIALS = "credentials", True, True, True
    FORBIDDEN = "forbidden", True, True, False
    REGION = "region", True, True, False
    CLOCK = "clock", True, True, False
    BUCKET = "bucket", True, True, False
    CLUSTER = "cluster", True, False, False
    FULL = "full", True, False, False
    REFUSED = "refused", True, False, False
    PROTOCOL = "protocol", True, False, False
    GENERATION = "generation", True, False, False
    """One namespace has no valid generation; nothing is wrong with the others."""
    UNKEPT = "unkept", True, False, False
    """A peer follows a generation, and would not know of it after a kill."""
    CLOSED = "closed", False, True, False
    """The daemon stops."""


class StoreError(Exception):
    """A store failed to do what was asked.

    Args:
        is_lasting: see ``StoreFault``, if it is not as usual.
    """

    def __init__(self, kind: StoreFault, sentence: str, *, is_lasting: bool | None = None) -> None:
        super().__init__(sentence)
        self.kind, self.sentence = kind, sentence
        self.is_lasting = kind.is_lasting if is_lasting is None else is_lasting


def name_of(address: tuple[str, int]) -> str:
    """Format an address for operators: IPv6 in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Server(NamedTuple):
    """State of a store's server, as last seen."""

    name: str
    answers: bool = True
    problem: str = ""
    """Last failure, a sentence."""


class Servers:
    """State of a store's servers, from the connections of all threads.

    Attributes:
        all_answer: whether all of them answered when they were last asked.
    """

    def __init__(self, *names: str) -> None:
        self._lock = threading.Lock()
        self._known = {name: Server(name) for name in names}
        self.all_answer = True
        self._skipped: dict[str, StoreError] = {}

    def __iter__(self) -> Iterator[Server]:
        with self._lock:
            return iter(list(self._known.values()))

    def update(self, names: Iterable[str]) -> None:
        """Set the servers that the store has now."""
        with self._lock:
            self._set({name: self._known.get(name) or Server(name) for name in names})

    def _set(self, known: dict[str, Server]) -> None:
        self._known, self.all_answer = known, all(server.answers for server in known.values())

    def answered(self, name: str) -> None:
        with self._lock:
            if name in self._known:
                self._set({**self._known, name: self._known[name]._replace(answers=True)})

    def failed(self, name: str, error: StoreError, *, is_skipped: bool) -> None:
        """Record a failure. ``is_skipped``: the store continues without the server, so nobody raises the error."""
        with self._lock:
            if name in self._known:
                self._set({**self._known, name: Server(name, False, error.sentence)})
                if is_skipped:
                    self._skipped[name] = error

    def take_skipped(self) -> dict[str, StoreError]:
        """Return the servers that were skipped since the last call, with the errors, which nobody has reported."""
        with self._lock:
            found, self._skipped = self._skipped, {}
            return found


class GetRequest(NamedTuple):
    """A block to read. The views have exactly its shards' lengths."""

    group: BlockGroup
    key: bytes
    views: Sequence[memoryview]


class PutRequest(NamedTuple):
    """A block to write, from views of its shards."""

    block: Block
    views: Sequence[memoryview]


class Received(NamedTuple):
    """Result of a ``GetRequest``.

    Attributes:
        block: as it was written, perhaps another than the requested one; None if what is stored is no block with shards
            of these lengths: then the views' bytes mean nothing.
        checksums: of the views, as by ``digest``; empty, or 0, if the store did not compute them.
    """

    block: Block | None
    checksums: Sequence[int] = ()


class StoreUsage(NamedTuple):
    """A store's answer about its memory.

    Attributes:
        size_bytes: its limit; 0 for none.
        evicted: objects evicted so far, including those of other nodes.
    """

    size_bytes: int
    used_bytes: int
    evicted: int


class Store(ABC):
    """One blocking connection to a store, for one thread. A method that fails raises StoreError and closes it.

    Deadlines are of ``time.monotonic``. Once a method has ended, in any way, nothing more is written into views; the
    same is true of a block's views once ``get`` has yielded it.

    Attributes:
        poll_s: interval at which raised generations are looked for.
        most_window_keys: last keys of a question without ``prefix`` that are asked for; the others count as absent.
        keys_at_once: most keys of one ``ask``, after which other clients can have their turn.
        blocks_at_once, bytes_at_once: most blocks of one ``get`` or ``put``, and their bytes if there are several.
        failed_s: time for which a block whose read failed counts as absent.
        is_peer: whether it is another node, which may have heard of a clear's generation elsewhere: then it has
            followed. A store with the same number has it from another clear, and gets a higher one.
        believed_s: time after an answer in which a block that exists may be read, and is not offered again. Not longer:
            the store may lose it, and to be offered (``touch``) counts there as a use.
        writers: threads that write. With several, one looks for existing blocks while another one's are being sent.
        servers: those of the store, the same object for all connections; None if they are unknown.
    """

    poll_s: float
    most_window_keys: int
    keys_at_once: int
    blocks_at_once: int
    bytes_at_once: int
    failed_s: float = 30.0
    is_peer: bool = False
    believed_s: float = 60.0
    writers: int = 1
    servers: Servers | None = None

    @abstractmethod
    def connect(self) -> None:
        """Connect, unless a connection exists that the other end has not closed."""

    @abstractmethod
    def ping(self, deadline: float) -> None:
        """Check that the store serves."""

    def usage(self, deadline: float) -> StoreUsage | None:
        """Return how full the store is; None if it does not report that."""
        return None

    @abstractmethod
    def generation(self, fingerprint: bytes, deadline: float) -> int:
        """Return the generation of a namespace; 0 for none."""

    def generations(self, fingerprints: Sequence[bytes], deadline: float) -> list[int | StoreError]:
        """Return the generation of each namespace, asked for in as few messages as the store allows; the error instead
        where it concerns one namespace alone."""
        found = list[int | StoreError]()
        for fingerprint in fingerprints:
            try:
                found.append(self.generation(fingerprint, deadline))
            except StoreError as error:
                if error.kind is not StoreFault.GENERATION:
                    raise
                found.append(error)
                self.connect()
        return found

    @abstractmethod
    def ask(self, group: BlockGroup, keys: Sequence[bytes], deadline: float, *, prefix: bool) -> tuple[int, list[bool]]:
        """Return the generation of the group's namespace, and whether each key has a block of the group's generation.

        ``prefix``: only the number of keys before the first gap matters, if answers are expensive.
        """

    @abstractmethod
    def touch(self, blocks: Sequence[Block], deadline: float) -> list[bool]:
        """Return whether each block exists; those that do count as used now."""

    @abstractmethod
    def get(self, requests: Sequence[GetRequest], patience_s: float) -> Iterator[Received | StoreError | None]:
        """Read blocks in this order, and yield each when its views are filled; None if there is none, and the error of
        one that alone cannot be read.

        After a result without a block it may yield no more.
        ``patience_s``: time for the next block to come; for concurrent ones, time in which no byte of any comes.
        After that it raises a StoreError of the kind ``timeout``.
        """

    @abstractmethod
    def put(self, requests: Sequence[PutRequest], deadline: float) -> Sequence[bool | None]:
        """Write blocks, each whole or not at all.

        Returns for each whether it was written: False if the store has no space, None if the server for the block is
        unavailable or overloaded.
        """

    @abstractmethod
    def remove(self, group: BlockGroup, keys: Sequence[bytes], deadline: float) -> None: ...

    @abstractmethod
    def raise_generation(self, fingerprint: bytes, seen: int, generation: int, deadline: float) -> int:
        """Raise a namespace's generation, which was read as ``seen``, to at least ``generation``; return it.

        Concurrent raises do not undo each other, if the store can guarantee that. A peer is asked once, and
        raises StoreError while it has not followed.
        """

    def clear(self, fingerprint: bytes, seen: int, generation: int, cleared_at: int, deadline: float) -> int:
        """As ``raise_generation``, for a clear at this time, in microseconds since 1970: a peer may have the number
        already, of another clear, and must have dropped its blocks since this one."""
        return self.raise_generation(fingerprint, seen, generation, deadline)

    @abstractmethod
    def close(self) -> None:
        """Close the connection. It may be called again, and followed by another connect."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make a call that waits in another thread raise StoreError at once."""


class Credentials(NamedTuple):
    """Login of the daemon at the store."""

    user: str = ""
    password: str = ""

    @classmethod
    def read(cls, path: str, count: int) -> list[Credentials]:
        """Read those of ``count`` stores from a file with ``password`` or ``user:password`` in a line for each.

        Without a path, they come from the variable ``KVOFFD_SHARED_PASSWORD``, if set; an empty line means none. Raises
        KvoffdError.
        """
        try:
            text = os.environ.get(PASSWORD_VARIABLE, "")
            if path:
                with open(path, encoding="utf-8-sig") as file:
                    text = file.read(MAX_PASSWORD_CHARACTERS + 1)
                warn_of_readers(path, "the password of the shared store")
        except (OSError, ValueError) as error:
            raise KvoffdError(f"The credentials of the shared tier cannot be read: {error}.") from error
        if path and len(text) > MAX_PASSWORD_CHARACTERS:
            why = f"{path} has more than {MAX_PASSWORD_CHARACTERS} characters, and is not a password file."
            raise KvoffdError(why, ErrorCode.BAD_ARGUMENT)
        lines = [line.strip() for line in text.splitlines()]
        if path and not any(lines[:count]):
            raise KvoffdError(f"{path} has no password in its first line.", ErrorCode.BAD_ARGUMENT)
        found = []
        for line in (lines + [""] * count)[:count]:
            user, colon, password = line.partition(":")
            found.append(cls(user, password) if colon else cls("", user))
        return found


def warn_of_readers(path: str, what: str) -> None:
    """Warn if a file with a secret is open to others than the daemon.

    It may have 0600 if it is the daemon's own. If it is another user's, as in a Secret of Kubernetes, the daemon reads
    it by its group, and it may have 0640. Raises OSError.
    """
    found = os.stat(path)
    is_own = found.st_uid == os.geteuid()
    if found.st_mode & (0o077 if is_own else 0o037):
        logger.warning(
            "%s, with %s, is open to other users (its mode is %04o): %s.",
            *(path, what, stat.S_IMODE(found.st_mode)),
            "chmod 0400 it" if is_own else "chmod 0440 it (defaultMode of a Secret), or chown it to the daemon's user",
        )


def check_url(url: str) -> None:
    """Raise ValueError, with half a sentence for operators, if the URL does not name a store that can be opened."""
    if "@" in url:  # a possible password is not repeated
        raise ValueError("it contains a user or a password; name their file as shared_password_file")
    try:
        parts = urlsplit(url)
        named = is_host(parts.hostname or "")
        usable = parts.scheme in SCHEMES and named and parts.port != 0 and not parts.fragment
        usable = usable and re.search(r"[\s\x00-\x1f\x7f]", url) is None
    except ValueError:
        usable = False
    wrong: list[str] = []  # names in the query
    if usable and parts.scheme == "s3":
        wrong = _wrong_names(parts.query, lambda name, value: re.fullmatch(_S3_QUERY[name], value), _S3_QUERY)
        usable = re.fullmatch(r"(/[\w!.*'()-]+)*/?", parts.path, re.ASCII) is not None
        usable = usable and not {".", ".."} & set(parts.path.split("/"))
    elif usable:
        wrong = _wrong_names(parts.query, lambda name, value: _is_ttl(value), ("ttl",))
        usable = re.fullmatch("/?[0-9]{0,9}", parts.path) is not None
        if usable and parts.scheme.endswith("+cluster") and int(parts.path.strip("/") or 0):
            raise ValueError(f"{quoted(re.split('[?#]', url)[0])} names a database; a cluster has database 0 only")
    if wrong or not usable:
        shown = quoted(re.split("[?#]", url)[0]) + (f" with {quoted('?' + wrong[0])}" if wrong and wrong[0] else "")
        raise ValueError(
            f"{shown} is not a URL that can be used; write redis://HOST:PORT?ttl=7d or "
            f"s3://BUCKET/PREFIX?endpoint=URL&region=NAME; there are {', '.join(SCHEMES)}"
        )


def _wrong_names(query: str, is_right: Callable[[str, str], object], known: Iterable[str]) -> list[str]:
    """Return the names that a query must not have; an empty one for a name without ``=``, which may be a password."""
    asked = parse_qsl(query, keep_blank_values=True)
    wrong = [name for name, value in asked if name not in known or not is_right(name, value)]
    return [name if f"{name}=" in query else "" for name in wrong]


def _is_ttl(value: str) -> bool:
    try:
        return 1 <= parse_duration(value) <= MAX_TTL_S
    except UnitError:
        return False


def open_store(url: str, credentials: Credentials) -> Callable[[], Store]:
    """Return a function that makes connections to the store at a URL; it makes none yet. Raises KvoffdError."""
    scheme = urlsplit(url).scheme
    if scheme in REDIS_SCHEMES:
        from kvoffd.tiers.redis_cluster import open_redis

        return open_redis(url, credentials)
    try:
        from kvoffd.tiers.s3_store import open_s3
    except ImportError as error:
        raise KvoffdError(
            f"s3:// needs obstore, which is not installed ({error}); install it with: "
            f"{sys.executable} -m pip install obstore.",
            ErrorCode.BAD_ARGUMENT,
        ) from error
    return open_s3(url, credentials)
