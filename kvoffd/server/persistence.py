"""Files from one daemon to the next: generations and quotas of namespaces, and what the policy learned.

A namespace's **generation** is raised whenever its blocks become stale: by a reset and by a clear. Pools and disks note
the generation in which a block was stored. Blocks of a lower one are void wherever they are found again: in a disk that
was away, an older copy of a file, another pool.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from kvoffd.cache import POLICY_NAMES
from kvoffd.cache.policy import Policy
from kvoffd.config import Config
from kvoffd.system.files import open_directory
from kvoffd.system.mappings import is_hugetlbfs
from kvoffd.system.newest import put_newest
from kvoffd.system.threads import start
from kvoffd_proto.messages import Count
from kvoffd_proto.stats import Lifetime

logger = logging.getLogger(__name__)

STATE_FILE, POLICY_SUFFIX = "kvoffd.state", ".policy"
MAX_STATE_BYTES = 16 << 20
MAX_NAMES = 4096
"""Namespaces with a generation, of each shared store, and of those not shared: the oldest are forgotten, but for those
of namespaces that there are."""
RETRY_S = 5.0
"""After which a write that failed is tried again: a file system may have been full for a moment."""
CLOSE_S = 2.0
"""For a file to be written when the daemon ends."""
POLICY_EVERY_S = 300.0
MAX_POLICY_BYTES = 1 << 20


class StateFile:
    """A file of this user's, read at the start and written anew in a thread, since a file system may be slow or hang.

    It has the old content or the new one, whole and on the device. The latest content wins; what could not be written
    is tried again.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        """Raises NoMoreThreads."""
        self.path = path
        self.on_saved: Callable[[], None] = lambda: None
        """Called in the file's thread when it was written, or could not be."""
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._content = b""
        """What was saved last."""
        self._due = self._ends = False
        """Whether the content is to be written, or is being written."""
        self._problem = ""
        """Why that failed the last time."""
        start(threading.Thread(target=self._run, name=f"kvoffd-{path.rpartition('.')[2]}"[:15], daemon=True))

    def read(self) -> bytes:
        """All of it. Raises OSError; ValueError where it is of no use, which says why and begins with ``it``."""
        with open(self.path, "rb", opener=_open_own) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise ValueError("it is not a file of this user's")
            if found.st_size > self._max_bytes:
                raise ValueError(f"it has {found.st_size} bytes, more than {self._max_bytes}")
            return file.read(self._max_bytes)

    def save(self, content: bytes) -> None:
        """Write it soon, in place of what is still to be written."""
        with self._changed:
            self._content, self._due = content, True
            self._changed.notify_all()

    @property
    def is_saved(self) -> bool:
        """Whether what was saved last is written, or could not be."""
        return not self._due

    @property
    def problem(self) -> str:
        """Why the file may not have what was saved last, a clause; empty where it has that."""
        return self._problem if self.is_saved else f"{self.path} takes long to write"

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written, or has failed once more; False where that takes longer."""
        with self._changed:
            self._due = self._due or bool(self._problem)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._due, timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """As ``flush``; then the thread ends."""
        if not self.flush(timeout_s):
            logger.warning("%s takes long to write; the next daemon goes on with what it had.", self.path)
        with self._changed:
            self._ends = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._ends, RETRY_S if self._problem else None)
                if self._ends and not self._due:
                    return
                content = self._content
            problem = ""
            try:
                self._write(content)
            except OSError as error:
                problem = f"{self.path} cannot be written: {error}"
            with self._changed:
                if problem and not self._problem:
                    logger.warning("%s.", problem)
                self._problem, self._due = problem, self._content is not content
                self._changed.notify_all()
            self.on_saved()

    def _write(self, content: bytes) -> None:
        """Raises OSError: then the file is as it was."""
        beside = f"{self.path}.new"
        Path(beside).unlink(missing_ok=True)
        try:
            made = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(made, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(made)
            os.replace(beside, self.path)
        except BaseException:
            with suppress(OSError):  # what there is of it would take the space that is lacking, as of a small tmpfs
                os.unlink(beside)
            raise
        directory = open_directory(Path(self.path).parent)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _open_own(path: str, flags: int) -> int:
    """Follows no link, and does not block: somebody may have put a FIFO there."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


class Content(msgspec.Struct, forbid_unknown_fields=True):
    """``kvoffd.state`` behind its CRC-32. Namespaces go by their fingerprints."""

    last: Count = 0
    """The highest generation that was ever given."""
    floor: Count = 0
    """Generation of all namespaces that have none of their own: of the last time that all were cleared."""
    generations: dict[bytes, Count] = {}
    fleet: dict[str, dict[bytes, Count]] = {}
    """By URL of a shared store, the generations that were followed."""
    unshared: dict[bytes, bool] = {}
    """Namespaces that an engine has reset: no shared store is asked for them until the fleet is reset."""
    missed: dict[str, dict[bytes, bool]] = {}
    """By a disk's directory, the namespaces of which blocks were invalidated that it may still have."""
    quotas: dict[bytes, Count] = {}
    lifetime: Lifetime = Lifetime()
    disk_spent: tuple[float, float] = (0.0, 0.0)
    """Bytes of the day's writes to disks that were spent, and when that was, in seconds since 1970."""


