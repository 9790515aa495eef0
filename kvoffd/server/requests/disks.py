"""Requests about the disk tier's directories."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvoffd.errors import KvoffdError
from kvoffd.server.disks import Disks
from kvoffd.server.session import Session
from kvoffd.settings import MIN_DISK_BYTES, DiskSize
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.units import format_size

if TYPE_CHECKING:
    from kvoffd.server.service import Service


def attach(service: Service, session: Session, message: m.AttachDisk) -> m.Done:
    """Begin to use a directory."""
    disks = _disks(service, session)
    service.refuse_when_stopping()
    if not os.path.isabs(message.directory) or "\0" in message.directory:
        raise KvoffdError(f"{message.directory!r} is no absolute path; name the directory by one.", ErrorCode.MALFORMED)
    if message.size_bytes < MIN_DISK_BYTES:
        raise KvoffdError(
            f"{format_size(message.size_bytes)} are too little for a disk tier; give it {format_size(MIN_DISK_BYTES)} "
            "or more.",
            ErrorCode.MALFORMED,
        )
    disks.attach(DiskSize(os.path.normpath(message.directory), message.size_bytes))
    return m.Done(message.request_id, service.epoch, 1)


def drain(service: Service, session: Session, message: m.DrainDisk) -> m.Done:
    """Write nothing to a directory any more."""
    _disks(service, session).drain(os.path.normpath(message.directory))
    return m.Done(message.request_id, service.epoch, 1)


def detach(service: Service, session: Session, message: m.DetachDisk) -> m.Done:
    """Give a directory up."""
    _disks(service, session).detach(os.path.normpath(message.directory))
    return m.Done(message.request_id, service.epoch, 1)


def _disks(service: Service, session: Session) -> Disks:
    """The disks, for whom it is: the daemon makes files in any directory that its user may write to."""
    if session.peer.key or session.peer.uid not in (0, os.geteuid()):
        raise KvoffdError(
            f"Disks are for root and the daemon's own user (uid {os.geteuid()}) on this machine; {session.peer} may "
            "only look at them.",
            ErrorCode.FORBIDDEN,
        )
    if service.disks is None:
        raise KvoffdError("This daemon has no disk tier.", ErrorCode.UNSUPPORTED)
    return service.disks
