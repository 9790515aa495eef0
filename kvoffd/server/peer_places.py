"""Peers that are not configured one by one: nodes of a network, which requests name, and nodes behind a name.

A few places are connected at once, however many nodes there are, so a node of a large fleet asks no more than one of a
small fleet. All calls are in the daemon's thread.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from kvoffd.tiering.promotion_source import PromotionSource
from kvoffd.tiers.peer_names import PeerName, Resolved
from kvoffd.tiers.peer_process import HelperProcess
from kvoffd.tiers.shared import SharedTier
from kvoffd.tiers.tier import PEER

logger = logging.getLogger(__name__)

KEPT_S = 1.0
"""Time for which a peer that a request named is not replaced by another one."""
EXCHANGE_S = 600.0
"""Time without a block after which a node behind a name is replaced by another one. Not too short: each one that comes
is a new label of metrics."""
DARK_S = 10.0
"""The same for a node that does not answer."""


@dataclass(eq=False)
class PeerPlace:
    """A place for a peer."""

    number: int
    """Its number in the helper."""
    tier: SharedTier
    """Its tier, without a name while the place is empty. ``only_named``: the peer is one of a network, asked only for
    requests that name it; one behind a name is asked for all."""
    source: PromotionSource
    since: float = -inf
    """Time when the peer got it, or a request last named it."""
    listed_at: float = -inf
    """Time when the peer was last among the addresses of a name."""


@dataclass(eq=False)
class PeerList:
    """The nodes behind a name."""

    name: PeerName
    addresses: dict[str, None] = field(default_factory=dict)
    """Those of the last answer that had any."""
    problem: str = ""
    """Half a sentence why the latest question failed; empty if it did not."""


class PeerPlaces:
    """Gives places to peers.

    Nodes behind names get all places in a small fleet. In a large one these are some at random; one that has had no
    block for ``EXCHANGE_S`` makes place for another one, at most one in that time.

    Args:
        fixed: names of the tiers of peers that are configured one by one: they get no place.
        replace_source: makes the source of a place whose tier serves another peer from now on.
    """

    def __init__(
        self,
        helper: HelperProcess,
        names: Sequence[PeerName],
        fixed: Collection[str],
        replace_source: Callable[[PromotionSource], PromotionSource],
        clock: Callable[[], float],
        rng: random.Random | None = None,
    ) -> None:
        self._helper, self._fixed, self._replace_source, self._clock = helper, fixed, replace_source, clock
        self._rng = rng or random.Random()
        self.lists = [PeerList(name) for name in names]
        self._addresses: dict[str, str] = {}
        """Addresses behind all names, by the name of the tier."""
        self._places: list[PeerPlace] = []
        self._exchange_at = -inf
        """Time from which a node that answers may be exchanged again."""

    @property
    def tiers(self) -> list[SharedTier]:
        """Tiers of all places, also of those without a peer."""
        return [place.tier for place in self._places]

    @property
    def always_asked(self) -> list[SharedTier]:
        """Tiers of the connected nodes behind names, which are asked for whatever is missing; without those that no
        name has any more and that do not answer."""
        its = (place.tier for place in self._places if place.tier.name and not place.tier.only_named)
        return [tier for tier in its if tier.name in self._addresses or tier.available()]

    def add(self, number: int, tier: SharedTier, source: PromotionSource) -> None:
        tier.is_peer = tier.only_named = tier.may_be_away = True
        self._places.append(PeerPlace(number, tier, source))

    def find(self, host: str) -> str:
        """Return the address of a node that is behind a name, by its host; empty if there is none."""
        for one in self.lists:
            if (address := f"{host}:{one.name.port}") in one.addresses:
                return address
        return ""

    def give(self, address: str, *, only_named: bool) -> str:
        """Have a peer be connected that a request names. It gets an empty place, or else that of the peer that has not
        been used for longest, of those that were not named recently and are not being used.

        Return its tier's name; empty if all places are taken. ``only_named``: see ``Tier``; False for one that a name
        lists now.
        """
        now, name = self._clock(), f"{PEER}{address}"
        if (place := next((place for place in self._places if place.tier.name == name), None)) is None:
            old = (place for place in self._places if not place.tier.name or now >= place.since + KEPT_S)
            place = min(filter(self._is_free, old), key=_order_to_go, default=None)
            if place is None or not self._assign(place, address, only_named=only_named):
                return ""
        place.since, place.tier.only_named = now, only_named
        if not only_named:
            place.listed_at = now
        return name

    def resolved(self, number: int, answer: Resolved) -> None:
        """Take the answer about the name of this number. After a failure the nodes that it had are kept."""
        one = self.lists[number]
        one.problem = answer.problem
        if answer.addresses is None:
            return
        addresses = dict.fromkeys(answer.addresses)
        if addresses.keys() != one.addresses.keys():
            logger.info("%s are %d other nodes now, %d before.", one.name.text, len(addresses), len(one.addresses))
        one.addresses = addresses
        every = {f"{PEER}{address}": address for one in self.lists for address in one.addresses}
        self._addresses = {name: address for name, address in every.items() if name not in self._fixed}

    def tick(self) -> None:
        """Connect nodes behind names, as far as there are places."""
        now = self._clock()
        self._disconnect_unlisted(now)
        for place in sorted((place for place in self._places if self._may_go(place, now)), key=_order_to_go):
            self._exchange(place, now)

    def _disconnect_unlisted(self, now: float) -> None:
        """Free the places of nodes that no name has any more and that do not answer, or have been unlisted for long."""
        for place in self._places:
            if not place.tier.name or place.tier.only_named:
                continue
            if place.tier.name in self._addresses:
                place.listed_at = now
                continue
            # Some names answer with a few of their nodes, others each time: one that answers stays for a while.
            has_left = not place.tier.available() or now >= place.listed_at + EXCHANGE_S
            if has_left and self._is_free(place):
                self._assign(place, "", only_named=True)

    def _exchange(self, place: PeerPlace, now: float) -> None:
        """Give a place that may go to a node behind a name that has none. Of nodes that answer one goes in
        EXCHANGE_S."""
        taken = {other.tier.name for other in self._places}
        others = [address for name, address in self._addresses.items() if name not in taken]
        answers = place.tier.available()  # an empty place does not: it is filled at once
        if not others or (answers and now < self._exchange_at):
            return
        if self._assign(place, self._rng.choice(others), only_named=False):
            place.since = place.listed_at = now
            if answers:
                self._exchange_at = now + EXCHANGE_S

    def _may_go(self, place: PeerPlace, now: float) -> bool:
        """Return whether a place may be given to a node behind a name: it is empty, or its peer was not used for
        long."""
        if not place.tier.name:
            return True
        least_s = EXCHANGE_S if place.tier.available() else DARK_S
        return now >= _used_at(place) + least_s and self._is_free(place)

    def _is_free(self, place: PeerPlace) -> bool:
        """Return whether nothing is being asked of, or read from, the peer of a place."""
        return place.source.idle and place.tier.idle and not self._helper.has_reads(place.number)

    def _assign(self, place: PeerPlace, address: str, *, only_named: bool) -> bool:
        """Give a place to another peer, or to none for an empty address; return False if the helper has no time."""
        if not self._helper.connect(place.number, address):
            return False
        place.tier.become(f"{PEER}{address}" if address else "")
        place.tier.only_named = only_named
        place.source = self._replace_source(place.source)
        return True

    @property
    def problems(self) -> Iterator[str]:
        """Problems of the names, a sentence each."""
        tiers = {tier.name: tier for tier in self.always_asked}
        for one in self.lists:
            if one.problem:
                yield f"The name of {one.name.text} cannot be resolved: {one.problem}."
            its = [tier for address in one.addresses if (tier := tiers.get(f"{PEER}{address}")) is not None]
            if its and not any(tier.available() for tier in its):
                why = next((tier.health.problem for tier in its if tier.health.problem), "")
                yield f"No blocks are read from the nodes of {one.name.text}, none of which answers: {why}"


def _used_at(place: PeerPlace) -> float:
    """Return when a place's peer last had a block, was named, or got the place."""
    return max(place.since, place.tier.found_at)


def _order_to_go(place: PeerPlace) -> tuple[bool, float]:
    """Return a key that orders places by who loses the least: empty ones, then those used longest ago."""
    return bool(place.tier.name), _used_at(place)
