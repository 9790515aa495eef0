"""A store behind a slow line: its blocks come one by one, however many wait; where the line hangs, all end soon."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvoffd.tiers.redis_connection import STALL_S
from kvoffd.tiers.tier import Result
from tests.kit.redis_server import RedisServer
from tests.kit.slow_link import SlowLink
from tests.tiers.faulty_bucket import FaultyBucket
from tests.tiers.shared_rig import SLOT_BYTES, SLOTS, Answer, SharedRig

pytestmark = pytest.mark.usefixtures("short_pauses")
FIRST, BLOCKS = 8, 16
DONE = Result.DONE


class Node(SharedRig):
    """Reads some blocks, and notes when each ended."""

    def __init__(self, url: str, link: SlowLink) -> None:
        super().__init__(url)
        self.link = link
        self.reachable()
        self.results: list[Result] = []

    def begin(self, length: int, patience_s: float) -> None:
        """Begin to read what ``fill`` wrote."""
        blocks = [self.block(number, (length,)) for number in range(BLOCKS)]
        self.until(lambda: self.ask_anew(*blocks) == [Answer.YES] * BLOCKS)  # an answer that is late is none
        for number, block in enumerate(blocks):
            offsets = [(FIRST + number) * SLOT_BYTES]
            assert self.tier.read(
                block.group, block.key, offsets, patience_s, lambda result, _: self.results.append(result)
            )


def fill(url: str, length: int) -> None:
    writer = SharedRig(url).reachable()
    writer.store(*(writer.block(number, (length,)) for number in range(BLOCKS)))


@pytest.fixture(params=["redis", "s3"])
def line(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, float], Node]]:
    """Fills a store with blocks of a size, and gives a node at the end of a line of a speed."""
    with ExitStack() as stack:
        if request.param == "redis":
            server: RedisServer | FaultyBucket = stack.enter_context(RedisServer())
        else:
            pytest.importorskip("obstore")
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "user")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            server = stack.enter_context(FaultyBucket())

        def node(length: int, bytes_per_second: float) -> Node:
            fill(server.url, length)
            link = stack.enter_context(SlowLink(server.port, bytes_per_second))
            return Node(server.url.replace(str(server.port), str(link.port)), link)

        yield node


@pytest.mark.parametrize(("length", "bytes_per_second"), [(1 << 19, 4e6), (1 << 17, 1e6)])
def test_blocks_come_one_by_one_however_slowly(
    line: Callable[[int, float], Node], length: int, bytes_per_second: float
) -> None:
    """They all take 2.1 s, and nothing came for 1.5 s where a read is given up."""
    node = line(length, bytes_per_second)
    node.begin(length, patience_s=1.5)
    node.until(lambda: len(node.results) == BLOCKS)
    assert node.results == [DONE] * BLOCKS
    assert (node.tier.breaker.opened, node.kinds) == (0, {})


def test_a_line_that_hangs_half_way_ends_all_in_time_and_serves_again(line: Callable[[int, float], Node]) -> None:
    length = 1 << 18
    node = line(length, 50e6)
    node.link.hang_after(BLOCKS * length // 2)
    began, patience_s = time.monotonic(), 1.0
    node.begin(length, patience_s)
    node.until(lambda: len(node.results) == BLOCKS)
    assert time.monotonic() - began < 5 * (patience_s + STALL_S)
    assert Result.DEADLINE in node.results
    assert set(node.results) <= {DONE, Result.DEADLINE, Result.FAILED}
    if node.tier.name.startswith("redis"):  # from a bucket all these come at the same time
        assert DONE in node.results, "the first were served before the others came"
    before = bytes(node.pool)
    node.link.resume()
    node.until(node.tier.available, 10.0)
    node.results = []
    node.forget()
    node.until(lambda: node.ask_anew(node.block(0, (length,))) == [Answer.YES])
    assert bytes(node.pool) == before, "nothing is written into slots of what has ended"
    node.begin(length, patience_s=5.0)
    node.until(lambda: len(node.results) == BLOCKS)
    assert node.results == [DONE] * BLOCKS
    assert FIRST + BLOCKS <= SLOTS
