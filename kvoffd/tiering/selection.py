"""Selection of the blocks that are worth writing to a full tier, by their chances of reuse."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

STAYS = 2.0, 3.0, 4.0, 6.0, 8.0
"""Candidate stays of a written block on a full tier, in multiples of its stay if all were written. The least is 2: at
most half are."""
WORTH = 0.99
"""Share of the best hit count: of the settings that give at least this, the one with the fewest writes is used."""
SAMPLE, RENEWED_SHARE = 2048, 1 / 16
"""Number of the latest blocks on which the choice is based, and the part of them after which it is made again."""
RELIABLE_AFTER = 4
"""A chance of reuse within x bytes is reliable once RELIABLE_AFTER * x bytes were requested."""
RECENT_TIERS = 4
"""Recently requested bytes are halved, with what was offered since, once they are this many times the tier's."""


class Selection:
    """Selects the part of the evicted blocks that is worth writing to a full tier: those most likely to be reused.

    If fewer blocks are written, each stays longer, and more of them are reused in that time. For each of ``STAYS``, the
    expected hits of the latest blocks are added up: of the most likely ones, as many as can stay that long, which is
    half of them for 2.0, a third for 3.0. The best stay wins.
    """

    def __init__(self) -> None:
        self._chances = np.empty((0, len(STAYS)))
        """[blocks, stays] chances of reuse of the latest SAMPLE blocks, within each of ``lifetimes``."""
        self._new_chances = 0
        """Number of these blocks since the last choice."""
        self._accessed = self._offered = 0.0
        """Recently requested bytes, and bytes of blocks that came next to be evicted."""
        self._stay_index = 0
        """The choice: an index of STAYS."""
        self._least_chance = 0.0
        """Least chance of reuse within that stay of a block that is worth writing."""

    def record_traffic(self, accessed_bytes: int, tier_bytes: int) -> None:
        """Record the bytes requested since the last call."""
        self._accessed += accessed_bytes
        if self._accessed > RECENT_TIERS * tier_bytes:
            self._accessed, self._offered = self._accessed / 2, self._offered / 2

    def record_present(self, nbytes: int) -> None:
        """Record that another node had already written one of the blocks."""
        self._offered = max(0.0, self._offered - nbytes)

    def lifetimes(self, tier_bytes: int) -> list[int]:
        """Return for each of ``STAYS`` the bytes that are requested while a block stays."""
        # If all were written, a block would stay until ``tier_bytes`` more were offered.
        if_all_written = tier_bytes * max(1.0, self._accessed / max(1.0, self._offered))
        return [int(if_all_written * stay) for stay in STAYS]

    def record(self, chances: npt.NDArray[np.float64], nbytes: int, reliable: int) -> None:
        """Record blocks of this size that are next to be evicted: their chances of reuse within each of ``lifetimes``,
        of which the first ones are reliable, ``reliable`` in number."""
        self._offered += nbytes * len(chances)
        self._chances = np.concatenate([self._chances, chances])[-SAMPLE:]
        self._new_chances += len(chances)
        if self._new_chances >= RENEWED_SHARE * len(self._chances):
            self._choose(max(1, reliable))

    def _choose(self, reliable: int) -> None:
        """Choose the stay, and the least chance: that of the last block that fits if each stays that long."""
        self._new_chances = 0
        likeliest_first = np.sort(self._chances[:, :reliable], axis=0)[::-1]  # in each column
        fitting = [max(1, int(len(likeliest_first) / stay)) for stay in STAYS[:reliable]]  # number of blocks
        hits = [float(likeliest_first[:count, at].sum()) for at, count in enumerate(fitting)]
        self._stay_index = max(at for at, expected in enumerate(hits) if expected >= WORTH * max(hits))
        chances = likeliest_first[:, self._stay_index]
        # Of equally likely blocks all are worth writing or none: those that do not all fit are not, unless none is
        # likelier.
        first_unfit = chances[min(fitting[self._stay_index], len(chances) - 1)]
        likelier = chances[chances > first_unfit]
        self._least_chance = float(likelier[-1] if len(likelier) else chances[0])

    def stay_bytes(self, tier_bytes: int) -> int:
        """Return the bytes that are requested while a written block stays."""
        return self.lifetimes(tier_bytes)[self._stay_index]

    def deciding(self, chances: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], float]:
        """Return, of each block's chances within each of ``lifetimes``, the one that decides; and the least one that
        is enough."""
        return chances[:, self._stay_index], self._least_chance
