"""Policies: what is stored in the pool, and what goes when it is full. Each is one module here, named as users name the
policy, whose class is called ``Policy``.

To add one, add its module: the setting ``eviction_policy``, its help text and the tests find it by themselves. A policy
of another package is found by its entry point in the group ``kvoffd.policies``, which names the class. It is made with
the pool's bytes, and must have all that ``EvictionPolicy`` has: derived from ``AdmitsAll`` it has five to write,
``requested``, ``insert``, ``remove``, ``candidates`` and ``__len__``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from math import inf
from pkgutil import iter_modules
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from kvoffd.errors import KvoffdError
from kvoffd_proto.errors import ErrorCode

if TYPE_CHECKING:  # the names are also needed where the cache is not, by the command line
    from kvoffd.cache.namespace import Block, Namespace
    from kvoffd_proto.admin import KeyWorth, PolicyClass

DEFAULT_POLICY = "learned"
ENTRY_POINTS = "kvoffd.policies"
DECLINED = -1.0
"""Worth of a block that is not stored, whatever room there is."""
GHOST_PART = 50
"""What is remembered of keys without blocks may take one part in so many of the pool's bytes."""

_OWN = (DEFAULT_POLICY, *sorted(module.name for module in iter_modules(__path__) if module.name != DEFAULT_POLICY))
_OTHERS = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
POLICY_NAMES = (*_OWN, *sorted(set(_OTHERS) - {*_OWN}))


class Chain(NamedTuple):
    """What one request asked for of one group, for the first time."""

    namespace: Namespace
    group: int
    keys: bytes
    """End to end, root of the prefix first."""
    ready: Sequence[Block]
    """Those of its blocks that it found ready and that still are, in that order."""


class Offer(NamedTuple):
    """Neighbouring keys of a store, and what they are worth."""

    keys: int
    worth: float
    """Only blocks that are worth less give way to these; ``inf`` where any block does, DECLINED to store none."""


class PolicyState(NamedTuple):
    """What a learning policy tells of itself; the fields of ``PolicyDescribed``."""

    requests: int = 0
    known_keys: int = 0
    hit_bytes: int = 0
    lru_hit_bytes: int = 0
    as_lru: bool = False
    classes: Sequence[PolicyClass] = ()


class EvictionPolicy(Protocol):
    """Knows requests, and the ready blocks in the order in which they should go; nothing of pins, slots or sizes."""

    def requested(self, chains: Sequence[Chain]) -> None:
        """Note a request, by its groups. A chain's tail becomes older than its root, so that leaves go first."""

    def insert(self, blocks: Sequence[Block], older: bool = False) -> None:
        """Add blocks of one group, at least one, that became ready, the oldest first: a chain's tail before its root.
        That one is there already is a bug, and raises AssertionError.

        ``older``: they became ready, in an earlier daemon, before all that are here.
        """

    def remove(self, blocks: Sequence[Block], evicted: bool) -> None:
        """Remove blocks of one group, at least one. ``evicted``: they went for lack of room, which it may remember."""

    def candidates(self, worth: float = inf) -> Iterator[Block]:
        """The blocks that are worth less, next to evict first; by default all blocks.

        The caller may stop anywhere; any change of the policy ends the iterator.
        """

    def offers(self, namespace: Namespace, group: int, keys: Sequence[bytes], starts: Sequence[int]) -> Sequence[Offer]:
        """What keys are worth that a store offers and that have no block, in their order.

        ``starts``: where the keys of each chain begin, the first at 0. Each rank of the namespace offers a key.
        """

    def declined(self, namespace: Namespace, group: int, keys: Sequence[bytes]) -> None:
        """Keys that were offered were not worth the blocks they would have cost: the other ranks should not store them
        either."""

    def return_chance(self, block: Block, within_bytes: int) -> float:
        """The chance that a block is asked for again before so many bytes more are; 1 where nothing tells."""

    def record(self) -> Iterator[bytes]:
        """What the next daemon's policy of this name may go on with, in pieces; none where there is nothing to know.

        Each piece takes a moment, under the GIL all the time, since another thread asks for it; anything else may be
        done between two. A new record ends the one before.
        """

    def go_on(self, record: bytes) -> None:
        """Go on with what another one recorded, before anything else. Raises ValueError where it is of no use."""

    def describe(self) -> PolicyState:
        """What was learned."""

    def worth_of(self, namespace: Namespace, group: int, key: bytes) -> KeyWorth | None:
        """What is known of a key; None where nothing is."""

    @property
    def ghosts(self) -> int:
        """Keys without a block that are remembered."""

    @property
    def nbytes(self) -> int:
        """Memory of what is known of keys; 0 where that is not counted."""

    def __len__(self) -> int:
        """Number of blocks."""


class AdmitsAll:
    """What a policy does that stores whatever is offered, and knows nothing of keys without blocks."""

    def offers(self, namespace: Namespace, group: int, keys: Sequence[bytes], starts: Sequence[int]) -> Sequence[Offer]:
        return (Offer(len(keys), inf),)

    def declined(self, namespace: Namespace, group: int, keys: Sequence[bytes]) -> None:
        raise AssertionError("nothing is declined")

    def return_chance(self, block: Block, within_bytes: int) -> float:
        return 1.0

    def record(self) -> Iterator[bytes]:
        return iter(())

    def go_on(self, record: bytes) -> None:
        """There is nothing to know."""

    def describe(self) -> PolicyState:
        return PolicyState()

    def worth_of(self, namespace: Namespace, group: int, key: bytes) -> KeyWorth | None:
        return None

    @property
    def ghosts(self) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        return 0


def _own(name: str) -> Callable[[int], EvictionPolicy]:
    return cast(Callable[[int], EvictionPolicy], import_module(f"{__name__}.{name}").Policy)


def _does(name: str, what: str) -> bool:
    """Whether a policy does what ``AdmitsAll`` does not; another package's is taken to."""
    return name not in _OWN or getattr(_own(name), what) is not getattr(AdmitsAll, what)


def remembers_keys(name: str) -> bool:
    """Whether a policy knows keys without blocks."""
    return _does(name, "ghosts")


def keeps_record(name: str) -> bool:
    """Whether the next daemon's policy goes on with what this one knows."""
    return _does(name, "record")


def make_policy(name: str, pool_bytes: int) -> EvictionPolicy:
    """A new policy by its name, for a pool of so many bytes.

    Raises:
        ValueError: there is none of this name; the sentence has those there are.
        KvoffdError: it is another package's, which cannot make it.
    """
    if name not in POLICY_NAMES:
        raise ValueError(f"There is no eviction policy {name!r}; choose one of {', '.join(POLICY_NAMES)}.")
    if name in _OWN:
        return _own(name)(pool_bytes)
    point = _OTHERS[name]
    try:
        made = point.load()(pool_bytes)
        wanted = [one for one in vars(EvictionPolicy) if one == "__len__" or not one.startswith("_")]
        if lacking := [one for one in wanted if not hasattr(made, one)]:
            raise TypeError(f"it has no {', '.join(lacking)}; see kvoffd.cache.policies.AdmitsAll")
        return cast(EvictionPolicy, made)
    except Exception as error:
        why = f"The eviction policy {name}, {point.value}, cannot be made: {type(error).__name__}: {error}."
        raise KvoffdError(why, ErrorCode.BAD_ARGUMENT) from error
