"""Which function answers which message, and whose roles may send it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvoffd.server.requests import admin, blocks, disks, memory, scheduler, session, worker
from kvoffd_proto import blocks as b
from kvoffd_proto import messages as m

SCHEDULER = frozenset({m.Role.SCHEDULER})
WORKER = frozenset({m.Role.WORKER})
ADMIN = frozenset({m.Role.ADMIN})
ENGINE = SCHEDULER | WORKER
ANY = ENGINE | ADMIN

# The message type is the key, so each function's third parameter is of that very type.
Handler = Callable[[Any, Any, Any], m.AnyReply | None]

HANDLERS: dict[type[m.AnyRequest], tuple[frozenset[m.Role], Handler]] = {
    m.Hello: (ANY, session.hello),
    m.Heartbeat: (ANY, session.heartbeat),
    m.Replay: (WORKER, session.replay),
    m.OpenNamespace: (ENGINE, memory.open_namespace),
    m.Register: (WORKER, memory.register),
    m.Unregister: (WORKER, memory.unregister),
    m.Lookup: (SCHEDULER, scheduler.lookup),
    m.Release: (SCHEDULER | ADMIN, scheduler.release),
    m.Invalidate: (SCHEDULER, scheduler.invalidate),
    m.Reset: (SCHEDULER, scheduler.reset),
    m.Store: (WORKER, worker.store),
    m.Load: (WORKER, worker.load),
    m.Cancel: (WORKER, worker.cancel),
    m.Stats: (ANY, admin.stats),
    m.Health: (ANY, admin.health),
    m.Sessions: (ADMIN, admin.sessions),
    m.Namespaces: (ADMIN, admin.namespaces),
    m.Clear: (ADMIN, admin.clear),
    m.Scrub: (ADMIN, admin.scrub),
    b.DescribeNamespace: (ADMIN, blocks.describe_namespace),
    b.RestoreNamespace: (ADMIN, blocks.restore_namespace),
    b.ListBlocks: (ADMIN, blocks.list_blocks),
    b.GetBlocks: (ADMIN, blocks.get_blocks),
    b.PutBlocks: (ADMIN, blocks.put_blocks),
    b.PinBlocks: (ADMIN, blocks.pin_blocks),
    m.AttachDisk: (ADMIN, disks.attach),
    m.DrainDisk: (ADMIN, disks.drain),
    m.DetachDisk: (ADMIN, disks.detach),
}

OVER_TCP = frozenset({m.Hello, m.Stats, m.Health, m.Sessions, m.Namespaces, m.Clear, m.Scrub})
"""All that is answered to administrators over TCP: nothing that needs a lifeline, and no block's bytes or keys."""
