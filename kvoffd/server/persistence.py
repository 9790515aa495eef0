"""Files that outlive the daemon: generations, quotas and totals, and the policy's state.

``kvoffd.state`` consists of parts. Each is a line: the CRC-32 of the rest, the part's name, and its content, a JSON
object. Empty lines are between them, so that a damaged line end costs nothing.

A release must leave whole what later ones wrote, for whoever goes back to it and then forward again. So it keeps parts
and fields of parts that it does not know (not fields of fields), and writes them again as they were. A release that
needs more, as when a known field means something else, writes the part ``format`` with a number above FORMAT: earlier
ones then refuse to start. Release 0.2 had one JSON object after a line with its CRC-32, and writes other files over.
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
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec.structs import asdict

from kvoffd.cache import POLICY_NAMES
from kvoffd.cache.policy import Policy
from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.server.handlers import Pending
from kvoffd.system.files import FileCalls, FileInUse, claim_file, is_regular, open_directory
from kvoffd.system.mappings import filesystem_magic
from kvoffd.system.threads import start
from kvoffd.tiers.generations import Generations, Resets
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import Count, Done
from kvoffd_proto.stats import Lifetime

logger = logging.getLogger(__name__)

STATE_FILE, POLICY_FILE = "kvoffd.state", "kvoffd.policy"
MAX_STATE_BYTES = 16 << 20
RETRY_S = 5.0
"""Time until a failed write is retried: the file system may have been full for a moment."""
HANGS_S = 10.0
"""Time after which a write that has not ended is a problem: longer than clients wait for the reply to a clear."""
CLOSE_S = 2.0
"""Time for a last write when the daemon ends."""
POLICY_EVERY_S = 300.0
MAX_POLICY_BYTES = 1 << 20
IN_MEMORY = 0x01021994, 0x858458F6
"""``f_type`` of tmpfs and ramfs, which do not survive a reboot."""


class StateFile:
    """A file that is read at the start and replaced by a thread, since a file system may be slow or hang.

    A write replaces the file atomically and syncs it. Only the latest content is written; a failed write is retried.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        """Raises NoMoreThreads."""
        self.path = path
        self.on_saved: Callable[[], None] = lambda: None
        """Called in the file's thread after each write, failed or not."""
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._content = b""
        """Content of the latest ``save``."""
        self._retry = self._ends = False
        """Whether the thread must try again at once what has failed, and whether it must end."""
        self._lock_path, self._lock_fd = f"{path}.lock", -1
        self.requested = self.tried = self.written = 0
        """Numbers of the latest save that was requested, of the latest that was tried, and of the one on the device."""
        self._problem = ""
        """Error of the latest write; empty if it succeeded."""
        self._began_at: float | None = None
        """Time when the write that is running began; None if none is."""
        self.outlives_reboot = True
        """Whether the latest content was written to a file system on a device."""
        start(threading.Thread(target=self._run, name=f"kvoffd-{path.rpartition('.')[2]}"[:15], daemon=True))

    def claim(self) -> None:
        """Lock the file, by another one, until ``close``: two daemons' writes would undo each other's.

        Raises KvoffdError.
        """
        directory, name = os.path.split(self._lock_path)
        with suppress(OSError):  # nothing can be written there, which `broken_reason` reports, or it has no locks
            directory_fd = open_directory(Path(directory))
            try:
                self._lock_fd = claim_file(FileCalls(), name, directory_fd, create=True, check=_check_lock)
            except FileInUse as error:
                raise KvoffdError(
                    f"Another kvoffd keeps its clears and resets in {directory}; stop it, or give each daemon a "
                    "directory of its own (StateDirectory= of its systemd unit, or the variable STATE_DIRECTORY)."
                ) from error
            finally:
                os.close(directory_fd)

    def read(self) -> bytes:
        """Return the content. Raises OSError; ValueError with a clause that begins with ``it`` if it is unusable."""
        with open(self.path, "rb", opener=_open_own) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise ValueError("it is not a file of this user's")
            if found.st_size > self._max_bytes:
                raise ValueError(f"it has {found.st_size} bytes, more than {self._max_bytes}")
            return file.read(self._max_bytes)

    def save(self, content: bytes) -> None:
        """Schedule a write, which replaces any pending one."""
        with self._changed:
            self._content = content
            self.requested += 1
            self._changed.notify_all()

    @property
    def is_tried(self) -> bool:
        """Whether writing the latest content succeeded or failed."""
        return self.tried == self.requested

    @property
    def unsaved_reason(self) -> str:
        """Clause why the file may lack the latest content; empty if it has it."""
        return self._problem if self.is_tried else f"{self.path} takes long to write"

    @property
    def broken_reason(self) -> str:
        """Clause why later content is not kept either: the latest write failed, or this one hangs; else empty."""
        began_at = self._began_at  # the thread may change it
        hangs = began_at is not None and time.monotonic() >= began_at + HANGS_S
        return f"{self.path} has been being written for {HANGS_S:.0f} s or more" if hangs else self._problem

    def flush(self, timeout_s: float) -> bool:
        """Wait until the latest content is written or has failed again; return False after ``timeout_s``."""
        with self._changed:
            self._retry = bool(self._problem)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self.is_tried and not self._retry, timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Flush, then end the thread. Idempotent.

        A write that hangs may still replace what the next daemon writes, so the lock stays then until the process ends.
        """
        if self._ends:
            return
        is_flushed = self.flush(timeout_s)
        if not is_flushed:
            logger.warning("%s takes long to write; the next daemon may find its previous content.", self.path)
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        if is_flushed and self._lock_fd >= 0:
            with suppress(OSError):
                os.unlink(self._lock_path)
            os.close(self._lock_fd)

    def _run(self) -> None:
        while True:
            with self._changed:
                # It continues without work after RETRY_S: what failed is tried again.
                self._changed.wait_for(self._has_work, RETRY_S if self._problem else None)
                if self._ends and self.is_tried and not self._retry:
                    return
                number, content = self.requested, self._content
            problem, self._began_at = "", time.monotonic()
            try:
                self._write(content)
            except Exception as error:
                problem = f"{self.path} cannot be written: {error}"
                if not isinstance(error, OSError):
                    logger.exception("Writing %s failed: a bug; it is retried.", self.path)
            with self._changed:
                if problem and not self._problem:
                    logger.warning("%s.", problem)
                self.written = self.written if problem else number
                self._problem, self.tried, self._retry, self._began_at = problem, number, False, None
                self._changed.notify_all()
            try:
                self.on_saved()
            except Exception:
                logger.exception("The callback after writing %s failed: a bug.", self.path)

    def _has_work(self) -> bool:
        return self._retry or self._ends or not self.is_tried

    def _write(self, content: bytes) -> None:
        """Replace the file. Raises OSError, and then leaves it as it was."""
        new = f"{self.path}.new"
        Path(new).unlink(missing_ok=True)
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(fd)
            os.replace(new, self.path)
        except BaseException:
            with suppress(OSError):  # free the space, which may be what is lacking
                os.unlink(new)
            raise
        directory = open_directory(Path(self.path).parent)
        try:
            os.fsync(directory)
            self.outlives_reboot = filesystem_magic(directory) not in IN_MEMORY
        finally:
            os.close(directory)


def _check_lock(fd: int, found: os.stat_result) -> None:
    """Check that a lock file is this user's, and let nobody else lock it: a kubelet may have widened its mode.

    Raises KvoffdError for another user's, or what is no file.
    """
    if not is_regular(found) or found.st_uid != os.geteuid():
        raise KvoffdError(
            f"{STATE_FILE}.lock belongs to user {found.st_uid}, or is no file: another daemon may keep its clears and "
            "resets in this directory. Remove it if none does."
        )
    if found.st_mode & 0o077:
        with suppress(OSError):  # a file system without modes: the lock is worth having all the same
            os.fchmod(fd, 0o600)


def _open_own(path: str, flags: int) -> int:
    """Open a file without following a link, and without blocking on a FIFO."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


