"""What stops a disk tier from being opened."""

from __future__ import annotations

from kvoffd.errors import KvoffdError
from kvoffd_proto.errors import ErrorCode


class DiskError(KvoffdError):
    """The directory cannot be used as a tier. The message says why and what to do."""

    code = ErrorCode.NO_ROOM


class OpeningStopped(KvoffdError):
    """Opening was told to stop before it was done."""
