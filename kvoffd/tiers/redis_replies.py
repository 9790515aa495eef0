"""Error replies of a Redis or Valkey server, by kind."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from kvoffd.tiers.store import StoreError


class Refusal(Enum):
    """Reason why a server does not do what it was asked."""

    MOVED = auto()
    """Another master of the cluster has the slot."""
    MOVING = auto()
    """Another master is getting the slot, and may have the key."""
    DOWN = auto()
    """The cluster does not serve the slot, or the server is not in touch with the others."""
    BUSY = auto()
    """The server serves again later."""
    FULL = auto()
    WRONG_TYPE = auto()
    CROSS_SLOT = auto()
    REPLICA = auto()
    FORBIDDEN = auto()
    """The user may not do that."""
    LOGIN = auto()
    """The server refuses the login, or wants one."""
    OTHER = auto()


class RefusedReply(NamedTuple):
    """An error reply that is no failure, and the error that it would be elsewhere."""

    kind: Refusal
    error: StoreError


ELSEWHERE = frozenset({Refusal.MOVED, Refusal.MOVING, Refusal.DOWN})
"""Refusals of a cluster's server for a key whose slot it does not own, or not serve."""
_CODES = {
    b"MOVED": Refusal.MOVED,
    b"ASK": Refusal.MOVING,
    b"CLUSTERDOWN": Refusal.DOWN,
    b"BUSY": Refusal.BUSY,  # while a script runs
    b"LOADING": Refusal.BUSY,  # while it loads its data
    b"OOM": Refusal.FULL,
    b"WRONGTYPE": Refusal.WRONG_TYPE,
    b"CROSSSLOT": Refusal.CROSS_SLOT,
    b"READONLY": Refusal.REPLICA,
    b"NOPERM": Refusal.FORBIDDEN,
    b"NOAUTH": Refusal.LOGIN,
    b"WRONGPASS": Refusal.LOGIN,
}
_TOO_MANY_CLIENTS = b"-ERR max number of clients "
"""Reply to a connection beyond the server's ``maxclients``, which it closes."""


def refusal_of(line: bytes) -> Refusal | None:
    """Return the kind of an error reply; None if the line is another reply."""
    if line[:1] != b"-":
        return None
    if (known := _CODES.get(line[1:].partition(b" ")[0])) is not None:
        return known
    if line.startswith(_TOO_MANY_CLIENTS):
        return Refusal.BUSY
    return Refusal.LOGIN if b"AUTH" in line else Refusal.OTHER
