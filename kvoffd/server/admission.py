"""Who may connect, by the credentials that the kernel tells of a peer."""

from __future__ import annotations

import os

import zmq

from kvoffd.config import Config
from kvoffd.server.session import Peer


def allowed(config: Config) -> tuple[frozenset[int], frozenset[int]]:
    """Users and groups that may. Root and the daemon's own user and group are by default."""
    uids = config.allowed_uids or (0, os.geteuid())
    gids = config.allowed_gids or (os.getegid(),)
    return frozenset(uids), frozenset(gids)


def may_connect(peer: Peer, config: Config) -> bool:
    """Whether the peer's user or group is allowed."""
    uids, gids = allowed(config)
    return peer.uid in uids or peer.gid in gids


def may_administer(peer: Peer, config: Config) -> bool:
    """Whether a peer that may connect may be an administrator: root and the daemon's own user in any case."""
    return not config.admin_uids or peer.uid in {0, os.geteuid(), *config.admin_uids}


def guard(socket: zmq.Socket[bytes], config: Config) -> None:
    """Have ZeroMQ accept the same users, and the daemon's own, which asks itself whether it works.

    Call before the socket is bound. ZeroMQ also looks at the groups that the system's user database gives a user, so it
    may accept one whose primary group alone the lifeline goes by.
    """
    uids, gids = allowed(config)
    for uid in sorted(uids | {os.geteuid()}):
        socket.setsockopt(zmq.IPC_FILTER_UID, uid)
    for gid in sorted(gids):
        socket.setsockopt(zmq.IPC_FILTER_GID, gid)