class State:
    """What is known of namespaces, saved whenever it changes. For the daemon's thread, but for ``generation``.

    It does not lie beside the pool's file: a reset holds for whatever pool comes next.

    Attributes:
        known: to be read; the methods change it.
        is_there: whether there is a namespace. Very many resets by one client make the daemon forget no other's.
    """

    def __init__(self, file: StateFile) -> None:
        self.file = file
        self.is_there: Callable[[bytes], bool] = lambda fingerprint: False
        self.known = Content()

    def restore(self) -> None:
        """Take over what the file has. One of no use is as none, and the log says so."""
        try:
            checksum, _, body = self.file.read().partition(b"\n")
            if checksum != b"%08x" % zlib.crc32(body):
                raise ValueError("its checksum is wrong")
            self.known = msgspec.json.decode(body, type=Content)
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            what = "%s is of no use: %s. No quota and no reset of before is known."
            logger.warning(what, self.file.path, error)
            if not isinstance(error, OSError):
                self._save()  # so that the next daemon finds nothing wrong

    # --- generations -----------------------------------------------------------------------------

    def generation(self, fingerprint: bytes) -> int:
        """Of blocks that are stored now; those of lower ones are void. For any thread."""
        return self.known.generations.get(fingerprint, self.known.floor)

    def raise_generation(self, fingerprint: bytes) -> None:
        """All blocks of a namespace that there are anywhere are void."""
        self._set_generation(fingerprint, self.known.last + 1)

    def raise_all(self) -> None:
        """All blocks of all namespaces are void."""
        self.known.last = self.known.floor = self.known.last + 1
        self.known.generations.clear()
        self._save()

    def found(self, fingerprint: bytes, generation: int) -> None:
        """A pool or disk has blocks of a generation. A higher one than is known counts: its file was lost."""
        if generation > self.generation(fingerprint):
            self._set_generation(fingerprint, generation)

    def _set_generation(self, fingerprint: bytes, generation: int) -> None:
        self.known.last = max(self.known.last, generation)
        put_newest(self.known.generations, fingerprint, generation, MAX_NAMES, self.is_there)
        self._save()

    def missed(self, directory: str, fingerprint: bytes) -> None:
        """A disk could not note that blocks of a namespace were invalidated: none of its comes back with it."""
        put_newest(self.known.missed.setdefault(directory, {}), fingerprint, True, MAX_NAMES, self.is_there)
        self._save()

    def caught_up(self, directory: str) -> None:
        """A disk has noted all that was removed."""
        del self.known.missed[directory]
        self._save()

    # --- what is shared --------------------------------------------------------------------------

    def unshare(self, fingerprint: bytes) -> None:
        """An engine reset a namespace here alone."""
        put_newest(self.known.unshared, fingerprint, True, MAX_NAMES, self.is_there)
        self._save()

    def followed(self, fingerprint: bytes, generations: Mapping[str, int]) -> None:
        """A namespace was reset on all nodes; the generations are those of the shared stores, by URL."""
        self.known.unshared.pop(fingerprint, None)
        for url, generation in generations.items():
            put_newest(self.known.fleet.setdefault(url, {}), fingerprint, generation, MAX_NAMES, self.is_there)
        self._save()

    # --- quotas, totals and the file -------------------------------------------------------------

    def save_quotas(self, quotas: Mapping[bytes, int]) -> None:
        self.known.quotas = dict(quotas)
        self._save()

    def save_lifetime(self, lifetime: Lifetime) -> None:
        if lifetime != msgspec.structs.replace(self.known.lifetime, since=lifetime.since):
            self.known.lifetime = lifetime
            self._save()

    def note_disk_spent(self, nbytes: float) -> None:
        self.known.disk_spent = nbytes, time.time()
        self._save()

    def _save(self) -> None:
        body = msgspec.json.encode(self.known)
        self.file.save(b"%08x\n" % zlib.crc32(body) + body)


def state_file(config: Config) -> StateFile:
    """``kvoffd.state``, in the directory that systemd keeps for the service over reboots (StateDirectory=), if there is
    one, else in the daemon's. Raises NoMoreThreads."""
    directory = os.environ.get("STATE_DIRECTORY", "").partition(":")[0] or config.directory
    return StateFile(f"{directory}/{STATE_FILE}", MAX_STATE_BYTES)


class PolicyFile:
    """What a policy learned, in ``<pool_file>.policy``, or ``kvoffd.policy`` in the daemon's directory.

    It is written now and then, and when the daemon ends: one that is killed leaves what it knew a while ago.
    """

    def __init__(self, policy: Policy, config: Config) -> None:
        self._policy = policy
        self._name = config.eviction_policy.encode()
        self._file = StateFile(_beside_pool(config), MAX_POLICY_BYTES)
        self._due = time.monotonic() + POLICY_EVERY_S

    def restore(self) -> None:
        """Have the policy, which is new, go on with what an earlier daemon left, if it left anything of use.

        What is of no use is removed, so that it is said once. What another policy knew stays until this one writes.
        """
        path = self._file.path
        try:
            name, _, state = self._file.read().partition(b"\n")
            if name == self._name:
                self._policy.restore(state)
            elif name.decode("ascii", "replace") in POLICY_NAMES:
                logger.info("What another policy knew, in %s, is left alone.", path)
            else:
                raise ValueError("no policy wrote it")
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            logger.warning("What a policy knew, in %s, is of no use: %s. The policy begins without it.", path, error)
            with suppress(OSError):
                os.unlink(path)

    def tick(self) -> None:
        if time.monotonic() >= self._due and self._file.is_saved:
            self._due = time.monotonic() + POLICY_EVERY_S
            self._save()

    def close(self) -> None:
        """Leave what the policy knows now to the next daemon. Where that fails, it goes on with what was before."""
        self._save()
        self._file.close()

    def _save(self) -> None:
        if state := self._policy.state():
            self._file.save(self._name + b"\n" + state)


def _beside_pool(config: Config) -> str:
    """Where it is kept as long as the pool. Files on hugetlbfs can be mapped and not written."""
    if config.pool_file and not is_hugetlbfs(Path(config.pool_file).parent):
        return config.pool_file + POLICY_SUFFIX
    return str(config.directory / "kvoffd") + POLICY_SUFFIX
