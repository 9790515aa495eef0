"""What any tier that is asked must do, over whatever server, and over one that breaks when a test asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvoffd.tiers.breaker import MAX_FAILURES
from kvoffd.tiers.store import Credentials, open_store
from kvoffd.tiers.tier import Result
from tests.tiers.faulty_bucket import FaultyBucket
from tests.tiers.faulty_store import FaultyStore
from tests.tiers.shared_rig import ONE, OTHER, SHARDS, Answer, SharedRig, key_of

DONE = Result.DONE
Nodes = Callable[[], SharedRig]
Double = FaultyStore | FaultyBucket


class SharedConformance:
    """Two nodes write and read over one server, that has nothing at first. Has the fixture ``url``."""

    most_asked = 5000

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def node(self, url: str) -> Nodes:
        return lambda: SharedRig(url).reachable()

    @pytest.mark.parametrize("lengths", [(4096,), (1,), (1 << 20,), (1, 9999, 4096, 12_345), (0, 5000, 0), (300, 7)])
    def test_what_one_node_writes_another_reads_byte_for_byte(self, node: Nodes, lengths: tuple[int, ...]) -> None:
        ours, theirs = node(), node()
        block = ours.block(1, lengths, first=3)
        assert theirs.load(block) is None
        ours.store(block)
        theirs.forget()  # or its NO would stand for a second
        assert theirs.load(block) is DONE
        assert theirs.read_block is not None
        assert theirs.read_block.first_blocks[0] == 3

    def test_it_is_asked_what_is_there(self, node: Nodes) -> None:
        rig = node()
        blocks = [rig.block(number) for number in range(6)]
        rig.store(blocks[1], blocks[4])
        other = node()
        wanted = [Answer.YES if number in (1, 4) else Answer.NO for number in range(6)]
        assert other.ask(*blocks) == wanted
        assert other.tier.counters.asked_keys == 6
        assert other.tier.counters.found_keys == 2
        assert other.ask(*blocks) == wanted
        assert other.tier.counters.asked_keys == 6, "an answer is kept for a while"

    def test_how_far_a_prefix_reaches(self, node: Nodes) -> None:
        rig, other = node(), node()
        blocks = [rig.block(0)._replace(key=key_of(n)) for n in range(60)]
        for there in (0, 1, 2, 17, 59, 60):
            rig.store(*blocks[rig.tier.counters.written_blocks : there])
            other.forget()
            answers = other.ask(*blocks, prefix=True)
            assert answers[:there] == [Answer.YES] * there
            assert Answer.YES not in answers[there:], "a NO of a busy machine may be a second old"

    def test_many_keys_at_a_time(self, node: Nodes) -> None:
        rig = node()
        block = rig.block(self.most_asked - 1)
        rig.store(block)
        other = node()
        answers = other.ask(*(block._replace(key=key_of(n)) for n in range(self.most_asked)))
        assert answers.count(Answer.YES) == 1
        assert answers[-1] is Answer.YES

    def test_what_is_evicted_between_asking_and_reading_is_a_miss(self, node: Nodes) -> None:
        ours, theirs, third = node(), node(), node()
        block = ours.block(1)
        ours.store(block)
        assert theirs.ask(block) == [Answer.YES]
        ours.remove(block)
        third.until(lambda: third.ask_anew(block) == [Answer.NO])
        ended = theirs.begin_read(block)
        assert ended is not None
        theirs.until(lambda: bool(ended))
        assert ended == [Result.GONE]
        assert theirs.tier.available()
        assert theirs.ask(block) == [Answer.NO]

    @pytest.mark.parametrize("off_s", [-3600, 3600])
    def test_resets_by_a_clock_that_is_off_are_followed(
        self, node: Nodes, monkeypatch: pytest.MonkeyPatch, off_s: int
    ) -> None:
        now, ours, theirs = time.time, node(), node()
        block = ours.block(1)
        for rig, other, off in ((ours, theirs, off_s), (theirs, ours, 0)):
            rig.store(block)
            other.until(lambda other=other: other.ask_anew(block) == [Answer.YES])
            monkeypatch.setattr(time, "time", lambda off=off: now() + off)
            raised = rig.raise_generation(ONE)
            assert not raised.problem
            rig.take_voided()
            other.until(lambda other=other: other.ask_anew(block) == [Answer.NO])
            assert other.take_voided() == {ONE}

    def test_one_poll_hears_of_all_namespaces(self, node: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also of one whose generation was heard before."""
        ours, theirs, every = node(), node(), [bytes([number]) * 32 for number in range(20)]
        monkeypatch.setattr(theirs.tier._store, "poll_s", 0.0)
        for raised in (every[2:4], every[3:8]):
            for fingerprint in raised:
                assert not ours.raise_generation(fingerprint).problem
            ours.take_voided()

            def heard(raised: list[bytes] = raised) -> bool:
                theirs.tier.clears.poll(every)
                return theirs.tier.generations.voided == set(raised)

            theirs.until(heard)
            assert theirs.take_voided() == set(raised)
            fleets = [[rig.tier.generations.fleet(one) for one in every] for rig in (ours, theirs)]
            assert fleets[0] == fleets[1]
        assert all(theirs.tier.clears.answered_about(fingerprint) > 0 for fingerprint in every)

    def test_nothing_is_written_twice(self, node: Nodes) -> None:
        ours, theirs = node(), node()
        block = ours.block(1)
        ours.store(block)
        assert ours.write(block) is None
        theirs.store(block)
        assert (theirs.tier.counters.already_stored, theirs.tier.counters.written_blocks) == (1, 0)

    def test_groups_and_namespaces_are_kept_apart(self, node: Nodes) -> None:
        rig, other = node(), node()
        blocks = [rig.block(1, (5000,), fingerprint, group) for fingerprint in (ONE, OTHER) for group in (0, 1)]
        rig.store(blocks[0])
        assert [other.load(block) for block in blocks] == [DONE, None, None, None]

    def test_many_at_a_time_all_end_once(self, node: Nodes) -> None:
        rig, other = node(), node()
        blocks = rig.store_some(14)
        assert other.ask(*blocks) == [Answer.YES] * 14
        reads = [other.begin_read(block, slot=8 + number) for number, block in enumerate(blocks)]
        other.until(lambda: all(reads))
        assert reads == [[DONE]] * 14
        for number, block in enumerate(blocks):
            (data,) = SHARDS[block.checksums]
            assert other.pool[(8 + number) << 20 :][: len(data)] == data

    def test_what_one_node_invalidates_others_still_have(self, node: Nodes) -> None:
        ours, theirs = node(), node()
        block = ours.block(1)
        ours.store(block)
        ours.tier.remove(block.group, [block.key])
        assert ours.ask(block) == [Answer.NO]
        assert theirs.load(block) is DONE

    def test_nodes_that_all_find_a_number_forgotten_write_one(self, url: str) -> None:
        stores = [open_store(url, Credentials())() for _ in range(3)]
        until = time.monotonic() + 30.0
        for one in stores:
            one.connect()
            assert one.generation(ONE, until) == 0
        assert [one.raise_generation(ONE, 0, 7, until) for one in stores] == [7, 7, 7]
        assert stores[0].generation(ONE, until) == 7
        for one in stores:
            one.close()

    def test_nodes_that_all_find_an_old_number_raise_it_together(self, url: str) -> None:
        """As after a failover to a replica without the last clear. What each lacks, added up, would be years ahead."""
        stores = [open_store(url, Credentials())() for _ in range(3)]
        until = time.monotonic() + 30.0
        for one in stores:
            one.connect()
        assert stores[0].raise_generation(ONE, 0, 5, until) == 5
        assert [one.raise_generation(ONE, 5, 900, until) for one in stores] == [900, 900, 900]
        assert stores[0].raise_generation(ONE, 900, 901, until) == 901, "whose turn it was"
        for one in stores:
            one.close()

    def test_closing_ends_everything_once(self, node: Nodes) -> None:
        rig = node()
        blocks = [rig.block(number, (1 << 20,)) for number in range(8)]
        rig.store(rig.block(0, (1 << 20,)))
        rig.ask(*blocks)
        reads = [rig.begin_read(blocks[0], slot=slot) for slot in range(8, 20)]
        assert rig.close()
        assert all(ended is not None and len(ended) == 1 for ended in reads)


