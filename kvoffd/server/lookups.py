"""Lookups of keys, leases on the blocks found, hints and invalidations."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Namespace
from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.observe.meters import LOOKUP_BOUNDS_S, DurationHistogram, RecentDurations
from kvoffd.server.handlers import answers
from kvoffd.server.session import Session
from kvoffd.server.tier_supervisor import TierSupervisor
from kvoffd.server.tracer import Tracer
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode


class Lookups:
    """The requests of schedulers about keys.

    Attributes:
        times: durations of lookups, without those of benches.
        recent: the latest of these.
    """

    def __init__(
        self, config: Config, cache: Cache, clock: Callable[[], float], tier_supervisor: TierSupervisor, tracer: Tracer
    ) -> None:
        self._limits, self._cache, self._clock = config.limits, cache, clock
        self._tier_supervisor, self._tracer = tier_supervisor, tracer
        self.times = DurationHistogram(LOOKUP_BOUNDS_S)
        self.recent = RecentDurations(self.times, clock)

    @answers(m.Lookup)
    def lookup(self, session: Session, message: m.Lookup) -> m.LookupReply:
        """Return the states of keys, and pin those that are ready."""
        started = self._clock()
        namespace, groups = session.namespaces[message.namespace], [(part.group, part.keys) for part in message.groups]
        _check_count(groups, namespace, self._limits.max_keys_per_request)
        peer = self._tier_supervisor.peers.at(message.peer) if message.peer else ""
        states, lease = self._cache.lookup(
            namespace,
            session.id,
            message.lease_id,
            groups,
            again=message.again,
            reported=message.reported,
            peer=peer,
            giver=message.giver,
        )
        now, pinned, ttl_ms, wait_ms, asking = self._clock(), 0, 0, 0, 0
        if lease is not None:
            pinned, ttl_ms = len(lease.blocks), max(1, round(1000 * (lease.deadline - now)))
            if lease.coming:
                wait_ms, asking = math.ceil(1000 * lease.wait_s), lease.asking
        if not namespace.of_bench:
            self.times.observe(now - started)
        return m.LookupReply(message.request_id, message.lease_id, states, pinned, ttl_ms, wait_ms, asking)

    @answers(m.Release)
    def release(self, session: Session, message: m.Release) -> m.Done:
        return m.Done(message.request_id, self._cache.leases.end(session.id, message.lease_ids))

    @answers(m.Hint)
    def hint(self, session: Session, message: m.Hint) -> m.Done:
        namespace, groups = session.namespaces[message.namespace], [(part.group, part.keys) for part in message.groups]
        _check_count(groups, namespace, min(m.MAX_HINT_KEYS, self._limits.max_keys_per_request))
        ready = self._cache.hint(
            namespace,
            message.action,
            groups,
            message.priority,
            message.ttl_s,
            session=session.id,
            giver=message.giver,
        )
        self._tracer.record_hint(namespace, message)
        return m.Done(message.request_id, ready)

    @answers(m.Invalidate)
    def invalidate(self, session: Session, message: m.Invalidate) -> m.Done:
        """Forget blocks. After a kill a disk may still have some of them, with valid checksums."""
        namespace, groups = session.namespaces[message.namespace], [(part.group, part.keys) for part in message.groups]
        _check_count(groups, namespace, self._limits.max_keys_per_request)
        return m.Done(message.request_id, self._cache.invalidate(namespace, groups))


def _check_count(groups: list[tuple[int, bytes]], namespace: Namespace, most: int) -> None:
    if (keys := sum([len(one) for _, one in groups]) // namespace.key_bytes) > most:
        raise KvoffdError(f"{keys} keys in one request; the limit is {most}. Send several.", ErrorCode.TOO_MANY)