class Quotas(msgspec.Struct):
    quotas: dict[bytes, Count] = {}


class Counted(msgspec.Struct):
    lifetime: Lifetime = Lifetime()
    disk_spent: tuple[float, float] = (0.0, 0.0)
    """Bytes spent of the disks' daily write budget, and when, in seconds since 1970."""


class Format(msgspec.Struct):
    number: Count = 0


RESETS, QUOTAS, COUNTED = b"resets", b"quotas", b"counted"
PARTS: dict[bytes, type[msgspec.Struct]] = {RESETS: Resets, QUOTAS: Quotas, COUNTED: Counted}
"""Parts of ``kvoffd.state`` by name."""
FORMAT = 1
"""Highest number of the part ``format`` that this release can keep. It writes no such part itself."""


@dataclass
class FoundParts:
    """The parts that were read; None for one that is missing or damaged. Fields have the names of ``PARTS``."""

    resets: Resets | None = None
    quotas: Quotas | None = None
    counted: Counted | None = None


@dataclass
class Later:
    """Content of ``kvoffd.state`` that this release does not know."""

    format: int = 0
    fields: dict[bytes, dict[str, msgspec.Raw]] = field(default_factory=dict)
    """Encoded fields by name, of each part."""
    lines: list[bytes] = field(default_factory=list)
    """Whole parts."""


