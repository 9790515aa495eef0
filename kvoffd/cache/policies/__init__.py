"""Eviction policies. Each is one module here, named as users name the policy, whose class is called ``Policy``.

To add one, add its module: the setting ``eviction_policy``, its help text and the tests find it by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:  # the names are also needed where the cache is not, by the command line
    from kvoffd.cache.namespace import Block

DEFAULT_POLICY = "lru"
POLICY_NAMES = (
    DEFAULT_POLICY,
    *sorted(module.name for module in iter_modules(__path__) if module.name != DEFAULT_POLICY),
)


class EvictionPolicy(Protocol):
    """Keeps the ready blocks in the order in which they should go. Knows nothing of pins, slots or sizes."""

    def insert(self, block: Block) -> None:
        """Add a block that became ready. It must not be there yet."""

    def touch(self, blocks: Sequence[Block]) -> None:
        """Note a use of ``blocks``, given root first. The tail becomes older than the root, so that leaves go first."""

    def remove(self, block: Block, evicted: bool) -> None:
        """Remove a block. ``evicted`` says that it went for lack of room, which a policy may remember."""

    def candidates(self) -> Iterator[Block]:
        """All blocks, next to evict first. The caller may stop anywhere; any change of the policy ends the iterator."""

    def __len__(self) -> int:
        """Number of blocks."""


def make_policy(name: str) -> EvictionPolicy:
    """A new policy by its name. Raises ValueError with the names there are."""
    if name not in POLICY_NAMES:
        raise ValueError(f"There is no eviction policy {name!r}; choose one of {', '.join(POLICY_NAMES)}.")
    return cast(EvictionPolicy, import_module(f"{__name__}.{name}").Policy())
