"""The tier that nodes share, beside what is below the pool of this node: asked for what neither has."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from kvoffd.cache.block_table import FREE
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.system.newest import put_newest
from kvoffd.tiering import TieringSettings
from kvoffd.tiering.demotion import Demoter
from kvoffd.tiering.promotion import SETTLED, Promoter, run_end, whole_prefixes_first, window_run
from kvoffd.tiers.tier import Answer, AskedTier, TierKey
from kvoffd_proto.messages import SHARED

logger = logging.getLogger(__name__)

YES, NO, ASKED, UNKNOWN = Answer.YES, Answer.NO, Answer.ASKED, Answer.UNKNOWN
MOST_KEYS = 8192
"""Keys that one lookup asks for, of each of its groups as many: the first that are missing, or the last of a window.
The next lookup of the same request goes on behind what is up by then. Each takes some microseconds of the loop."""
ANSWER_S = 0.02
"""An answer is expected after so long at most: engines that wait for it compare that with what computing takes. The
deadline for asking is for the worst case, and may be longer than any engine waits."""
READ_AGAIN_S = 60.0
"""So long after the last read one is tried although it would be slower: speeds change."""
MOST_UNSHARED = 32_768
"""Namespaces that are not shared: those that there are, and the latest others."""
DUE_S = 10.0
"""Within which a lookup that was told of keys being asked for comes again, or never."""
SLOWER = "slower"
"""Why blocks are not read that would be."""


class SharedTiering:
    """Asks a tier for keys that lookups did not find, brings up what it has, and writes to it what is of use twice."""

    def __init__(
        self,
        cache: Cache,
        tier: AskedTier,
        clock: Callable[[], float],
        settings: TieringSettings,
        engines_busy: Callable[[], bool],
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._asked_until = self._read_again_at = 0.0
        self._asker = 0
        """Session of the lookup at hand."""
        self._again = False
        self._asked: list[tuple[int, list[bytes]]] = []
        """Groups and keys of what that is told of as being asked for."""
        self._uncounted: dict[tuple[bytes, int], Counter[bytes]] = {}
        """By fingerprint and group, of what lookups were told so, how many of them have not counted it yet."""
        self._due: dict[tuple[bytes, int], Counter[bytes]] = {}
        """The same of keys that were found there, until they are asked for again, or nobody does."""
        self._due_before: dict[tuple[bytes, int], Counter[bytes]] = {}
        self._due_at = 0.0
        self.tier = tier
        self.promoter = Promoter(cache, tier, clock, settings, shared=True)
        self.unshared: dict[bytes, None] = {}
        """Namespaces whose blocks here became stale: what others have under the same keys may be stale too."""
        self.demoter = Demoter(
            cache, tier, clock, settings, lambda: not self.promoter.busy, engines_busy, self.unshared
        )

    @property
    def wait_s(self) -> float:
        """How long it will probably take until what is pending is up, or known to be absent."""
        return max(self.promoter.wait_s, min(ANSWER_S, self._asked_until - self._clock()))

    def find(
        self,
        namespace: Namespace,
        session: int,
        groups: Sequence[tuple[int, bytes]],
        states: list[bytearray],
        again: bool,
    ) -> None:
        """Mark SHARED the absent keys that are asked for or come up; ``states`` has what pool and disks have."""
        if not self.serves(namespace):
            return
        self._asker, self._again = session, again
        self._asked.clear()
        asking, most = False, MOST_KEYS // max(1, len(groups))
        for number, limit in whole_prefixes_first(namespace, groups, states):
            (group, keys), found = groups[number], memoryview(states[number])
            if limit is None:
                start = run_end(states[number])
                stop = start + most
            else:
                start, stop = max(0, limit - min(most, self.tier.most_window_keys)), limit
            names = namespace.split(group, keys[start * namespace.key_bytes : stop * namespace.key_bytes])
            if limit is None:
                asking |= self._find_run(namespace, group, names, found[start:stop])
            else:
                self._find_window(namespace, group, names, found[start:stop], wait=asking)
        if not again:
            for group, asked in self._asked:
                self._uncounted.setdefault((namespace.fingerprint, group), Counter()).update(asked)

    def serves(self, namespace: Namespace) -> bool:
        """Whether the tier can be asked for keys of a namespace."""
        sizes = [namespace.shard_bytes(rank) for rank in range(namespace.world_size)]
        return self.tier.reachable and None not in sizes and namespace.fingerprint not in self.unshared

    def _find_run(self, namespace: Namespace, group: int, keys: Sequence[bytes], states: memoryview) -> bool:
        """Find how far the run goes from the first of these keys on; returns whether any of it is being asked for."""
        answers = self._answers(namespace, group, keys, states)
        end = answers.index(NO) if NO in answers else len(keys)
        asking = self._ask(namespace, group, keys[:end], answers[:end], states, prefix=True)
        self._request(namespace, group, keys, [at for at in range(end) if answers[at] is YES], states)
        return asking

    def _find_window(
        self, namespace: Namespace, group: int, keys: Sequence[bytes], states: memoryview, *, wait: bool
    ) -> None:
        """Bring up the last whole window of these keys, once all is known; ``wait``: how many count is not known."""
        answers = self._answers(namespace, group, keys, states)
        if self._ask(namespace, group, keys, answers, states, prefix=False) or wait:
            return
        spec = namespace.groups[group]
        places = window_run(bytes(states), spec, len(keys), lambda place: answers[place] is YES)
        self._request(namespace, group, keys, places, states)

    def _answers(self, namespace: Namespace, group: int, keys: Sequence[bytes], states: memoryview) -> list[Answer]:
        """Of each key whether it is there or comes: YES for what needs no asking, NO for what a store is writing."""
        answers = self.tier.answers(namespace.fingerprint, group, keys)
        requested = self.promoter.requested(namespace, group)
        if requested or any(states):
            for at, (key, state) in enumerate(zip(keys, states, strict=True)):
                if state in SETTLED or key in requested:
                    answers[at] = YES
                elif state != FREE:
                    answers[at] = NO
        return answers

    def _ask(
        self,
        namespace: Namespace,
        group: int,
        keys: Sequence[bytes],
        answers: Sequence[Answer],
        states: memoryview,
        *,
        prefix: bool,
    ) -> bool:
        """Ask for what is unknown, and mark what is being asked for SHARED; whether there is any."""
        asked = [at for at, answer in enumerate(answers) if answer is ASKED and states[at] == FREE]
        if unknown := [at for at, answer in enumerate(answers) if answer is UNKNOWN]:
            lengths = [namespace.shard_length(rank, group) for rank in range(namespace.world_size)]
            wanted = [keys[at] for at in unknown]
            taken = self.tier.ask(self._asker, namespace.fingerprint, group, lengths, wanted, prefix=prefix)
            self._asked_until = self._clock() + self.tier.ask_deadline_s
            asked += unknown[:taken]
        if asked:
            for at in asked:
                states[at] = SHARED
            self._asked.append((group, [keys[at] for at in asked]))
        return bool(asked)

    def answered(self, fingerprint: bytes, group: int, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        """Count what lookups were told of as being asked for."""
        uncounted = self._uncounted.get((fingerprint, group), Counter())
        counted = [uncounted.pop(key, 0) for key in keys]
        if not uncounted:
            self._uncounted.pop((fingerprint, group), None)
        namespace = self._cache.find(fingerprint)
        if namespace is None or group >= len(namespace.groups) or (keys and len(keys[0]) != namespace.key_bytes):
            return  # it was forgotten meanwhile, maybe for one of another geometry
        due = self._due.setdefault((fingerprint, group), Counter())
        absent: list[bytes] = []
        for key, lookups, there in zip(keys, counted, found, strict=True):
            if there and lookups:
                due[key] += lookups
            else:
                absent += [key] * lookups
        self._cache.count_misses(namespace, group, b"".join(absent))

    def _request(
        self, namespace: Namespace, group: int, keys: Sequence[bytes], places: Iterable[int], states: memoryview
    ) -> None:
        """Request keys that are there, up to the first that cannot come up, and mark them SHARED."""
        requested = self.promoter.requested(namespace, group)
        wanted = [place for place in places if states[place] not in SETTLED]
        fresh = sum(keys[place] not in requested for place in wanted)
        if self._is_slower(namespace, group, fresh):
            self.promoter.failures[SLOWER] += fresh
            for place in wanted:
                if keys[place] not in requested:
                    namespace.counters.misses[MissReason.SKIPPED] += self._take_due(namespace, group, keys[place])
            wanted = list(takewhile(lambda place: keys[place] in requested, wanted))

        def askers(key: bytes) -> int:
            return self._take_due(namespace, group, key) + (not self._again)

        self.promoter.request(namespace, self._asker, group, keys, wanted, states, SHARED, askers)

    def _take_due(self, namespace: Namespace, group: int, key: bytes) -> int:
        """How many lookups still count a key that was found."""
        found = 0
        for due in (self._due, self._due_before):
            if keys := due.get((namespace.fingerprint, group)):
                found += keys.pop(key, 0)
        return found

    def _settle_due(self) -> None:
        """Count what was found and nobody asked for again: a key before it was not there, or the request went away."""
        for (fingerprint, _), keys in self._due_before.items():
            if (namespace := self._cache.find(fingerprint)) is not None:
                namespace.counters.found_shared += keys.total()
        self._due_before, self._due = self._due, {}
        self._due_at = self._clock()

    def _is_slower(self, namespace: Namespace, group: int, count: int) -> bool:
        """Whether so many blocks take longer to read than to compute, by the speeds of late; not once a while."""
        prefill, speed = namespace.counters.prefill_tokens_per_second, self.promoter.bytes_per_second
        tokens = count * namespace.groups[group].tokens_per_block
        if not (tokens and prefill and speed):
            return False
        nbytes = len(namespace.groups) * count * namespace.block_bytes(group)
        seconds = self.promoter.wait_s + nbytes / speed
        now = self._clock()
        if seconds <= tokens / prefill or now >= self._read_again_at:
            self._read_again_at = max(self._read_again_at, now + READ_AGAIN_S)
            return False
        return True

    # --- what else the cache and the daemon tell -------------------------------------------------

    def forget(self, namespace: Namespace, group: int, keys: Sequence[bytes], why: MissReason) -> None:
        """Others use what is there; it must go only where this node has more of a block to put in its place."""
        for key in keys:
            self.promoter.forget(namespace, group, key)
        ids = [TierKey(namespace.fingerprint, group, key) for key in keys]
        if why is MissReason.PARTIAL:
            self.tier.remove(ids)
        elif why is MissReason.INVALIDATED:
            self.tier.forget(ids)

    def forget_all(self, namespace: Namespace) -> None:
        self.promoter.forget_all(namespace)
        self.tier.remove_namespace(namespace.fingerprint)

    def tick(self) -> None:
        if self.tier.reachable:
            for namespace in self._cache.namespaces.values():
                self.tier.poll(namespace.fingerprint)
        else:
            self._read_again_at = 0.0  # once it is back
        if self._clock() - self._due_at >= DUE_S:
            self._settle_due()
        self.tier.tick()

    def namespace_reset(self, fingerprint: bytes, *, everywhere: bool) -> None:
        """A namespace's blocks became stale, and may be there; ``everywhere``: they are not there any more either."""
        if everywhere:
            self.unshared.pop(fingerprint, None)
            return
        if fingerprint not in self.unshared:
            logger.info("An engine reset a namespace; its blocks are not shared over %s any more.", self.tier.name)
        self.stop_sharing(fingerprint)

    def stop_sharing(self, fingerprint: bytes) -> None:
        """Share nothing of a namespace until it is reset everywhere."""
        if fingerprint not in self.unshared:
            put_newest(self.unshared, fingerprint, None, MOST_UNSHARED, lambda one: self._cache.find(one) is not None)