LIES: dict[str, Callable[[bytes], bytes]] = {
    "a bit of the first byte": lambda value: bytes([value[0] ^ 1]) + value[1:],
    "a bit of the last byte": lambda value: value[:-1] + bytes([value[-1] ^ 1]),
    "a bit of a checksum": lambda value: value[:104] + bytes([value[104] ^ 1]) + value[105:],
    "shorter": lambda value: value[:-1],
    "longer": lambda value: value + b"\0",
    "longer than the pool": lambda value: value * 1000,
    "empty": lambda value: b"",
    "zeros": lambda value: bytes(len(value)),
}


class FaultConformance:
    """A node over a server that breaks on purpose: a miss, never a wrong byte. Has the fixtures ``double``, ``rig``.

    Attributes:
        slow_s: an answer that takes so long is late.
        cut: the kind of error that a connection is which ends in an object.
        refusals: answers of a server that takes no writes, the kind of error of each, and what its sentence says.
    """

    slow_s = 0.04
    cut = "disconnected"
    refusals: Sequence[tuple[Any, str, str]]

    @pytest.fixture
    def double(self) -> Double:
        raise NotImplementedError

    @pytest.fixture
    def url(self, double: Double) -> str:
        return double.url

    @pytest.mark.parametrize("lie", LIES)
    def test_what_is_not_the_block_is_removed(self, double: Double, rig: SharedRig, lie: str) -> None:
        block = rig.block(1, (5000, 300))
        rig.store(block)
        double.spoil = LIES[lie]
        assert rig.load(block) is Result.CORRUPT
        assert rig.tier.counters.mismatches == 1
        assert rig.kinds == {"mismatch": 1}
        rig.until(lambda: not double.values)
        assert rig.ask(block) == [Answer.NO], "it is not asked for again soon"

    @pytest.mark.parametrize("cut_after", [0, 3, 40, 2000, 6000])
    def test_a_value_is_read_again_where_its_connection_is_cut_and_then_a_miss(
        self, double: Double, rig: SharedRig, cut_after: int
    ) -> None:
        block, other = rig.block(1), rig.block(2)
        rig.store(block, rig.block(2))
        double.cut_after, double.cuts = cut_after, 1
        assert rig.load(other) is DONE
        assert rig.kinds == {self.cut: 1}
        double.cuts = 2
        assert rig.load(block) is Result.FAILED
        assert rig.kinds == {self.cut: 3}
        assert rig.tier.available()

    def test_a_server_that_refuses_writes_is_read(
        self, double: Double, rig: SharedRig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvoffd.tiers.store_health.FULL_PAUSE_S", 0.0)
        rig.store(block := rig.block(1))
        for at, (answer, kind, because) in enumerate(self.refusals):
            rig.kinds.clear()
            double.refuse_writes(answer)
            for number in range(4):
                assert rig.write(rig.block(10 * at + number + 2)) is Result.FAILED
                assert rig.tier.available()
            assert rig.kinds == {kind: 4}
            assert because in rig.tier.health.refusal
        assert rig.tier.breaker.opened == 0
        assert rig.load(block) is DONE

    def test_slow_answers_are_misses_and_open_the_breaker(self, double: Double) -> None:
        rig = SharedRig(double.url, ask_deadline_s=self.slow_s / 2).reachable()
        rig.store(block := rig.block(1))
        rig.forget()
        double.delay_s = self.slow_s
        asked = 0
        while rig.tier.available():
            assert rig.ask(rig.block(10 + asked)) != [Answer.YES]
            asked += 1
        assert asked >= MAX_FAILURES
        rig.until(lambda: bool(rig.tier.health.problem))
        rig.question([b"k" * 32], prefix=True, fingerprint=ONE, length=5000)
        assert rig.answers(ONE, [b"k" * 32]) == [Answer.UNKNOWN], "an open breaker asks nothing"
        double.delay_s = 0.0
        rig.until(lambda: rig.tier.available(), 5.0)
        rig.until(lambda: rig.load(block) is DONE)
