"""Messages between a daemon, its helper process and the helpers of peers, and what all of these must agree on."""

from __future__ import annotations

from hashlib import blake2b

import msgspec
import zmq
from zmq.utils import z85

from kvoffd.tiers.store import StoreError, StoreFault

SLICE_BYTES = 4 * 2**20
"""Memory that one read of the helper may use."""
SLICES = 4
"""Such reads of one peer at once: two threads with ``AHEAD`` (``peer_store.py``) each. Another peer's reads cannot use
their memory."""
NOT_THERE, LENT, BUSY = range(3)
"""Answers about a block that a peer wants to borrow. BUSY: it has lent as many as it may."""
MAX_MESSAGE_BYTES = 192 * 1024
"""Limit of a message between helper and daemon, and between two helpers: what a Unix socket takes at once."""
MAX_QUEUED = 64
"""Messages that wait at each end of a connection between two nodes."""
MAX_KEYS = 2048
"""Keys of one message, of up to 64 bytes."""
MAX_FOLLOWED = 1024
"""Namespaces of one ``Follow`` besides the first."""
GENERATION_BYTES = 8
FOLLOWED_BYTES = GENERATION_BYTES + 1
"""Reply to a ``Follow``, for each namespace."""
MAX_BLOCKS, MAX_SHARDS = 1024, 4096
"""Blocks, and shards of them, that are lent at once."""
BEAT_S = 1.0
"""Interval of the helper's signs of life."""
MODULES = "nixl_cu12", "nixl_cu13"
"""Names of NIXL's package."""
_FRAME_BYTES = 10
"""Bytes before a message's payload: kind, peer or length of a route, and id."""


FIND, PIN, RELEASE, READ, FREE, REPLY, CONNECT, FOLLOW = range(8)
"""Kinds of frames to the helper. It sends FIND, PIN, RELEASE and FOLLOW to a peer, where they come in a REQUEST."""
ANSWER, DONE, FAILED, REQUEST, STARTED, BEAT = range(16, 22)
"""Kinds of frames from the helper. BEAT has no id: in its place are the connections to ``listen`` that the helper has
refused so far."""


class HelperSettings(msgspec.Struct, array_like=True, frozen=True):
    """First message to the helper. Descriptors are inherited; -1 for none."""

    peers: list[str]
    """Addresses; an empty one is set later, by ``HelperProcess.connect``."""
    listen: str
    secret: bytes
    pool: tuple[int, int, int] = -1, 0, 0
    """Descriptor, offset and size of the pool, opened for reading: it is served."""
    landing: tuple[int, int] = -1, 0
    """Descriptor and size of the memory for what is read."""


class Follow(msgspec.Struct, array_like=True, frozen=True):
    """Tells a namespace's generation, which the peer follows if it is higher, or 0. The reply is the peer's, of
    ``GENERATION_BYTES``, little-endian, and a byte: 1 if the peer has dropped all earlier blocks, and its next daemon
    would know that, else 0.

    Attributes:
        others: fingerprints of further namespaces whose generations are asked for, up to ``MAX_FOLLOWED``. The reply
            has the same of each. A peer of an earlier build ignores them: its reply is of the first namespace alone.
        cleared_at: time of the clear whose generation this is, in microseconds since 1970; 0 if it is sent for another
            reason. Clears by two nodes that do not know of each other may have one number. So a peer that has it
            already drops what it stored before this time. One of an earlier build ignores it.
    """

    fingerprint: bytes
    generation: int
    others: bytes = b""
    cleared_at: int = 0


class Find(msgspec.Struct, array_like=True, frozen=True):
    """Asks which blocks a peer has. The reply is its generation, of ``GENERATION_BYTES``, little-endian, and a byte for
    each key, 0 or 1.

    Attributes:
        generation: the asker's fleet generation of the namespace. A peer with another one has nothing.
    """

    fingerprint: bytes
    generation: int
    group: int
    key_bytes: int
    keys: bytes


class Pin(msgspec.Struct, array_like=True, frozen=True):
    """Borrows blocks whose shards have these lengths. The reply is ``Pinned``; RELEASE with the same id ends it."""

    wanted: Find
    lengths: list[int]


class Pinned(msgspec.Struct, array_like=True, frozen=True):
    """Blocks that are lent.

    Attributes:
        seconds: time until the peer may overwrite them.
        there: a byte for each key, NOT_THERE, LENT or BUSY; after the first that is BUSY none is lent.
        offsets, checksums, first_blocks: [blocks that are there, ranks], of 8, 8 and 2 bytes, little-endian.
    """

    seconds: float
    there: bytes
    offsets: bytes
    checksums: bytes
    first_blocks: bytes


def frame(kind: int, number: int, ident: int, payload: bytes = b"") -> bytes:
    """Return a message of the channel. ``number``: of a peer, or the length of a route at the payload's beginning; at
    most 255."""
    return bytes((kind, number)) + ident.to_bytes(8, "little") + payload


def parsed(data: bytes) -> tuple[int, int, int, bytes]:
    """Return what ``frame`` was given."""
    return data[0], data[1], int.from_bytes(data[2:_FRAME_BYTES], "little"), data[_FRAME_BYTES:]


def curve_keys(secret: bytes) -> tuple[bytes, bytes]:
    """Return the public and the secret key of both ends of each connection, made from the nodes' secret."""
    secret_key = z85.encode(blake2b(secret, digest_size=32, person=b"kvoffd peers").digest())
    return zmq.curve_public(secret_key), secret_key


def peer_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, keys: tuple[bytes, bytes], *, is_server: bool = False
) -> zmq.Socket[bytes]:
    """Return a socket that is not connected yet, for nodes with these keys."""
    made: zmq.Socket[bytes] = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.SNDHWM, MAX_QUEUED)
    made.setsockopt(zmq.RCVHWM, MAX_QUEUED)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    made.setsockopt(zmq.IPV6, 1)
    made.curve_publickey, made.curve_secretkey = keys
    if is_server:
        made.curve_server = True
    else:
        made.curve_serverkey = keys[0]
    return made


def decode_raised(reply: bytes, generation: int) -> int:
    """Return the generation of a peer that was sent this one, from its reply. Raises StoreError unless it has dropped
    all earlier blocks for good."""
    ((raised, is_kept),) = decode_followed(reply, 1)
    if raised < generation:
        why = "The peer has too many resets to follow; it lends nothing of this namespace yet."
        raise StoreError(StoreFault.BUSY, why)
    if not is_kept:
        why = "The peer has not written the reset to its kvoffd.state yet: a kill there may bring blocks back."
        raise StoreError(StoreFault.UNKEPT, why)
    return raised


def decode_followed(reply: bytes, count: int) -> list[tuple[int, bool]]:
    """Return the generations of a reply to ``Follow``, and whether each is kept; of an earlier build's the first one.
    Raises StoreError."""
    if len(reply) not in (FOLLOWED_BYTES, FOLLOWED_BYTES * count):
        raise StoreError(StoreFault.PROTOCOL, f"The answer about {count} generations has {len(reply)} bytes.")
    return [
        (int.from_bytes(reply[at : at + GENERATION_BYTES], "little"), reply[at + GENERATION_BYTES] == 1)
        for at in range(0, len(reply), FOLLOWED_BYTES)
    ]
