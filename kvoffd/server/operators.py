"""What operators may do with single blocks, and what the daemon remembers of it."""

from __future__ import annotations

import os

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.namespace import Block, Namespace
from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.server.session import Session
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import Role


class BlockAccess:
    """Lets operators in, and keeps their place in a listing of blocks: one listing for each session."""

    def __init__(self, config: Config, cache: BlockCache) -> None:
        self._access = config.block_access
        self._uids = config.block_uids or (0, os.geteuid())
        self._cache = cache
        self._listings: dict[int, list[bytes]] = {}
        self.got_blocks = 0
        """Blocks that were opened for reading."""

    def admit(self, session: Session, *, write: bool) -> None:
        """Raise KvoffdError unless the session is an administrator's who may read blocks, or write them too."""
        if session.role is not Role.ADMIN:
            raise KvoffdError(f"Blocks are opened by the role admin, not {session.role}.", ErrorCode.WRONG_ROLE)
        if self._access == "off" or (write and self._access == "read"):
            wanted, verb = ("write", "writes") if write else ("read", "reads")
            raise KvoffdError(
                f"Nobody {verb} single blocks of this daemon, whose block_access is {self._access!r}; start it with "
                f"block_access = {wanted!r} if operators are to do that.",
                ErrorCode.FORBIDDEN,
            )
        if session.peer.key:  # nobody's uid, though it says 0
            raise KvoffdError("Blocks are opened on the daemon's own machine, not over TCP.", ErrorCode.FORBIDDEN)
        if session.peer.uid not in self._uids:
            raise KvoffdError(
                f"User {session.peer.uid} may not open blocks of this daemon; add the uid to block_uids.",
                ErrorCode.FORBIDDEN,
            )

    def page(
        self, session: Session, namespace: Namespace, group: int, prefix: str, pinned: bool, start: int, limit: int
    ) -> tuple[list[Block], int, int]:
        """One page of the session's listing, which ``start`` 0 makes anew.

        Returns the blocks that are still there, where the next page begins (0: nowhere), and the keys noted at first.
        Raises BadGeometry, BadKeys for a prefix that is not hex digits.
        """
        namespace.check_group(group)
        index = self._cache.blocks.index[namespace][group]
        if not start:
            whole, odd = _prefix(prefix)
            if pinned:
                found = [
                    block.key
                    for block in self._cache.blocks.operator_pinned
                    if block.namespace is namespace and block.group == group
                ]
            else:
                found = list(index)
            if whole:
                found = [key for key in found if key.startswith(whole)]
            if odd is not None:
                found = [key for key in found if len(key) > len(whole) and key[len(whole)] >> 4 == odd]
            self._listings[session.id] = found
        listing = self._listings.get(session.id, [])
        blocks = [block for key in listing[start : start + limit] if (block := index.get(key)) is not None]
        end = start + limit
        total = len(listing)
        if end >= total:
            self._listings.pop(session.id, None)
        return blocks, end if end < total else 0, total

    def end_session(self, session: Session) -> None:
        """Forget its listing."""
        self._listings.pop(session.id, None)


def _prefix(digits: str) -> tuple[bytes, int | None]:
    """Whole bytes of a prefix in hex, and the half byte after them, where there is one."""
    try:
        return bytes.fromhex(digits[: len(digits) & ~1]), int(digits[-1], 16) if len(digits) % 2 else None
    except ValueError:
        raise KvoffdError(f"{digits[:80]!r} is no beginning of a key; give hex digits.", ErrorCode.BAD_KEYS) from None
