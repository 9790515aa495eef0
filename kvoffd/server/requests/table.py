"""Which function answers which message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvoffd.server.requests import admin, blocks, disks, memory, scheduler, session, worker
from kvoffd_proto import blocks as b
from kvoffd_proto import messages as m

# The message type is the key, so each function's third parameter is of that very type.
Handler = Callable[[Any, Any, Any], m.AnyReply | None]

HANDLERS: dict[type[m.AnyRequest], Handler] = {
    m.Hello: session.hello,
    m.Heartbeat: session.heartbeat,
    m.Replay: session.replay,
    m.OpenNamespace: memory.open_namespace,
    m.Register: memory.register,
    m.Unregister: memory.unregister,
    m.Lookup: scheduler.lookup,
    m.Release: scheduler.release,
    m.Invalidate: scheduler.invalidate,
    m.Reset: scheduler.reset,
    m.Store: worker.store,
    m.Load: worker.load,
    m.Cancel: worker.cancel,
    m.Stats: admin.stats,
    m.Health: admin.health,
    m.Sessions: admin.sessions,
    m.Namespaces: admin.namespaces,
    m.Clear: admin.clear,
    m.Scrub: admin.scrub,
    b.DescribeNamespace: blocks.describe_namespace,
    b.RestoreNamespace: blocks.restore_namespace,
    b.ListBlocks: blocks.list_blocks,
    b.GetBlocks: blocks.get_blocks,
    b.PutBlocks: blocks.put_blocks,
    b.PinBlocks: blocks.pin_blocks,
    m.AttachDisk: disks.attach,
    m.DrainDisk: disks.drain,
    m.DetachDisk: disks.detach,
}
