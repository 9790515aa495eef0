"""What a shared store must do, and which there are by the scheme of their URL."""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from kvoffd.errors import KvoffdError
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.units import UnitError, is_host, parse_duration, quoted

if TYPE_CHECKING:  # `kvoffd config` imports nothing heavy
    from kvoffd.tiers.header import BlockGroup

logger = logging.getLogger(__name__)

REDIS_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster")
MOST_TTL_S = 10 * 365 * 86400
MOST_PASSWORD_CHARACTERS = 65_536
PASSWORD_VARIABLE = "KVOFFD_SHARED_PASSWORD"
_S3_QUERY = {"endpoint": r"https?://[^/?#@\s]+(/[^?#@\s]*)?", "region": r"[\w-]+"}
SCHEMES = (*REDIS_SCHEMES, "s3")


class StoreError(Exception):
    """A store does not do what it was asked. ``kind`` is one word for counting, or two joined by ``_``.

    ``final``: asking again at once is of no use, as with a wrong password.
    """

    def __init__(self, kind: str, sentence: str, *, final: bool = False) -> None:
        super().__init__(sentence)
        self.kind = kind
        self.sentence = sentence
        self.final = final


def bad_generation(what: str) -> StoreError:
    """What keeps a generation is no number: of one namespace nothing is known, and others are served."""
    return StoreError("generation", f"{what} is no number of up to 18 digits that a node has written; remove it there.")


def generation_key(fingerprint: bytes) -> bytes:
    """Where a namespace's generation is kept, as a decimal number; where it is missing the generation is 0."""
    return b"kvoffd/2/%s/generation" % fingerprint.hex().encode()


def decode_generation(value: bytes) -> int | None:
    """The number that is kept there, 0 for an empty value; None where it is no number of up to 18 digits."""
    return int(value or 0) if re.fullmatch(rb"[0-9]{0,18}", value) else None


def object_prefix(group: BlockGroup) -> bytes:
    """What the names of a group's objects begin with; a block's key follows, in hexadecimal. A raised generation makes
    all blocks of a namespace void."""
    return b"kvoffd/2/%s/%d/%d/" % (group.fingerprint.hex().encode(), group.generation, group.number)


def object_key(group: BlockGroup, key: bytes) -> bytes:
    return object_prefix(group) + key.hex().encode()


def name_of(address: tuple[str, int]) -> str:
    """As operators write it: an address of IPv6 in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Server(NamedTuple):
    """A server of a store, as it was found last."""

    name: str
    answers: bool = True
    problem: str = ""
    """What failed last there, a sentence."""


class Servers:
    """What is known of the servers of a store, by the connections of all threads."""

    def __init__(self, *names: str) -> None:
        self._lock = threading.Lock()
        self._known = {name: Server(name) for name in names}
        self._unraised: dict[str, StoreError] = {}

    def __iter__(self) -> Iterator[Server]:
        with self._lock:
            return iter(list(self._known.values()))

    def update(self, names: Iterable[str]) -> None:
        """The store has these servers now."""
        with self._lock:
            self._known = {name: self._known.get(name) or Server(name) for name in names}

    def answered(self, name: str) -> None:
        with self._lock:
            if name in self._known:
                self._known[name] = self._known[name]._replace(answers=True)

    def failed(self, name: str, error: StoreError, *, raised: bool) -> None:
        """``raised``: the store has raised the error, and does not go on without the server."""
        with self._lock:
            if name in self._known:
                self._known[name] = Server(name, False, error.sentence)
                if not raised:
                    self._unraised[name] = error

    def take_unraised(self) -> dict[str, StoreError]:
        """Servers that the store went on without since the last call, each with why."""
        with self._lock:
            found, self._unraised = self._unraised, {}
            return found


class GetRequest(NamedTuple):
    """An object to be read: so many bytes of a header, and then exactly what fills the views."""

    key: bytes
    header_bytes: int
    views: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """What the views take."""
        return sum(map(len, self.views))


class Received(NamedTuple):
    """An object that was read.

    Attributes:
        header: empty where the object is of another length: then nothing was read.
        checksums: of the views, as ``digest`` takes them; empty, or 0, where the store has not taken them.
    """

    header: bytes
    checksums: Sequence[int] = ()


class Filling(NamedTuple):
    """What a store says of its memory.

    Attributes:
        size_bytes: what it may hold; 0 for no bound.
        evicted: objects that it evicted so far, also those of other nodes.
    """

    size_bytes: int
    used_bytes: int
    evicted: int


class Store(ABC):
    """One connection to a store, for one thread, which waits. Every method raises StoreError, and closes it then.

    Deadlines are of ``time.monotonic``. After a method has ended, in whatever way, nothing more is written into views,
    nor into those of an object that ``get`` has yielded.

    Attributes:
        poll_s: how often it is looked whether generations were raised.
        most_window_keys: keys that ``ask`` manages in its time without ``prefix``.
        keys_at_once: most keys of one ``ask``: another client may have its turn then.
        blocks_at_once, bytes_at_once: most objects of one ``get`` or ``put``, and their bytes where there are several.
        believed_s: how long a block that was there is not offered again. The store may lose it, and an offer is a use.
        writers: threads that write. With several one asks what is there while another one's objects are on their way.
        servers: those that the store has, the same object for all connections; None where it cannot tell.
    """

    poll_s: float
    most_window_keys: int
    keys_at_once: int
    blocks_at_once: int
    bytes_at_once: int
    believed_s: float = 60.0
    writers: int = 1
    servers: Servers | None = None

    @abstractmethod
    def connect(self) -> None:
        """Connect, unless that is done and the other end has not closed it."""

    @abstractmethod
    def ping(self, deadline: float) -> None:
        """Find out whether it serves."""

    def filling(self, deadline: float) -> Filling | None:
        """How full it is; None where it does not say."""
        return None

    @abstractmethod
    def ask(
        self, generation_key: bytes, keys: Sequence[bytes], deadline: float, *, prefix: bool
    ) -> tuple[int, list[bool]]:
        """The number under ``generation_key``, 0 for none, and whether there is an object under each key.

        ``prefix``: only how many of the first there are is of use, if an answer costs something.
        """

    @abstractmethod
    def touch(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Whether there is an object under each key; what there is counts as used now."""

    @abstractmethod
    def get(self, requests: Sequence[GetRequest], patience_s: float) -> Iterator[Received | None]:
        """Read objects, in this order, and yield each when its views are filled; None where there is none.

        One of another length may be the last.
        ``patience_s``: how long the next one may take; of objects that come at the same time, how long nothing of any
        may come. Then it raises a StoreError of the kind ``timeout``.
        """

    @abstractmethod
    def put(
        self, objects: Sequence[tuple[bytes, Sequence[bytes | memoryview]]], deadline: float
    ) -> Sequence[bool | None]:
        """Write objects, each whole or not at all, from their parts.

        False where the store has no room, None where the part of it that would have the object is not there.
        """

    @abstractmethod
    def remove(self, keys: Sequence[bytes], deadline: float) -> None: ...

    @abstractmethod
    def raise_generation(self, generation_key: bytes, seen: int, generation: int, deadline: float) -> int:
        """Raise the number under ``generation_key``, where ``seen`` was read, to this or more; returns what it is then.

        Of two that do so at a time none undoes the other's, where the store can see to that.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection. May be called again, and another connected later."""

    @abstractmethod
    def interrupt(self) -> None:
        """Let what waits in another thread raise StoreError at once."""


