"""Lookups and stores of prompts: how they are counted, and reported to those who learn from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvoffd.cache.asked_keys import AskedKeys, PromptUse, UncountedPrompts, settle_prompt
from kvoffd.cache.block_life import BlockLife
from kvoffd.cache.block_table import FoundKeys
from kvoffd.cache.branch_points import BranchPoints
from kvoffd.cache.computing import Computing
from kvoffd.cache.curve import HitRatioCurve
from kvoffd.cache.namespace import Group, Namespace
from kvoffd.cache.policy import Chain
from kvoffd.cache.prompt_tokens import LoadedKeys, PromptTokens, UncountedLoads
from kvoffd.cache.states import READY
from kvoffd.cache.tickets import Lease, LoadTicket

MAX_UNREPORTED = 8
"""Lookups and stores that may wait for ``report``; one more reports the oldest."""


class _Lookup(NamedTuple):
    """A lookup that waits for ``report``."""

    namespace: Namespace
    chains: list[Chain]
    asked: Sequence[AskedKeys]
    prompt_hash: int
    """See ``AskedKeys``."""
    reported: bool
    """See ``AskedKeys``."""
    ready_losses: int
    """``BlockLife.ready_losses`` at the lookup."""


class Offered(NamedTuple):
    """Keys that an engine offers for storing in one message."""

    namespace: Namespace
    groups: Sequence[tuple[Group, bytes]]
    """Groups and their keys, end to end."""
    keys: Sequence[bytes] = ()
    """The keys of one of the groups, which is enough for ``BranchPoints``: all have the same tokens."""
    parents: bytes = b""
    """Parents of these, end to end; empty if no store sent them."""
    token_ids: bytes = b""
    """Token ids of their blocks, end to end; empty if no store sent them."""


class Prompts:
    """Lookups of prompts and their stores, until they are counted and reported.

    Attributes:
        watchers: called by ``report`` with the chains of each lookup, after the policy.
        unreported: lookups and stores that wait for ``report``, the oldest first.
        uncounted: prompts that wait for their engines' reports.
        curve: learns what prompts asked for, and which keys engines offer for storing; None if nothing does.
        branch_points: learns what engines offer for storing; None if nothing does.
    """

    def __init__(self, life: BlockLife, clock: Callable[[], float]) -> None:
        self._life = life
        self.watchers: list[Callable[[Sequence[Chain]], None]] = []
        self.curve: HitRatioCurve | None = None
        self.branch_points: BranchPoints | None = None
        self.unreported: deque[_Lookup | Offered] = deque()
        self.uncounted = UncountedPrompts()
        self._uncounted_loads = UncountedLoads()
        self._computing = Computing(clock)

    def looked_up(
        self,
        lease: Lease,
        groups: Sequence[tuple[int, bytes]],
        found: list[FoundKeys],
        asked: list[AskedKeys],
        *,
        reported: bool,
    ) -> None:
        """Count a lookup and its keys, and keep it for ``report``. ``reported``: see ``AskedKeys``."""
        namespace, tokens, chains = lease.namespace, 0, []
        prompt_hash = hash((lease.session, lease.lease_id)) & 0xFFFFFFFF
        counters = namespace.counters
        counters.lookups += 1
        for (index, keys), of_group, part in zip(groups, found, asked, strict=True):
            group = namespace.groups[index]
            counters.keys_asked += len(of_group.states)
            counters.keys_ready += len(of_group.ready)
            counters.prefix_keys_ready += of_group.ready_prefix
            tokens = max(tokens, len(of_group.states) * group.tokens)
            part.prompt_hash = prompt_hash
            part.found(chain := Chain(group, keys, of_group.ready, of_group.ready_prefix), of_group.reasons)
            if group.sizes:  # before all ranks have registered, a block's bytes are unknown
                chains.append(chain)
        counters.asked_tokens += tokens
        if reported:
            for prompt in self.uncounted.add(lease.session, lease.lease_id, asked):
                self._settle(prompt, None)
        if chains:
            losses = self._life.ready_losses
            self.unreported.append(_Lookup(namespace, chains, asked, prompt_hash, reported, losses))
            if len(self.unreported) > MAX_UNREPORTED:
                self._report_oldest()

    def offered(self, offered: Offered) -> None:
        """Keep for ``report`` what an engine offers for storing. For one rank of each store, and no bench's."""
        self.unreported.append(offered)
        if len(self.unreported) > MAX_UNREPORTED:
            self._report_oldest()

    def report(self) -> None:
        """Report lookups to the tiers and, except a bench's, to the policy, the curve and the watchers; and stores to
        those who learn from them. Call it after the replies are sent, and before what evicts or stores blocks: they
        must hear of the use of a block before they decide what goes, and of what a prompt lacked before its store."""
        while self.unreported:
            self._report_oldest()

    def _report_oldest(self) -> None:
        oldest = self.unreported.popleft()
        if isinstance(oldest, Offered):
            self._report_offered(oldest)
        else:
            self._report_lookup(*oldest)

    def _report_offered(self, offered: Offered) -> None:
        if any(group.retired for group, _ in offered.groups):  # reset or forgotten since, and all that was known of it
            return
        for group, keys in offered.groups:
            if self.curve is not None:
                self.curve.stored(group, keys)
            self._computing.offered(group, keys)
        if self.branch_points is not None:
            self.branch_points.offered(offered.namespace, offered.keys, offered.parents, offered.token_ids)

    def _report_lookup(
        self,
        namespace: Namespace,
        chains: list[Chain],
        asked: Sequence[AskedKeys],
        prompt_hash: int,
        reported: bool,
        ready_losses: int,
    ) -> None:
        chains = [chain for chain in chains if not chain.group.retired]
        if self._life.ready_losses != ready_losses:  # some that were found may be gone
            states = self._life.blocks.state
            chains = [chain._replace(ready=chain.ready[states[chain.ready] == READY]) for chain in chains]
        ready = [chain.ready for chain in chains if chain.ready.size]
        if self._life.tiers is not None and ready:
            self._life.tiers.used(np.concatenate(ready))
        if not chains or namespace.of_bench:
            return
        self._life.order.requested(chains)
        if self.curve is not None and not reported:
            for chain in chains:
                self.curve.requested(chain)
        if reported:  # else its misses are counted already
            for part in asked:
                found = part.chain
                if found is not None and found.ready_prefix < len(part.reasons) and not found.group.retired:
                    self._computing.mark_computing(found.group, found.keys, part.reasons, prompt_hash)
        for watcher in tuple(self.watchers):  # one may remove itself
            watcher(chains)

    def loaded(self, ticket: LoadTicket, keys: LoadedKeys | None) -> None:
        """Record the sources of a load's keys, for ``count_tokens``. None: all were in the pool."""
        lease, group = ticket.lease, ticket.group
        if keys is None:
            keys = LoadedKeys(group.tokens, bytes(len(ticket.blocks)), {})
        self._uncounted_loads.add(lease.session, lease.lease_id, (group.index, ticket.first_key), keys)

    def count(self, session: int, lease_id: int, outcome: PromptUse) -> Sequence[AskedKeys]:
        """Count the keys of a prompt whose engine reports what it did with it. Counted ones are not counted again.

        Returns the keys that were counted.
        """
        parts = self.uncounted.take(session, lease_id)
        self._settle(parts, outcome)
        return parts

    def count_tokens(self, namespace: Namespace, session: int, lease_id: int, tokens: PromptTokens) -> dict[str, int]:
        """Count a prompt's tokens by source, of which its engine loaded some under this lease. Return them by the
        sources' names."""
        found = tokens.by_source(self._uncounted_loads.take(session, lease_id))
        for source, count in found.items():
            namespace.counters.prompt_tokens[source.kind] += count
        return {source.name: count for source, count in found.items()}

    def _settle(self, parts: Sequence[AskedKeys], outcome: PromptUse | None) -> None:
        for chain, own in settle_prompt(parts, outcome, self._reasons_from):
            group = chain.group
            if self.curve is not None and group.sizes and not (group.retired or group.namespace.of_bench):
                self.curve.requested(chain, own)

    def _reasons_from(self, chain: Chain, first: int) -> bytes:
        """Return the reasons of a chain's keys from one on, as far as they are known by now."""
        return self._life.blocks.miss_reasons(chain.group, chain.keys[first * chain.group.key_bytes :])

    def tier_lacks(self, asked: AskedKeys, first: int, count: int) -> None:
        """Record that a tier was asked for ``count`` keys of a chain, from ``first`` on, and lacks them: why they are
        missing."""
        if (chain := asked.chain) is None:
            return
        size = chain.group.key_bytes
        keys = chain.keys[first * size : (first + count) * size]
        # Of the group that the namespace has by now: the chain's own knows of no reset since the lookup.
        reasons = bytearray(self._life.reasons_of(asked.namespace.group(chain.group.index), keys))
        if asked.reported and not (chain.group.retired or asked.namespace.of_bench):
            self._computing.mark_computing(chain.group, keys, reasons, asked.prompt_hash)
        asked.missed(first, bytes(reasons))

    def count_some_ended(self) -> None:
        """Count some prompts of sessions that are gone: what they found was not needed."""
        for prompt in self.uncounted.take_some():
            self._settle(prompt, None)
