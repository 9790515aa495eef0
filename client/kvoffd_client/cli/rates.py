"""What the daemon does per second."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffd_proto.messages import StatsReply


@dataclass(frozen=True)
class Totals:
    """Counters since the daemon's start, over all namespaces. Also used for their differences, per second."""

    requests: float
    events: float
    evicted_blocks: float
    invalidated_blocks: float
    dropped_keys: float


@dataclass(frozen=True)
class Rates:
    """Speeds between two samples or, where there is only one, as the daemon averages them itself.

    Attributes:
        window_seconds: time between the samples; None where there is only one.
        cpu_share: CPU seconds per second, more than 1 where several cores work; with one sample since the start.
        totals: counters per second; None where there is only one sample.
    """

    window_seconds: float | None
    store_bytes: float
    load_bytes: float
    lookups: float
    cpu_share: float
    totals: Totals | None


def totals_of(reply: StatsReply) -> Totals:
    """Sum the counters of ``reply``."""
    return Totals(
        requests=reply.requests,
        events=reply.events_published,
        evicted_blocks=sum(namespace.evicted_blocks for namespace in reply.namespaces),
        invalidated_blocks=sum(namespace.invalidated_blocks for namespace in reply.namespaces),
        dropped_keys=sum(namespace.dropped_keys for namespace in reply.namespaces),
    )


def rates_between(now: StatsReply, before: StatsReply | None) -> Rates:
    """Return the rates of ``now``. A ``before`` of another life of the daemon, or not older, counts as none."""
    if before is None or before.epoch != now.epoch or now.uptime_seconds <= before.uptime_seconds:
        return Rates(
            window_seconds=None,
            store_bytes=now.store.bytes_per_second,
            load_bytes=now.load.bytes_per_second,
            lookups=now.lookups_per_second,
            cpu_share=_per_second(now.cpu_seconds, now.uptime_seconds),
            totals=None,
        )
    seconds = now.uptime_seconds - before.uptime_seconds
    new, old = totals_of(now), totals_of(before)
    return Rates(
        window_seconds=seconds,
        store_bytes=_per_second(now.store.bytes - before.store.bytes, seconds),
        load_bytes=_per_second(now.load.bytes - before.load.bytes, seconds),
        lookups=_per_second(now.lookup_latency.count - before.lookup_latency.count, seconds),
        cpu_share=_per_second(now.cpu_seconds - before.cpu_seconds, seconds),
        totals=Totals(
            requests=_per_second(new.requests - old.requests, seconds),
            events=_per_second(new.events - old.events, seconds),
            evicted_blocks=_per_second(new.evicted_blocks - old.evicted_blocks, seconds),
            invalidated_blocks=_per_second(new.invalidated_blocks - old.invalidated_blocks, seconds),
            dropped_keys=_per_second(new.dropped_keys - old.dropped_keys, seconds),
        ),
    )


def _per_second(amount: float, seconds: float) -> float:
    """A counter that fell (a namespace was closed) is no negative speed."""
    return max(amount, 0) / seconds if seconds > 0 else 0.0
