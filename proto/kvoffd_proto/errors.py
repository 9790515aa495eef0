"""Error codes of the wire, each with the sentence that explains it."""

from __future__ import annotations

from enum import IntEnum


class ErrorCode(IntEnum):
    """Reason of a refusal of a request, job or connection. The number is sent; the sentence explains it."""

    sentence: str

    def __new__(cls, number: int, sentence: str) -> ErrorCode:
        code = int.__new__(cls, number)
        code._value_ = number
        code.sentence = sentence
        return code

    MALFORMED = 1, "The frame is not a message of this protocol; it was ignored."
    TOO_LARGE = 2, "The frame is larger than the limit in Welcome; split it."
    BAD_VERSION = 3, "The two ends speak different protocol versions; install the same kvoffd release on both."
    BAD_TOKEN = 4, "No session has this routing id, or its lifeline has ended; open a new one, send Hello again."
    FORBIDDEN = 5, "This user is not permitted to do that: see allowed_uids, allowed_gids and admin_uids."
    NO_HELLO = 6, "The session has not sent Hello yet; Hello must be its first message."
    WRONG_ROLE = 7, "The session's role may not send this message."
    UNKNOWN_NAMESPACE = 8, "No namespace with this fingerprint is open; send OpenNamespace first."
    NAMESPACE_MISMATCH = 9, "A namespace with this fingerprint is open with another geometry."
    BAD_GEOMETRY = 10, "The registration's tensors or groups do not fit the namespace or the pool."
    UNKNOWN_REGISTRATION = 11, "The session has no registration with this id; register again."
    UNKNOWN_SEGMENT = 12, "No memory segment with this id came over the session's lifeline."
    UNSAFE_SEGMENT = 13, "The segment is too small, is not fully allocated, or is not a memfd sealed against shrinking."
    OUT_OF_BOUNDS = 14, "A tensor reaches outside its memory segment."
    BAD_KEYS = 15, "The keys are not a whole number of keys of the namespace's length, or a key occurs twice."
    BAD_BLOCK_IDS = 16, "A block id lies outside the registered tensors, or their number does not fit the keys."
    DUPLICATE_JOB = 17, "The session already has a job with this id; use another id."
    UNKNOWN_LEASE = 18, "The lease is unknown, has ended or belongs to another namespace; look the keys up again."
    TOO_MANY = 19, "The session reached a limit in Welcome; wait for completions and try again."
    SHUTTING_DOWN = 20, "The daemon is stopping and accepts no new work; connect again when it has restarted."
    INTERNAL = 21, "The daemon failed while it handled the message, part of which may have taken effect; see its log."
    NOT_READY = 22, "A block of the job is not in the pool, or is incomplete; recompute it."
    NO_SPACE = 23, "The pool has no space for the block: everything in it is pinned or being written."
    CANCELLED = 24, "The job was cancelled before it started."
    DEADLINE = 25, "The job did not finish before its deadline."
    COPY_FAILED = 26, "The copy failed; the destination must be treated as garbage."
    SESSION_ENDED = 27, "The session ended before the job did."
    UNSUPPORTED = 28, "The daemon was built without support for this message."
    CHECKSUM = 29, "A block's bytes in the pool do not match their checksum; the block is dropped, recompute it."
    BAD_ARGUMENT = 30, "The administrator's request names something that does not exist, or cannot be done now."
    NOT_KEPT = 31, "Done, but not written to a device: a kill or a reboot may undo it."
