"""Files from one daemon to the next: generations and quotas of namespaces, and what the policy learned.

A namespace's **generation** is raised whenever its blocks become stale: by a reset and by a clear. Pools, disks and
files of exported blocks note the generation in which a block was stored. A block of a lower one is void, wherever and
whenever it is found: in a disk that was away or could not be written to, an older copy of a file, another pool. Nothing
else keeps away what was cleared, so a reset is answered when ``kvoffd.state`` is on its device.

A generation is a point in time, in microseconds since 1970, above all that state file, pools and disks have shown. So
one that is raised after the state file was lost is above all from before. Where none was raised, the highest that is
found counts. One in the future was raised before the clock was set back: nobody can tell whether it is from before or
after those that are known, so all blocks that there are become void.
"""

from __future__ import annotations

import errno
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
from kvoffd.errors import KvoffdError
from kvoffd.system.files import open_directory
from kvoffd.system.mappings import filesystem_magic, is_hugetlbfs
from kvoffd.system.newest import put_newest
from kvoffd.system.threads import start
from kvoffd_proto.messages import Count
from kvoffd_proto.stats import Lifetime

logger = logging.getLogger(__name__)

STATE_FILE, POLICY_SUFFIX = "kvoffd.state", ".policy"
MAX_STATE_BYTES = 16 << 20
MAX_NAMES = 4096
"""Namespaces with a generation of their own, here and in each shared store, and of those that are not shared.

The oldest are forgotten, but for those that are there. All others then count as reset when they were, or
are not shared either.
"""
RETRY_S = 5.0
"""After which a write that failed is tried again: a file system may have been full for a moment."""
READ_TRIES, READ_PAUSE_S = 3, 0.2
CLOSE_S = 2.0
"""For a file to be written when the daemon ends."""
POLICY_EVERY_S = 300.0
MAX_POLICY_BYTES = 1 << 20
IN_MEMORY = 0x01021994, 0x858458F6
"""``f_type`` of tmpfs and ramfs: a reboot loses what is there."""


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
        self._ends = False
        self.saved = self.tried = self.written = 0
        """Numbers of what was saved last, of what it was last tried to write, and of what is on the device."""
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

    @property
    def outlives_reboot(self) -> bool:
        """Whether its file system is on a device."""
        try:
            directory = open_directory(Path(self.path).parent)
        except OSError:
            return True  # nothing can be written there, which is said
        try:
            return filesystem_magic(directory) not in IN_MEMORY
        finally:
            os.close(directory)

    def save(self, content: bytes) -> None:
        """Write it soon, in place of what is still to be written."""
        with self._changed:
            self._content = content
            self.saved += 1
            self._changed.notify_all()

    @property
    def is_saved(self) -> bool:
        """Whether what was saved last is written, or could not be."""
        return self.tried == self.saved

    @property
    def problem(self) -> str:
        """Why the file may not have what was saved last, a clause; empty where it has that."""
        return self._problem if self.is_saved else f"{self.path} takes long to write"

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written, or has failed once more; False where that takes longer."""
        with self._changed:
            if self._problem:
                self.tried = min(self.tried, self.saved - 1)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self.is_saved, timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """As ``flush``; then the thread ends. A second call does nothing."""
        if self._ends:
            return
        if not self.flush(timeout_s):
            logger.warning("%s takes long to write; the next daemon goes on with what it had.", self.path)
        with self._changed:
            self._ends = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self.is_saved or self._ends, RETRY_S if self._problem else None)
                if self._ends and self.is_saved:
                    return
                number, content = self.saved, self._content
            problem = ""
            try:
                self._write(content)
            except Exception as error:
                problem = f"{self.path} cannot be written: {error}"
                if not isinstance(error, OSError):
                    logger.exception("Writing %s failed: a bug; it is tried again.", self.path)
            with self._changed:
                if problem and not self._problem:
                    logger.warning("%s.", problem)
                self.written = self.written if problem else number
                self._problem, self.tried = problem, number
                self._changed.notify_all()
            try:
                self.on_saved()
            except Exception:
                logger.exception("Nobody hears that %s was written: a bug.", self.path)

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
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("it is a link") from error
        raise


class Resets(msgspec.Struct):
    """What keeps away what was cleared. Namespaces go by their fingerprints."""

    last: Count = 0
    """The highest generation that was ever given or found."""
    floor: Count = 0
    """Generation of all namespaces that have none of their own: of the last time that all were cleared."""
    generations: dict[bytes, Count] = {}
    fleet: dict[str, dict[bytes, Count]] = {}
    """By URL of a shared store, the generations that were followed."""
    unshared: dict[bytes, bool] = {}
    """True: an engine has reset the namespace, and no shared store is asked for it until the fleet is reset. False: the
    fleet was, since ``shares_others`` is False."""
    shares_others: bool = True
    """Whether the other namespaces are shared. Not once it was lost which were reset."""


class Quotas(msgspec.Struct):
    quotas: dict[bytes, Count] = {}


class Counted(msgspec.Struct):
    lifetime: Lifetime = Lifetime()
    disk_spent: tuple[float, float] = (0.0, 0.0)
    """Bytes of the day's writes to disks that were spent, and when that was, in seconds since 1970."""


