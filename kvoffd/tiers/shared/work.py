"""What the daemon's thread asks of a shared tier's threads, and how it hears of the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvoffd.tiers.tier import TierBlock, TierKey, TierResult


@dataclass(slots=True, eq=False)
class Ask:
    """Keys of one group to be asked for, for one owner among whom threads take turns."""

    owner: int
    fingerprint: bytes
    group: int
    keys: Sequence[bytes]
    deadline: float
    """By when it must have begun, unless it is for no keys but the generation alone."""
    prefix: bool
    """Whether only how many of the first are there is of use."""


@dataclass(slots=True, eq=False)
class Read:
    """A block to be read into views of the pool, one a shard."""

    block_id: TierKey
    generation: int
    views: Sequence[memoryview]
    deadline: float


@dataclass(slots=True, eq=False)
class Write:
    """A block to be written from views of the pool, one a shard."""

    block: TierBlock
    generation: int
    views: Sequence[memoryview]


@dataclass(slots=True, eq=False)
class Raise:
    """A generation to be raised, so that the blocks of a namespace are void for all nodes."""

    fingerprint: bytes
    deadline: float
    ended: bool = False
    problem: str = ""


class WorkListener(Protocol):
    """Called in the daemon's thread when work has ended."""

    def raised(self, one: Raise, generation: int, problem: str) -> None:
        """``problem``: why it was not raised."""

    def asked(self, ask: Ask, generation: int, found: Sequence[bool], seconds: float) -> None: ...

    def unanswered(self, ask: Ask) -> None: ...

    def read_ended(self, read: Read, result: TierResult, block: TierBlock | None) -> None: ...

    def write_ended(self, write: Write, result: TierResult) -> None: ...

    def writing_refused(self, sentence: str) -> None:
        """The server answers, and takes no writes now; why."""

    def failed(self, kind: str, sentence: str) -> None: ...
