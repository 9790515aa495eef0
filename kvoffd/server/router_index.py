"""Which blocks are published to routers: those in the daemon of which it knows the tokens and all that is before.

A router finds a prompt's blocks by their tokens, from the first one on, and some take no block whose parent they do not
know. So a block is published when its parent is, and withdrawn when its parent goes: all can always be published
again, parents first. Pure: no I/O, no clock.
"""

from __future__ import annotations

import socket
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from kvoffd.cache.namespace import Namespace
from kvoffd.config import Config
from kvoffd_proto.events import MEDIUM_CPU, MEDIUM_STORAGE
from kvoffd_proto.messages import TOKEN_ID_BYTES, GroupSpec
from kvoffd_proto.router_events import ClearedBlocks, RemovedBlocks, RouterEvent, StoredBlocks, router_hash

MEDIA = {1: MEDIUM_CPU, 2: MEDIUM_STORAGE}
"""By the flag of each."""
FLAGS = {medium: flag for flag, medium in MEDIA.items()}
ROOT = 0
"""Parent of the first blocks of prompts. No block hash ends in eight zero bytes, or its chain is not published."""
BLOCK_BYTES = 320
"""What a block takes here beside its tokens, four bytes each. Measured: 280, and what a dict's growth leaves unused."""
MAX_EXPECTED = 65_536
"""Blocks whose tokens are known and whose bytes are still on their way; the oldest are forgotten beyond that."""
PUBLISHED_AT_ONCE = 512
"""Blocks that are published or withdrawn in a step, beside twice those that came or went: many may have one parent.
Where so many were since all news were taken, no more are."""
MAX_BLOCKS_PER_EVENT = 256
"""A message holds one event of so many blocks, or a few smaller ones."""
TOKENS_OF_ONE, MAX_BLOCK_TOKENS = 512, 65_536
"""A block of more tokens counts as several in these two numbers; one of still more is not published."""


