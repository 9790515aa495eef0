"""The errors of clients. Every message says what to do next."""

from __future__ import annotations

from kvoffd_proto.errors import ErrorCode


class KvoffdClientError(Exception):
    """Base of all errors of the client."""


class DaemonUnavailable(KvoffdClientError):
    """The daemon is not there, does not answer, or went away before the answer came."""


class RequestRefused(KvoffdClientError):
    """The daemon answered with an error; nothing changed there. ``code`` says why, the message what to do."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message or code.sentence)
        self.code = code


class RequestTimeout(KvoffdClientError):
    """The daemon did not answer in time. It may still have done what was asked."""


class BlockUnavailable(KvoffdClientError):
    """A block is not in the pool or not pinned any more, or there is no room for it."""


class BlockDamaged(KvoffdClientError):
    """A block's bytes are not those that were stored, or do not fit their description."""


class ForkedProcess(KvoffdClientError):
    """A client was used in a process that was forked after the client was made."""