class State:
    """Persistent state of namespaces, saved at each change. For the daemon's thread.

    It is not stored with the pool: a reset also applies to every later pool.
    """

    def __init__(self, file: StateFile, wall_clock: Callable[[], float] = time.time) -> None:
        self.file, self._wall_clock = file, wall_clock
        self.generations = Generations(save=lambda: self.file.save(self._encode(RESETS)), wall_clock=wall_clock)
        self.quotas: dict[bytes, int] = {}
        """Quotas in bytes by namespace, as last saved."""
        self.counted = Counted()
        self._later = Later()
        self._lines = dict.fromkeys(PARTS, b"")
        """Lines of the file by part, as last encoded; empty before. The resets may be thousands, and other parts change
        more often."""

    def restore(self) -> None:
        """Read the file. Damage to a part loses only that part.

        If the resets are lost, all existing blocks become void, and namespaces are not shared until they are reset on
        all nodes. Raises KvoffdError if the file exists but cannot be read, or is a later release's that this one
        cannot keep.
        """
        try:
            content, why = self.file.read(), "it is damaged"
        except FileNotFoundError:
            return
        except ValueError as error:
            content, why = b"", str(error)
        except OSError as error:
            reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise KvoffdError(
                f"{self.file.path}, the record of clears and resets, cannot be read ({reason}); fix that. "
                "Without it cleared blocks may come back from disks and shared stores."
            ) from error
        found, self._later = _parts_of(content)
        if self._later.format > FORMAT:
            raise KvoffdError(
                f"{self.file.path}, the record of clears and resets, is in format {self._later.format} of a later "
                "release of kvoffd; this one would destroy it. Start the later release again."
            )
        self.generations.restore(found.resets or Resets())
        self.quotas, self.counted = (found.quotas or Quotas()).quotas, found.counted or Counted()
        if lost := ", ".join(name for name, part in vars(found).items() if part is None):
            logger.warning("Cannot use these parts of %s, because %s: %s.", self.file.path, why, lost)
        if found.resets is None:
            logger.warning(
                "Earlier clears and resets are unknown. So all existing blocks are void, and no namespace is shared "
                "with other nodes until you clear it on all nodes: once engines have opened theirs, run `kvoffd-cli "
                "clear --all --all-nodes`."
            )
            self.generations.stop_sharing_all()
        if content != (repaired := self._encode(*PARTS)):
            self.file.save(repaired)

    @property
    def is_saved(self) -> bool:
        """Whether the next daemon would find all of it."""
        return self.file.written >= self.file.requested

    def reply_once_saved(self, reply: Done, until: float, otherwise: str, in_memory: str = "") -> Pending:
        """Return ``reply``, to be sent once all changes so far are in the file on its device.

        If the write fails or has not ended at the time ``until``, the reply is the error NOT_KEPT with the sentence
        ``otherwise``; if the file is in memory, with ``in_memory``, unless that is empty.
        """
        file, number = self.file, self.file.requested

        def poll(late: bool) -> Done | None:
            tried = file.tried >= number
            if file.written >= number:
                if in_memory and not file.outlives_reboot:
                    raise KvoffdError(in_memory, ErrorCode.NOT_KEPT)
                return reply
            if not tried and not late:
                return None
            raise KvoffdError(f"It is done, but {file.unsaved_reason}. {otherwise}", ErrorCode.NOT_KEPT)

        return Pending(poll, until)

    # --- quotas, totals and the file -------------------------------------------------------------

    def save_quotas(self, quotas: Mapping[bytes, int]) -> None:
        self.quotas = dict(quotas)
        self.file.save(self._encode(QUOTAS))

    def save_lifetime(self, lifetime: Lifetime) -> None:
        """Save the totals if they differ in more than ``since``: a daemon without work need not write."""
        if lifetime != msgspec.structs.replace(self.counted.lifetime, since=lifetime.since):
            self.counted.lifetime = lifetime
            self.file.save(self._encode(COUNTED))

    def save_disk_spent(self, nbytes: float) -> None:
        self.counted.disk_spent = nbytes, self._wall_clock()
        self.file.save(self._encode(COUNTED))

    def _encode(self, *changed: bytes) -> bytes:
        """Encode parts that have changed, and return the file's content with them.

        The resets are in it twice, so that damage to one place loses none.
        """
        parts = {RESETS: self.generations.resets, QUOTAS: Quotas(self.quotas), COUNTED: self.counted}
        for name, part in parts.items():
            if name in changed or not self._lines[name]:
                body = name + b" " + msgspec.json.encode({**asdict(part), **self._later.fields.get(name, {})})
                self._lines[name] = b"%08x %s\n\n" % (zlib.crc32(body), body)
        later = [line + b"\n\n" for line in self._later.lines]
        return b"".join([*self._lines.values(), *later, self._lines[RESETS]])