class Credentials(NamedTuple):
    """Who we are for the store."""

    user: str = ""
    password: str = ""

    @classmethod
    def read(cls, path: str, count: int) -> list[Credentials]:
        """Those of so many stores, from a file with ``password`` or ``user:password`` in a line for each.

        Without a path from the variable ``KVOFFD_SHARED_PASSWORD``, else none; an empty line stands for none. Raises
        KvoffdError.
        """
        try:
            text = os.environ.get(PASSWORD_VARIABLE, "")
            if path:
                with open(path, encoding="utf-8-sig") as file:
                    text = file.read(MOST_PASSWORD_CHARACTERS + 1)
                _warn_of_readers(path)
        except (OSError, ValueError) as error:
            raise KvoffdError(f"The credentials of the shared tier cannot be read: {error}.") from error
        if path and len(text) > MOST_PASSWORD_CHARACTERS:
            why = f"{path} has more than {MOST_PASSWORD_CHARACTERS} characters, and is no file of passwords."
            raise KvoffdError(why, ErrorCode.BAD_ARGUMENT)
        lines = [line.strip() for line in text.splitlines()]
        if path and not any(lines[:count]):
            raise KvoffdError(f"{path} has no password in its first line.", ErrorCode.BAD_ARGUMENT)
        found = []
        for line in (lines + [""] * count)[:count]:
            user, colon, password = line.partition(":")
            found.append(cls(user, password) if colon else cls("", user))
        return found


def _warn_of_readers(path: str) -> None:
    """Say that every user may read a file, but where a mount is read-only, as those of Kubernetes' secrets are."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & stat.S_IROTH and not os.statvfs(path).f_flag & os.ST_RDONLY:
        logger.warning(
            "%s, with the password of the shared store, can be read by every user (its mode is %04o); "
            "`chmod o-rwx` it, and `chown` it to the daemon's user.",
            path,
            mode,
        )


def check_url(url: str) -> None:
    """Raises ValueError with half a sentence where it names no store that can be opened."""
    if "@" in url:  # what may be a password is not repeated
        raise ValueError("it has a user or a password in it; name their file as shared_password_file")
    try:
        parts = urlsplit(url)
        named = is_host(parts.hostname or "")
        usable = parts.scheme in SCHEMES and named and parts.port != 0 and not parts.fragment
        usable = usable and re.search(r"[\s\x00-\x1f\x7f]", url) is None
    except ValueError:
        usable = False
    wrong: list[str] = []
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
    """Names of what cannot be used in a query; empty ones where there is no ``=``: that may be a password."""
    asked = parse_qsl(query, keep_blank_values=True)
    wrong = [name for name, value in asked if name not in known or not is_right(name, value)]
    return [name if f"{name}=" in query else "" for name in wrong]


def _is_ttl(value: str) -> bool:
    try:
        return 1 <= parse_duration(value) <= MOST_TTL_S
    except UnitError:
        return False


def open_store(url: str, credentials: Credentials) -> Callable[[], Store]:
    """What makes connections to the store at a URL; none is made here. Raises KvoffdError."""
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
