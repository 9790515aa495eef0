"""What any tier must do. Make a subclass whose ``make`` gives a Maker, and pytest runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kvoffd.tiers.tier import TierBlock, TierKey, TierResult
from tests.tiers.rig import ONE, OTHER, SLOT_BYTES, Ending, Maker, TierRig, block_of

DONE = TierResult.DONE


class TierConformance:
    """Tests of the interface, and of nothing that one tier has beyond it."""

    def make(self, directory: Path) -> Maker:
        """A tier that holds some thirty blocks of 12 KiB and forgets nothing by itself."""
        raise NotImplementedError

    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[TierRig]:
        rig = TierRig(self.make(tmp_path))
        yield rig
        assert rig.close()

    def store(self, rig: TierRig, *blocks: TierBlock) -> None:
        """Writes blocks and sees that they are there."""
        for block in blocks:
            ending = rig.write(block)
            assert ending is not None
            rig.settle()
            assert ending.result is DONE
            assert rig.has(block.id)

    def load(self, rig: TierRig, block: TierBlock) -> TierResult | None:
        """Reads a block; None where it is not taken."""
        ending = rig.read(block)
        rig.settle()
        return ending.result if ending is not None else None

    @pytest.mark.parametrize(
        "lengths", [(4096,), (1,), (10_000,), (SLOT_BYTES,), (4096, 8192), (1, 9999, 4096, 12_345), (0, 5000, 0), (0,)]
    )
    def test_what_is_written_is_read_byte_for_byte(self, rig: TierRig, lengths: tuple[int, ...]) -> None:
        block = block_of(1, lengths)
        self.store(rig, block)
        assert rig.tier.index(ONE, 0)[block.id.key] == block
        assert self.load(rig, block) is DONE
        assert self.load(rig, block) is DONE

    def test_a_new_tier_has_nothing(self, rig: TierRig) -> None:
        assert rig.ids() == set()
        assert rig.read(block_of(1)) is None
        assert not rig.tier.index(ONE, 0)
        assert rig.tier.remove([block_of(1).id]) == 0
        rig.tier.touch([block_of(1).id])
        assert rig.tier.remove_namespace(ONE) == 0
        rig.settle()

    def test_nothing_happens_within_the_call(self, rig: TierRig) -> None:
        block = block_of(1)
        ending = rig.write(block)
        assert ending is not None
        assert ending.result is None
        assert not rig.has(block.id)
        rig.settle()
        reading = rig.read(block)
        assert reading is not None
        assert reading.result is None
        told = set(rig.fold.blocks)
        rig.tier.remove([block.id])
        assert not rig.has(block.id)
        assert rig.fold.blocks == told
        rig.settle()
        assert not rig.fold.blocks

    def test_a_block_is_kept_once(self, rig: TierRig) -> None:
        block = block_of(1)
        first = rig.write(block)
        assert first is not None
        assert rig.write(block) is None
        rig.settle()
        assert rig.write(block) is None
        rig.settle()
        assert rig.ids() == {block.id}

    def test_groups_and_namespaces_are_kept_apart(self, rig: TierRig) -> None:
        blocks = [block_of(1, (5000,), fingerprint, group) for fingerprint in (ONE, OTHER) for group in (0, 1, 65535)]
        self.store(rig, *blocks)
        assert set(rig.tier.groups()) == {block.id[:2] for block in blocks}
        for block in blocks:
            assert dict(rig.tier.index(*block.id[:2])) == {block.id.key: block}
            assert self.load(rig, block) is DONE

    def test_many_at_a_time_all_end_once(self, rig: TierRig) -> None:
        blocks = [block_of(number) for number in range(16)]
        endings = [rig.write(block) for block in blocks]
        rig.settle()
        assert [ending and ending.result for ending in endings] == [DONE] * 16
        reads = [rig.read(block) for block in Random(1).sample([*blocks, *blocks], 32)]
        rig.settle()
        assert [ending and ending.result for ending in reads] == [DONE] * 32

    def test_no_other_memory_is_touched(self, rig: TierRig) -> None:
        blocks = [block_of(number, (5000, 3000)) for number in range(4)]
        self.store(rig, *blocks)
        offsets = rig.room(9)
        before = bytes(rig.pool)
        ending = Ending(rig)
        rig.under_way += 1
        assert rig.tier.read(blocks[2].id, [offsets[3], offsets[5]], float("inf"), ending)
        rig.settle()
        # Up to the next page is the slot's, and nobody's.
        allowed = {*range(offsets[3], offsets[3] + 8192), *range(offsets[5], offsets[5] + 4096)}
        after = bytes(rig.pool)
        assert not [at for at in range(len(after)) if after[at] != before[at] and at not in allowed]
        rig.free(offsets)

    def test_a_read_that_is_late_ends_by_deadline_and_the_block_stays(self, rig: TierRig) -> None:
        block = block_of(1)
        self.store(rig, block)
        ending = rig.read(block, deadline=rig.now)
        rig.tier.tick()
        rig.settle()
        assert ending is not None
        assert ending.result is TierResult.DEADLINE
        assert self.load(rig, block) is DONE

    def test_the_least_recently_used_make_room(self, rig: TierRig) -> None:
        count = 2 * rig.maker.capacity_bytes // 12_288
        kept = [block_of(number) for number in range(3)]
        self.store(rig, *kept)
        assert not rig.tier.full_bytes
        for number in range(3, count):
            rig.tier.touch([block.id for block in kept])
            self.store(rig, block_of(number))
        stats = rig.tier.stats()
        assert 0 < stats.evicted_blocks == count - stats.blocks
        assert all(rig.has(block.id) for block in kept)
        assert rig.has(block_of(count - 1).id)
        left = [number for number in range(3, count) if rig.has(block_of(number).id)]
        if rig.maker.exact_order:
            assert left == list(range(left[0], count)), "the oldest did not go first"
        for number in [0, 1, 2, *left]:
            assert self.load(rig, block_of(number)) is DONE
        assert rig.tier.full_bytes == stats.used_bytes

    def test_other_sizes_get_room_too(self, rig: TierRig) -> None:
        self.store(rig, *(block_of(number) for number in range(rig.maker.capacity_bytes // 12_288)))
        larger = [block_of(number, (20_000, 9000), OTHER) for number in range(8)]
        self.store(rig, *larger)
        assert all(self.load(rig, block) is DONE for block in larger[-4:])
        self.store(rig, *(block_of(100 + number) for number in range(30)))
        assert self.load(rig, block_of(129)) is DONE

    def test_blocks_being_read_stay(self, rig: TierRig) -> None:
        block = block_of(1)
        self.store(rig, block)
        for number in range(2, 2 * rig.maker.capacity_bytes // 12_288):
            reading = rig.read(block)
            writing = rig.write(block_of(number))
            rig.settle()
            assert reading is not None
            assert reading.result is DONE
            assert writing is None or writing.result is DONE
            if not rig.has(block.id):
                self.store(rig, block)

    def test_what_was_removed_is_gone_for_good(self, rig: TierRig) -> None:
        blocks = [block_of(number) for number in range(6)]
        self.store(rig, *blocks)
        assert rig.tier.remove([blocks[1].id, blocks[4].id, block_of(99).id, blocks[1].id]) == 2
        rig.settle()
        for _ in range(2):
            assert rig.ids() == {blocks[number].id for number in (0, 2, 3, 5)}
            assert rig.read(blocks[1]) is None
            rig.restart()
        self.store(rig, blocks[1])
        assert self.load(rig, blocks[1]) is DONE

    def test_a_namespace_is_gone_for_good(self, rig: TierRig) -> None:
        ones = [block_of(number, group=number % 2) for number in range(6)]
        others = [block_of(number, fingerprint=OTHER) for number in range(3)]
        self.store(rig, *ones, *others)
        assert rig.tier.remove_namespace(ONE) == 6
        rig.settle()
        for _ in range(2):
            assert rig.ids() == {block.id for block in others}
            rig.restart()
        self.store(rig, ones[0])
        rig.restart()
        assert self.load(rig, ones[0]) is DONE
        assert self.load(rig, others[2]) is DONE

    @pytest.mark.parametrize("whole", [False, True])
    def test_what_is_removed_while_it_is_written_is_forgotten(self, rig: TierRig, whole: bool) -> None:
        block = block_of(1)
        ending = rig.write(block)
        assert ending is not None
        assert (rig.tier.remove_namespace(ONE) if whole else rig.tier.remove([block.id])) == 0
        again = rig.write(block, seed=0)
        rig.settle()
        assert ending.result is TierResult.GONE
        assert rig.has(block.id) == (again is not None and again.result is DONE)
        if again is not None:
            assert self.load(rig, block) is DONE

    def test_what_is_removed_while_it_is_read_is_gone(self, rig: TierRig) -> None:
        block = block_of(1)
        self.store(rig, block)
        ending = rig.read(block)
        assert rig.tier.remove([block.id]) == 1
        rig.settle()
        assert ending is not None
        assert ending.result is TierResult.GONE

    def test_blocks_are_there_after_a_restart(self, rig: TierRig) -> None:
        blocks = [block_of(number, (1000 * number, 700), (ONE, OTHER)[number % 2], number % 3) for number in range(9)]
        self.store(rig, *blocks)
        for _ in range(2):
            rig.restart()
            assert rig.ids() == {block.id for block in blocks}
            for block in blocks:
                assert rig.tier.index(*block.id[:2])[block.id.key] == block
                assert self.load(rig, block) is DONE

    def test_closing_ends_everything_once_and_touches_no_memory_after(self, rig: TierRig) -> None:
        blocks = [block_of(number) for number in range(8)]
        self.store(rig, *blocks)
        endings = [rig.read(block) for block in blocks] + [rig.write(block_of(100 + number)) for number in range(8)]
        assert rig.tier.close(60.0)
        results = [ending.result for ending in endings if ending is not None]
        assert len(results) == 16
        assert set(results) <= {DONE, TierResult.CANCELLED}
        rig.open()
        assert {block.id for block in blocks} <= rig.ids()
        for block in (*blocks, *(block_of(100 + number) for number in range(8))):
            if rig.has(block.id):
                assert self.load(rig, block) is DONE

    def test_figures_count_what_was_done(self, rig: TierRig) -> None:
        blocks = [block_of(number, (5000, 300)) for number in range(4)]
        self.store(rig, *blocks)
        assert self.load(rig, blocks[0]) is DONE
        stats = rig.tier.stats()
        assert (stats.blocks, stats.written_blocks, stats.written_bytes) == (4, 4, 4 * 5300)
        assert (stats.read_blocks, stats.read_bytes, stats.evicted_blocks) == (1, 5300, 0)
        assert stats.used_bytes >= 4 * 5300
        assert (stats.queued_reads, stats.queued_writes, stats.running_reads) == (0, 0, 0)
        assert set(stats.errors) <= {"not_direct"}  # where the tests run, the file system may not take it

    def test_a_life_of_chance(self, rig: TierRig) -> None:
        random = Random(7)
        for step in range(300):
            block = block_of(random.randrange(40), (3000,) if random.random() < 0.8 else (9000, 100))
            block = block_of(int.from_bytes(block.id.key, "big"), group=len(block.shards), lengths=_lengths(block))
            choice = random.random()
            if choice < 0.45:
                rig.write(block)
            elif choice < 0.8:
                rig.read(block)
            elif choice < 0.9:
                rig.tier.touch([block.id])
            elif choice < 0.95:
                rig.tier.remove([block.id])
            else:
                rig.tier.tick()
            if rig.under_way > 12 or step % 100 == 99:
                rig.settle()
            if step == 200:
                rig.settle()
                known = {TierKey(*block_id) for block_id in rig.ids()}
                rig.restart()
                assert rig.ids() == known
        rig.settle()
        assert set(rig.fold.kinds) <= {"not_direct"}


def _lengths(block: TierBlock) -> list[int]:
    return [shard.length for shard in block.shards]