PARTS: dict[bytes, type[msgspec.Struct]] = {b"resets": Resets, b"quotas": Quotas, b"counted": Counted}
"""Of ``kvoffd.state``, by name. Each is a line: the CRC-32 of the rest, the name, and the content as JSON."""


class StateUnreadable(KvoffdError):
    """There is a file, and the system does not let it be read. The message says what to do."""


class State:
    """What is known of namespaces, saved whenever it changes. For the daemon's thread, but for ``generation``.

    It does not lie beside the pool's file: a reset holds for whatever pool comes next.

    Attributes:
        is_there: whether there is a namespace. Very many resets by one client make the daemon forget no other's.
    """

    def __init__(self, file: StateFile, wall_clock: Callable[[], float] = time.time) -> None:
        self.file, self._wall_clock = file, wall_clock
        self.is_there: Callable[[bytes], bool] = lambda fingerprint: False
        self.resets, self.quotas, self.counted = Resets(), Quotas(), Counted()
        self._lines = dict.fromkeys(PARTS, b"")

    def restore(self) -> None:
        """Take over what the file has.

        What is damaged of it costs only itself. Where that is what keeps away what was cleared, all that there is
        becomes void, and nothing is shared until it is reset on all nodes.

        Raises StateUnreadable.
        """
        try:
            content, why = self._read(), "it is damaged"
        except ValueError as error:
            content, why = b"", str(error)
        if content is None:
            return
        found = _parts_of(content)
        self.resets, self.quotas, self.counted = (found.get(name, kind()) for name, kind in PARTS.items())  # type: ignore[assignment]
        lost = ", ".join(name.decode() for name in PARTS if name not in found)
        if lost:
            logger.warning("Of %s the following is of no use, since %s: %s.", self.file.path, why, lost)
        if b"resets" not in found:
            logger.warning(
                "What was cleared or reset before is not known. So all blocks of before are void, and no namespace is "
                "shared with other nodes until `kvoffd-cli clear --all-nodes`."
            )
            self.resets.shares_others = False
            self.raise_all()
        if content != self._encoded(*PARTS):
            self._save(*PARTS)  # so that the next daemon finds nothing wrong

    def _read(self) -> bytes | None:
        """None where there is no file. Raises StateUnreadable; ValueError where it is none of ours."""
        for _ in range(READ_TRIES):
            try:
                return self.file.read()
            except FileNotFoundError:
                return None
            except OSError as error:
                problem = error
                time.sleep(READ_PAUSE_S)
        raise StateUnreadable(
            f"{self.file.path}, which says what was cleared, cannot be read ({problem.strerror}); mend that. "
            "Without the file what was cleared may come back from disks and shared stores."
        )

    # --- generations -----------------------------------------------------------------------------

    def generation(self, fingerprint: bytes) -> int:
        """Of blocks that are stored now; those of lower ones are void. For any thread."""
        return self.resets.generations.get(fingerprint, self.resets.floor)

    def raise_generation(self, fingerprint: bytes) -> None:
        """All blocks of a namespace that there are anywhere are void."""
        self._set_generation(fingerprint, self._next())

    def raise_all(self) -> None:
        """All blocks of all namespaces are void."""
        self.resets.last = self.resets.floor = self._next()
        self.resets.generations.clear()
        self._save(b"resets")

    def found(self, fingerprint: bytes, generation: int) -> bool:
        """A pool or disk has blocks of a generation. Returns whether they count.

        A higher one than is known counts from now on: what was known was lost.
        """
        if generation <= (known := self.generation(fingerprint)):
            return generation == known
        if is_sound := generation <= self._now():
            self._set_generation(fingerprint, generation)
        else:
            logger.warning("The clock was set back: a namespace was reset in the future. All its blocks are void.")
            self.resets.last = max(self.resets.last, generation)
            self.raise_generation(fingerprint)
        return is_sound

    def _now(self) -> int:
        return int(1e6 * self._wall_clock())

    def _next(self) -> int:
        """A generation above all that are known."""
        if (now := self._now()) <= self.resets.last:
            logger.info("The clock is behind the last reset; generations are counted on from that.")
        return max(now, self.resets.last + 1)

    def _set_generation(self, fingerprint: bytes, generation: int) -> None:
        self.resets.last = max(self.resets.last, generation)
        gone = put_newest(self.resets.generations, fingerprint, generation, MAX_NAMES, self.is_there)
        self.resets.floor = max(self.resets.floor, gone or 0)
        self._save(b"resets")

    # --- what is shared --------------------------------------------------------------------------

    def is_unshared(self, fingerprint: bytes) -> bool:
        """Whether nothing of a namespace may come from shared stores, nor go there."""
        return self.resets.unshared.get(fingerprint, not self.resets.shares_others)

    def unshare(self, fingerprint: bytes) -> None:
        """An engine reset a namespace here alone: what others have of it may be stale."""
        self._set_unshared(fingerprint, True)

    def followed(self, fingerprint: bytes, generations: Mapping[str, int]) -> None:
        """A namespace was reset on all nodes; the generations are those of the shared stores, by URL."""
        self.resets.unshared.pop(fingerprint, None)
        if not self.resets.shares_others:
            self._set_unshared(fingerprint, False)
        for url, generation in generations.items():
            put_newest(self.resets.fleet.setdefault(url, {}), fingerprint, generation, MAX_NAMES, self.is_there)
        self._save(b"resets")

    def _set_unshared(self, fingerprint: bytes, unshared: bool) -> None:
        if put_newest(self.resets.unshared, fingerprint, unshared, MAX_NAMES, self.is_there):
            self.resets.shares_others = False
        self._save(b"resets")

    # --- quotas, totals and the file -------------------------------------------------------------

    def save_quotas(self, quotas: Mapping[bytes, int]) -> None:
        self.quotas.quotas = dict(quotas)
        self._save(b"quotas")

    def save_lifetime(self, lifetime: Lifetime) -> None:
        if lifetime != msgspec.structs.replace(self.counted.lifetime, since=lifetime.since):
            self.counted.lifetime = lifetime
            self._save(b"counted")

    def note_disk_spent(self, nbytes: float) -> None:
        self.counted.disk_spent = nbytes, self._wall_clock()
        self._save(b"counted")

    def _save(self, *changed: bytes) -> None:
        self.file.save(self._encoded(*changed))

    def _encoded(self, *changed: bytes) -> bytes:
        """The file's content. What protects is there twice, so that damage to one place costs none of it."""
        for name, part in zip(PARTS, (self.resets, self.quotas, self.counted), strict=True):
            if name in changed or not self._lines[name]:
                body = name + b" " + msgspec.json.encode(part)
                self._lines[name] = b"%08x %s\n" % (zlib.crc32(body), body)
        return b"".join([*self._lines.values(), self._lines[b"resets"]])


def _parts_of(content: bytes) -> dict[bytes, msgspec.Struct]:
    """The parts of a state file that are whole."""
    lines = content.split(b"\n")
    if len(lines[0]) == 8:  # as 0.2 wrote it
        lines = [b"%s %s %s" % (lines[0], name, b"".join(lines[1:])) for name in PARTS]
    found: dict[bytes, msgspec.Struct] = {}
    for line in lines:
        checksum, _, body = line.partition(b" ")
        name, _, encoded = body.partition(b" ")
        if name in PARTS and checksum in (b"%08x" % zlib.crc32(body), b"%08x" % zlib.crc32(encoded)):
            with suppress(ValueError, RecursionError):
                found[name] = msgspec.json.decode(encoded, type=PARTS[name])
    return found


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
