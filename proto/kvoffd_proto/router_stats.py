"""What is counted of KV events for routers."""

from __future__ import annotations

from typing import Annotated

from kvoffd_proto.wire import ByteCount, Count, Wire, counter, gauge


class RouterStats(Wire, frozen=True):
    """KV events for routers."""

    subscribers: Annotated[Count, gauge("Routers that are connected and have subscribed.")]
    messages: Annotated[Count, counter("Messages of KV events to routers, heartbeats included.")]
    snapshots: Annotated[Count, counter("Times that routers which came late were told all.")]
    replays: Annotated[Count, counter("Requests of routers for messages that they have missed.")]
    dropped_subscribers: Annotated[
        Count, counter("Routers that were disconnected, since they did not read or sent what is not ZeroMQ.")
    ]
    told_blocks: Annotated[Count, gauge("Blocks that routers know of.")]
    untold_blocks: Annotated[
        Count,
        counter("Blocks that were not told when they came, since their tokens were not known or there was no room."),
    ]
    index_bytes: Annotated[ByteCount, gauge("Memory of what is known of blocks for routers.")]