@dataclass(eq=False, slots=True)
class RouterBlock:
    """A block, or a parent of one, under its group."""

    parent: int = ROOT
    tokens: bytes | None = None
    """Token ids, uint32; None where they are not known."""
    media: int = 0
    """Where the daemon holds it."""
    published: int = 0
    """Where routers think that it is."""
    seen: int = 0
    """Number of the last snapshot whose readers know it."""
    changed: bool = False
    """Whether it waits among those that changed, apart from what comes after such a block."""
    children: int | set[int] | None = None

    @property
    def weight(self) -> int:
        """As how many blocks it counts."""
        return max(1, len(self.tokens or b"") // (TOKENS_OF_ONE * TOKEN_ID_BYTES))


@dataclass(eq=False)
class Group:
    topic: bytes
    index: int
    spec: GroupSpec
    blocks: dict[int, RouterBlock] = field(default_factory=dict)
    bytes: int = 0
    published_blocks: int = 0

    def stored(self, medium: int, keys: Sequence[int]) -> StoredBlocks:
        """The event of some blocks of one chain."""
        first = self.blocks[keys[0]]
        tokens = b"".join([self.blocks[key].tokens or b"" for key in keys])
        return StoredBlocks(
            list(keys),
            first.parent or None,
            memoryview(tokens).cast("I").tolist(),
            self.spec.tokens_per_block,
            None,
            MEDIA[medium],
            None,
            self.index,
            self.spec.kind,
            self.spec.window_tokens or None,
        )


def router_index(config: Config) -> RouterIndex | None:
    """The index of a daemon that publishes to routers; None where it does not."""
    if not (config.event_address or config.event_connect):
        return None
    return RouterIndex(config.event_node or socket.gethostname(), config.event_index_bytes)


class RouterIndex:
    """What the daemon holds, from the cache's calls, and what of it is published to routers, as events in their order.

    Args:
        node: name of this machine in topics.
        max_bytes: a block that would take the index beyond this is not published.
    """

    def __init__(self, node: str, max_bytes: int) -> None:
        self._node = node.replace("@", "_")
        self._max_bytes = max_bytes
        self._groups: WeakKeyDictionary[Namespace, list[Group]] = WeakKeyDictionary()
        self._expected: OrderedDict[tuple[Group, int], None] = OrderedDict()
        self._changed: deque[tuple[Group, list[int], bool]] = deque()
        """Blocks, the next one last, that may have to be published or withdrawn. What comes after a block, which is
        marked True, stands before what changed later, so that all of it is withdrawn before the block is published
        anew."""
        self._news: deque[tuple[bytes, RouterEvent]] = deque()
        self._untaken = 0
        """Blocks of the news, about."""
        self._run: tuple[Group, int, list[int]] | None = None
        """Group, medium and blocks of a stored event that may go on."""
        self._run_weight = 0
        self._snapshot = 0
        """Number of the running snapshot, or of the last one."""
        self.index_bytes = 0
        self.published_blocks = 0
        self.unpublished_blocks = 0
        """Blocks that came and were not published, since their tokens were not known or there was no room for them."""

    def topic(self, namespace: Namespace) -> bytes:
        """Topic of a namespace's events: ``kv@node:NODE@MODEL``."""
        return f"kv@node:{self._node}@{namespace.label.replace('@', '_')}".encode()

    # --- what the daemon holds --------------------------------------------------------------------

    def expect(self, namespace: Namespace, group: int, keys: Sequence[bytes], parents: bytes, tokens: bytes) -> None:
        """A store or load of these keys begins; ``parents`` and ``tokens`` as in ``GroupTransfer``, neither empty."""
        found, changed = self._group(namespace, group), []
        size, per_block = namespace.key_bytes, len(tokens) // len(keys)
        if per_block > MAX_BLOCK_TOKENS * TOKEN_ID_BYTES:
            return
        earlier = len(self._expected)
        for number, key in enumerate(keys):
            at = router_hash(key)
            parent = router_hash(parents[number * size : (number + 1) * size])
            known = found.blocks.get(at)
            if at in (ROOT, parent):
                continue
            if known is not None and known.tokens is not None:
                if not known.media:  # it goes, or is expected already
                    self._expected[found, at] = None
                continue
            while (full := self.index_bytes + BLOCK_BYTES + per_block > self._max_bytes) and earlier:
                self._forget_expected()  # it may never come
                earlier -= 1
            if full:
                continue
            known = found.blocks.get(at) or self._new(found, at)
            known.tokens = tokens[number * per_block : (number + 1) * per_block]
            self._charge(found, per_block)
            known.parent = parent
            self._link(found, at, parent)
            if known.media:  # it was there, and nobody knew its tokens
                changed.append(at)
            else:
                self._expected[found, at] = None
        self._change(found, changed)
        while len(self._expected) > MAX_EXPECTED:
            self._forget_expected()

    def _forget_expected(self) -> None:
        (group, at), _ = self._expected.popitem(last=False)
        if not group.blocks[at].published:  # else it goes when it is withdrawn
            self._drop(group, at)

    def cleared(self, namespace: Namespace) -> None:
        """Nothing of the namespace is held any more, wherever it was."""
        self._end_run()
        groups = self._groups.pop(namespace, [])
        published = sum([group.published_blocks for group in groups])
        if published and published == self.published_blocks:
            self._add(groups[0].topic, ClearedBlocks())
        elif published:  # to routers that take all topics for one cache it would mean the other namespaces' blocks too
            for group in groups:
                for medium in MEDIA:
                    here = [key for key, known in group.blocks.items() if known.published & medium]
                    self._add_removed(group, medium, here)
        self.published_blocks -= published
        cleared = set(groups)
        for key in [key for key in self._expected if key[0] in cleared]:
            del self._expected[key]
        self._changed = deque([one for one in self._changed if one[0] not in cleared])
        for group in groups:
            self.index_bytes -= group.bytes
            group.blocks.clear()

    def stored(self, namespace: Namespace, group: int, keys: Iterable[bytes], medium: str = MEDIUM_CPU) -> None:
        """The daemon holds blocks at this medium from now on."""
        found, changed, flag = self._group(namespace, group), [], FLAGS[medium]
        for key in keys:
            at = router_hash(key)
            known = found.blocks.get(at)
            if known is None:
                if self.index_bytes + BLOCK_BYTES > self._max_bytes:
                    self.unpublished_blocks += 1
                    continue
                known = self._new(found, at)
            if not known.media:
                self._expected.pop((found, at), None)
                self.unpublished_blocks += known.tokens is None
            known.media |= flag
            changed.append(at)
        self._change(found, changed)

    def removed(self, namespace: Namespace, group: int, keys: Iterable[bytes], medium: str = MEDIUM_CPU) -> None:
        """The daemon holds them there no more."""
        found, changed, flag = self._group(namespace, group), [], FLAGS[medium]
        for key in keys:
            at = router_hash(key)
            known = found.blocks.get(at)
            if known is not None and known.media & flag:
                known.media &= ~flag
                changed.append(at)
        self._change(found, changed)

    # --- what is published ------------------------------------------------------------------------

    def take(self) -> Iterator[tuple[bytes, list[RouterEvent]]]:
        """What is to be published, in order, by message: a topic and its events; of very much, a part."""
        self._untaken = 0
        self._publish(PUBLISHED_AT_ONCE)
        self._untaken = 0
        self._end_run()
        while self._news:
            topic, event = self._news.popleft()
            events, blocks = [event], _blocks_of(event)
            while self._news and self._news[0][0] == topic:
                blocks += _blocks_of(self._news[0][1])
                if blocks > MAX_BLOCKS_PER_EVENT:
                    break
                events.append(self._news.popleft()[1])
            yield topic, events

    @property
    def has_news(self) -> bool:
        return bool(self._news) or self._run is not None or bool(self._changed)

    def snapshot(self, asked: Iterable[bytes] = ()) -> Iterator[tuple[bytes, list[RouterEvent]]]:
        """All that is published now, parents first, by message, beginning with what clears a router's index.

        ``asked``: what its readers subscribed to, who may know blocks of a topic that has none any more.
        What changes while it runs comes from ``take``, which must be called to its end before each step. Another one
        that begins meanwhile spoils this one.
        """
        here = f"kv@node:{self._node}@".encode()
        topics = [groups[0].topic for groups in self._groups.values() if any(group.blocks for group in groups)]
        *cleared, last = dict.fromkeys([*topics, *(one for one in asked if one.startswith(here))]) or [here]
        for topic in cleared:
            yield topic, [ClearedBlocks()]
        # To routers that take all topics for one cache the last of these clears too what has been told since the first.
        groups = [group for groups in self._groups.values() for group in groups if group.blocks]
        self._snapshot += 1
        roots = [(group, self._children(group.blocks[ROOT])) for group in groups]
        for group in groups:
            group.blocks[ROOT].seen = self._snapshot
        yield last, [ClearedBlocks()]
        for group, left in roots:
            while left:
                events: list[RouterEvent] = []
                count = 0
                while left and count < MAX_BLOCKS_PER_EVENT:
                    run = self._chain(group, left, MAX_BLOCKS_PER_EVENT - count)
                    count += sum([group.blocks[key].weight for key in run])
                    events += [group.stored(one, run) for one in MEDIA if run and group.blocks[run[0]].published & one]
                if events:
                    yield group.topic, events

    def _chain(self, group: Group, left: list[int], most: int) -> list[int]:
        """The next blocks of a snapshot for one event; ``left`` has those that come after them."""
        run: list[int] = []
        media = weight = 0
        while left and weight < most:
            key = left[-1]
            known = group.blocks.get(key)
            if known is None or not known.published or known.seen == self._snapshot:
                left.pop()
                continue
            if run and (known.published != media or known.parent != run[-1]):
                break
            left.pop()
            media, known.seen = known.published, self._snapshot
            run.append(key)
            weight += known.weight
            left += self._children(known)
        return run

    def _change(self, group: Group, keys: list[int]) -> None:
        """Note blocks that came or went, in their order, and publish some of them."""
        fresh = [key for key in keys if not group.blocks[key].changed]
        if fresh:
            for key in fresh:
                group.blocks[key].changed = True
            fresh.reverse()
            self._changed.append((group, fresh, False))
        self._publish(PUBLISHED_AT_ONCE + 2 * len(keys))

    def _publish(self, most: int) -> None:
        """Publish, or withdraw, so many of the blocks that may have to be."""
        while self._changed and most > 0 and self._untaken < PUBLISHED_AT_ONCE:
            group, keys, after = self._changed[0]
            key = keys.pop()
            if not keys:
                self._changed.popleft()
            most -= 1
            if (known := group.blocks.get(key)) is not None:
                known.changed = known.changed and after
                most -= self._publish_one(group, key, known) - 1

    def _publish_one(self, group: Group, key: int, known: RouterBlock) -> int:
        """Publish, or withdraw, a block; those that come after it are next. Returns as how many blocks that counts."""
        parent = group.blocks.get(known.parent)
        reachable = known.tokens is not None and parent is not None and (known.parent == ROOT or parent.published)
        wanted = known.media if reachable else 0
        before, known.published = known.published, wanted
        weight = 1
        for medium in MEDIA:
            if wanted & ~before & medium:
                weight = known.weight
                self._add_stored(group, medium, key, known)
            elif before & ~wanted & medium:
                self._add_removed(group, medium, [key])
        self._untaken += weight if wanted != before else 0
        if bool(before) != bool(wanted):
            change = 1 if wanted else -1
            self.published_blocks += change
            group.published_blocks += change
            known.seen = parent.seen if wanted and parent is not None else 0
            if children := self._children(known):
                self._changed.appendleft((group, children, True))
        if not known.media and (group, key) not in self._expected:
            self._drop(group, key)
        return weight

    def _add_stored(self, group: Group, medium: int, key: int, known: RouterBlock) -> None:
        run = self._run
        if run is None or run[0] is not group or run[1] != medium or run[2][-1] != known.parent:
            self._end_run()
            run = self._run = group, medium, []
            self._run_weight = 0
        run[2].append(key)
        self._run_weight += known.weight
        if self._run_weight >= MAX_BLOCKS_PER_EVENT:
            self._end_run()

    def _end_run(self) -> None:
        if (run := self._run) is not None:
            self._run = None
            self._news.append((run[0].topic, run[0].stored(run[1], run[2])))

    def _add_removed(self, group: Group, medium: int, keys: Sequence[int]) -> None:
        self._end_run()
        last = self._news[-1][1] if self._news else None
        if (
            isinstance(last, RemovedBlocks)
            and self._news[-1][0] == group.topic
            and (last.medium, last.group_idx) == (MEDIA[medium], group.index)
            and len(last.block_hashes) + len(keys) <= MAX_BLOCKS_PER_EVENT
        ):
            last.block_hashes.extend(keys)
            return
        for start in range(0, len(keys), MAX_BLOCKS_PER_EVENT):
            part = list(keys[start : start + MAX_BLOCKS_PER_EVENT])
            self._add(group.topic, RemovedBlocks(part, MEDIA[medium], group.index))

    def _add(self, topic: bytes, event: RouterEvent) -> None:
        self._end_run()
        self._news.append((topic, event))

    # --- the graph --------------------------------------------------------------------------------

    def _group(self, namespace: Namespace, group: int) -> Group:
        groups = self._groups.get(namespace)
        if groups is None:
            topic = self.topic(namespace)
            groups = self._groups[namespace] = [Group(topic, at, spec) for at, spec in enumerate(namespace.groups)]
            for one in groups:
                self._new(one, ROOT)
        return groups[group]

    def _new(self, group: Group, key: int) -> RouterBlock:
        known = group.blocks[key] = RouterBlock()
        self._charge(group, BLOCK_BYTES)
        return known

    def _charge(self, group: Group, nbytes: int) -> None:
        self.index_bytes += nbytes
        group.bytes += nbytes

    def _link(self, group: Group, key: int, parent: int) -> None:
        above = group.blocks.get(parent) or self._new(group, parent)
        if above.children is None:
            above.children = key
        elif isinstance(above.children, int):
            above.children = {above.children, key}
        else:
            above.children.add(key)

    def _drop(self, group: Group, key: int) -> None:
        """Forget a block that is nowhere, and a parent of it that was kept for its sake alone."""
        known = group.blocks[key]
        if known.tokens is not None:
            self._charge(group, -len(known.tokens))
            known.tokens = None
            self._unlink(group, key, known.parent)
            self._forget(group, known.parent)
        self._forget(group, key)

    def _forget(self, group: Group, key: int) -> None:
        """Take a block out of the graph that is nowhere, of unknown tokens and no parent."""
        known = group.blocks[key]
        if key != ROOT and known.tokens is None and not known.media and known.children is None:
            del group.blocks[key]
            self._charge(group, -BLOCK_BYTES)

    def _unlink(self, group: Group, key: int, parent: int) -> None:
        above = group.blocks[parent]
        if isinstance(above.children, set):
            above.children.discard(key)
            if len(above.children) == 1:
                above.children = above.children.pop()
        elif above.children == key:
            above.children = None

    @staticmethod
    def _children(known: RouterBlock | None) -> list[int]:
        children = known.children if known is not None else None
        if children is None:
            return []
        return [children] if isinstance(children, int) else list(children)


def _blocks_of(event: RouterEvent) -> int:
    if isinstance(event, ClearedBlocks):
        return 1
    blocks = len(event.block_hashes)
    return max(blocks, len(event.token_ids) // TOKENS_OF_ONE) if isinstance(event, StoredBlocks) else blocks
