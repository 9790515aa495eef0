"""Error codes of the wire, each with the sentence that explains it."""

from __future__ import annotations

from enum import IntEnum


class ErrorCode(IntEnum):
    """Why a request, a job or a connection was refused. The number travels; the sentence explains."""

    MALFORMED = 1
    TOO_LARGE = 2
    BAD_VERSION = 3
    BAD_TOKEN = 4
    FORBIDDEN = 5
    NO_HELLO = 6
    WRONG_ROLE = 7
    UNKNOWN_NAMESPACE = 8
    NAMESPACE_MISMATCH = 9
    BAD_GEOMETRY = 10
    UNKNOWN_REGISTRATION = 11
    UNKNOWN_SEGMENT = 12
    UNSAFE_SEGMENT = 13
    OUT_OF_BOUNDS = 14
    BAD_KEYS = 15
    BAD_BLOCK_IDS = 16
    DUPLICATE_JOB = 17
    UNKNOWN_LEASE = 18
    TOO_MANY = 19
    SHUTTING_DOWN = 20
    INTERNAL = 21
    NOT_READY = 22
    NO_ROOM = 23
    CANCELLED = 24
    DEADLINE = 25
    COPY_FAILED = 26
    SESSION_ENDED = 27
    UNSUPPORTED = 28
    CHECKSUM = 29

    @property
    def sentence(self) -> str:
        """One sentence an operator can act on."""
        return _SENTENCES[self]


_SENTENCES: dict[ErrorCode, str] = {
    ErrorCode.MALFORMED: "The frame is not a message of this protocol; it was dropped and nothing changed.",
    ErrorCode.TOO_LARGE: "The frame is larger than the limit told in Welcome; send it in parts.",
    ErrorCode.BAD_VERSION: "The two ends speak different protocol versions; install the same kvoffd release on both.",
    ErrorCode.BAD_TOKEN: (
        "The session token is unknown or its lifeline has ended; open a new lifeline and say Hello again."
    ),
    ErrorCode.FORBIDDEN: "This user may not use the daemon; add the uid or gid to its allowed users or groups.",
    ErrorCode.NO_HELLO: "The session has not said Hello yet; Hello must be its first message.",
    ErrorCode.WRONG_ROLE: "The session's role may not send this message.",
    ErrorCode.UNKNOWN_NAMESPACE: "No namespace with this fingerprint is open; send OpenNamespace first.",
    ErrorCode.NAMESPACE_MISMATCH: "A namespace with this fingerprint is open with another geometry.",
    ErrorCode.BAD_GEOMETRY: "The registration's tensors or groups do not fit the namespace or the pool.",
    ErrorCode.UNKNOWN_REGISTRATION: "The session holds no registration with this id; register again.",
    ErrorCode.UNKNOWN_SEGMENT: "No memory segment with this id came over the session's lifeline.",
    ErrorCode.UNSAFE_SEGMENT: (
        "The memory segment is not a memfd sealed against shrinking, or is smaller than it was said to be."
    ),
    ErrorCode.OUT_OF_BOUNDS: "A tensor reaches outside its memory segment.",
    ErrorCode.BAD_KEYS: "The keys are not a whole number of keys of the namespace's length, or a key is there twice.",
    ErrorCode.BAD_BLOCK_IDS: (
        "A block id lies outside the registered tensors, or the number of block ids does not fit the keys."
    ),
    ErrorCode.DUPLICATE_JOB: "The session has a job with this id already.",
    ErrorCode.UNKNOWN_LEASE: "The lease is unknown, has ended or belongs to another namespace; look the keys up again.",
    ErrorCode.TOO_MANY: "The session reached a limit told in Welcome; wait for completions and try again.",
    ErrorCode.SHUTTING_DOWN: "The daemon is stopping and takes no new work.",
    ErrorCode.INTERNAL: "The daemon failed while it handled the message; the log has the details and nothing changed.",
    ErrorCode.NOT_READY: "A block of the job is not in the pool, or not completely; recompute it.",
    ErrorCode.NO_ROOM: "The pool has no room for the block, since everything in it is pinned or being written.",
    ErrorCode.CANCELLED: "The job was cancelled before it started.",
    ErrorCode.DEADLINE: "The job did not finish before its deadline.",
    ErrorCode.COPY_FAILED: "The copy failed; the destination must be treated as garbage.",
    ErrorCode.SESSION_ENDED: "The session ended before the job did.",
    ErrorCode.UNSUPPORTED: "The daemon was built without what this message asks for.",
    ErrorCode.CHECKSUM: "A block's bytes in the pool are not those that were stored; it is dropped, recompute it.",
}
