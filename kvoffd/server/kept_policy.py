"""What a policy knows, in a file, from one daemon to the next.

A file that is damaged, another user's or another policy's is no obstacle: the policy begins without it, and the log
says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from queue import Empty, Queue

from kvoffd.cache.policies import EvictionPolicy
from kvoffd.config import Config
from kvoffd.server.kept_file import KeptFile, OfNoUse, path_beside_pool

logger = logging.getLogger(__name__)

POLICY_SUFFIX = ".policy"
KEPT_EVERY_S = 300.0
PIECES_S = 0.002
"""For what is made of the record in one step, others being served in between."""
PIECES_AHEAD = 16
"""Made and not written yet."""
PIECE_WAIT_S = 60.0
LAST_WRITE_S = 8.0
_GIVEN_UP = b""
"""In place of a piece: the rest does not come."""
LARGEST_PART, LARGEST_BYTES = 25, 16 << 20
"""A larger file than a part in so many of the pool, and so much more, is not a policy's."""


class KeptPolicy:
    """Keeps what a policy knows in ``<pool_file>.policy``, or ``kvoffd.policy`` in the daemon's directory.

    Now and then, and when the daemon ends.
    """

    def __init__(self, policy: EvictionPolicy, config: Config) -> None:
        self._policy = policy
        self._name = config.eviction_policy.encode()
        most_bytes = config.pool_bytes // LARGEST_PART + LARGEST_BYTES
        self._file = KeptFile(path_beside_pool(config, POLICY_SUFFIX), most_bytes)
        self._due = time.monotonic() + KEPT_EVERY_S
        self._record: Iterator[bytes] | None = None
        """What is still to be made of the record that is being written."""
        self._pieces: Queue[bytes | None] = Queue(PIECES_AHEAD)
        """For the thread that writes; None ends it."""

    def go_on(self) -> None:
        """Have the policy, which is new, go on with what an earlier daemon left, if it left anything."""
        try:
            name, _, record = self._file.read().partition(b"\n")
            if name != self._name:
                raise OfNoUse(f"it is not of the policy {self._name.decode()}" if name else "it is empty")
            self._policy.go_on(record)
        except FileNotFoundError:
            return
        except Exception as error:  # another package's policy may fail in any way
            why = error if isinstance(error, (OSError, ValueError)) else f"the policy failed with {error!r}"
            path = self._file.path
            logger.warning("What a policy knew, in %s, is of no use: %s. The policy begins without it.", path, why)

    def tick(self) -> None:
        """Write the file where that is due, in a thread: a daemon that is killed leaves what it knew then."""
        if not self._file.is_being_written:
            self._record = None  # where it could not be written, too
            if time.monotonic() < self._due:
                return
            self._due = time.monotonic() + KEPT_EVERY_S
            self._complain()
            record, self._pieces = self._made(), Queue(PIECES_AHEAD)
            if not (first := next(record, b"")):
                return
            self._record = record
            self._file.write_soon(chain((self._name, b"\n", first), _taken(self._pieces)))
        until = time.monotonic() + PIECES_S
        while self._record is not None and not self._pieces.full():
            piece = next(self._record, None)
            self._pieces.put_nowait(piece)
            if piece is None:
                self._record = None
            elif time.monotonic() >= until:
                return

    def close(self) -> None:
        """Leave what the policy knows now to the next daemon. Where that fails, it begins anew."""
        if self._record is not None:
            while not self._pieces.empty():
                with suppress(Empty):  # the thread took it
                    self._pieces.get_nowait()
            self._pieces.put_nowait(_GIVEN_UP)
        if self._file.join() and (first := next(record := self._made(), b"")):
            self._file.write_soon(chain((self._name, b"\n", first), _whole(record)))
            if not self._file.join(LAST_WRITE_S):
                logger.warning("%s takes long to write; the next daemon goes on with what it had.", self._file.path)
            self._complain()

    def _made(self) -> Iterator[bytes]:
        """The policy's record, whose last piece is that it was given up where another package's policy fails."""
        try:
            yield from map(bytes, self._policy.record())
        except Exception:
            logger.exception("The policy %s cannot say what it knows.", self._name.decode())
            yield _GIVEN_UP

    def _complain(self) -> None:
        if (error := self._file.error) is not None:
            logger.warning(
                "What the policy knows cannot be written to %s (%s); the next daemon goes on with what was before.",
                self._file.path,
                error,
            )


def _whole(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces. Raises OSError where they were given up."""
    for piece in pieces:
        if piece == _GIVEN_UP:
            raise OSError("it was given up")
        yield piece


def _taken(pieces: Queue[bytes | None]) -> Iterator[bytes]:
    """The pieces as they come, to the None. Raises OSError where that does not come."""
    try:
        yield from _whole(iter(lambda: pieces.get(timeout=PIECE_WAIT_S), None))
    except Empty:
        raise OSError("the daemon gave no more of it") from None
