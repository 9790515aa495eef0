"""What all messages of ``jobs.sock`` are made of: annotated values and base classes."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

FINGERPRINT_BYTES = 32
TOKEN_BYTES = 16
BLOCK_ID_BYTES = 4

RequestId = Annotated[int, Meta(ge=0, le=2**63 - 1, description="Chosen by the client, echoed in the reply.")]
Token = Annotated[
    bytes,
    Meta(
        min_length=TOKEN_BYTES,
        max_length=TOKEN_BYTES,
        description="The session's secret, from the lifeline's Greeting.",
    ),
]
Epoch = Annotated[int, Meta(ge=0, le=2**63 - 1, description="The daemon's life that answers.")]
SessionId = Annotated[int, Meta(ge=1, lt=2**31, description="The session.")]
Fingerprint = Annotated[
    bytes,
    Meta(
        min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES, description="The namespace's fingerprint, 32 bytes."
    ),
]
LeaseId = Annotated[
    int,
    Meta(
        ge=2**32,
        le=2**63 - 1,
        description="``session_id * 2**32 + n``, n chosen by the scheduler's client and never used twice.",
    ),
]
JobId = Annotated[int, Meta(ge=0, le=2**63 - 1, description="Unique among the session's unfinished jobs.")]
RegistrationId = Annotated[
    bytes, Meta(min_length=16, max_length=16, description="Random id made by the worker for this registration.")
]
Rank = Annotated[int, Meta(ge=0, lt=4096, description="Rank of the worker in its engine, below ``world_size``.")]
GroupIndex = Annotated[int, Meta(ge=0, lt=65536, description="KV cache group.")]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
ByteCount = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0)]


class Role(StrEnum):
    """What a session may do."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    ADMIN = "admin"


ABSENT = 0
WRITING = 1
READY = 2
PENDING = 3


class Wire(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of parts of messages: encoded as arrays, unknown trailing fields refused."""


class Message(Wire, frozen=True, tag=lambda name: name.lower()):
    """Base of messages: arrays that begin with the lower-case name."""


class Request(Message, frozen=True):
    """Base of requests."""

    request_id: RequestId
    token: Token


class Reply(Message, frozen=True):
    """Base of replies."""

    request_id: RequestId
    epoch: Epoch


class GroupSpec(Wire, frozen=True):
    """One KV cache group of a namespace."""

    kind: Annotated[str, Meta(max_length=64, description="Attention kind as the engine names it, for display.")]
    tokens_per_block: Annotated[int, Meta(ge=0, lt=2**31, description="Tokens that one key covers; 0 if unknown.")]
    window_tokens: Annotated[int, Meta(ge=0, lt=2**31, description="Sliding window in tokens; 0 for none.")] = 0