def _parts_of(content: bytes) -> tuple[FoundParts, Later]:
    """Return the undamaged parts of a state file, and what a later release has added."""
    found, later = FoundParts(), Later()
    checksum, _, whole = content.partition(b"\n")
    if checksum == b"%08x" % zlib.crc32(whole):  # the file of 0.2
        for name, kind in PARTS.items():
            with suppress(ValueError, RecursionError):
                setattr(found, name.decode(), msgspec.json.decode(whole, type=kind))
        return found, later
    for line in content.split(b"\n"):
        checksum, _, body = line.partition(b" ")
        name, _, encoded = body.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(body):
            continue
        if name == b"format":
            later.format = max(later.format, _format_of(encoded))
        if name not in PARTS:
            later.lines.append(line)
            continue
        with suppress(ValueError, RecursionError):
            setattr(found, name.decode(), msgspec.json.decode(encoded, type=PARTS[name]))
            fields = msgspec.json.decode(encoded, type=dict[str, msgspec.Raw])
            known = PARTS[name].__struct_fields__
            later.fields[name] = {key: raw for key, raw in fields.items() if key not in known}
    return found, later


def _format_of(encoded: bytes) -> int:
    """Return the number of a file's format; one above this release's if it cannot be read."""
    try:
        return msgspec.json.decode(encoded, type=Format).number
    except (ValueError, RecursionError):
        return FORMAT + 1


def open_state_file(config: Config, name: str, max_bytes: int) -> StateFile:
    """Return the file ``name`` in systemd's StateDirectory= if there is one, else in the daemon's directory.

    Raises NoMoreThreads.
    """
    directory = os.environ.get("STATE_DIRECTORY", "").partition(":")[0] or config.directory
    return StateFile(f"{directory}/{name}", max_bytes)


class PolicyFile:
    """The policy's state, in ``kvoffd.policy``. It is written every POLICY_EVERY_S and when the daemon ends."""

    def __init__(self, policy: Policy, config: Config) -> None:
        self._policy = policy
        self._name = config.eviction_policy.encode()
        self._file = open_state_file(config, POLICY_FILE, MAX_POLICY_BYTES)
        self._due = time.monotonic() + POLICY_EVERY_S

    def restore(self) -> None:
        """Restore the new policy from an earlier daemon's file, if it is usable.

        An unusable file is removed, so that it is reported once. Another policy's stays until this one writes.
        """
        path = self._file.path
        try:
            name, _, state = self._file.read().partition(b"\n")
            if name == self._name:
                self._policy.restore(state)
            elif name.decode("ascii", "replace") in POLICY_NAMES:
                logger.info("The policy state in %s is of another policy and is not used.", path)
            else:
                raise ValueError("it is not a policy's")
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            logger.warning("Ignoring the policy state in %s: %s. The policy starts cold.", path, error)
            with suppress(OSError):
                os.unlink(path)

    def tick(self) -> None:
        if time.monotonic() >= self._due and self._file.is_tried:
            self._due = time.monotonic() + POLICY_EVERY_S
            self._save()

    def close(self) -> None:
        """Save the policy's state for the next daemon. If that fails, the previous file stays."""
        self._save()
        self._file.close()

    def _save(self) -> None:
        if state := self._policy.state():
            self._file.save(self._name + b"\n" + state)
