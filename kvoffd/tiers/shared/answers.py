"""What a shared store answered lately, by block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvoffd.tiers.tier import Answer, TierBlock, TierKey, TierShard

YES, NO, ASKED, UNKNOWN = Answer.YES, Answer.NO, Answer.ASKED, Answer.UNKNOWN
YES_S, NO_S, FAILED_S = 2.0, 1.0, 30.0
"""How long an answer is taken for true; the last for a block that was there by its answer and could not be read."""
MOST_REFUSED = 32_768
"""Keys that failed lately, or were invalidated, and are remembered, of about 250 bytes each."""
MOST_ANSWERS = 262_144
"""Answers kept, of about 250 bytes each; beyond it the oldest quarter goes."""
MOST_GROUPS = 8192
"""Groups of namespaces of which answers are kept."""


class _Group:
    """Answers of one group of a namespace: by key, the answer and when it was given."""

    __slots__ = ("answers", "lengths")

    def __init__(self) -> None:
        self.answers: dict[bytes, tuple[Answer, float]] = {}
        self.lengths: Sequence[int] = ()


class Answers:
    """All answers. For one thread."""

    def __init__(self, clock: Callable[[], float], ask_deadline_s: float) -> None:
        self._clock = clock
        self._ask_deadline_s = ask_deadline_s
        self._groups: dict[tuple[bytes, int], _Group] = {}
        self._refused: OrderedDict[tuple[bytes, int, bytes], float] = OrderedDict()
        """Keys that stay NO until then, whatever is answered."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, fingerprint: bytes, group: int, keys: Sequence[bytes]) -> list[Answer]:
        known = self._groups.get((fingerprint, group))
        given = list(map(known.answers.get, keys)) if known is not None else []
        if not any(given):
            return [UNKNOWN] * len(keys)
        now = self._clock()
        return [self._now(one, now) for one in given]

    def _now(self, given: tuple[Answer, float] | None, now: float) -> Answer:
        """An answer as it is now. That of NO has the time at which it ends, the others when they were given."""
        if given is None:
            return UNKNOWN
        answer, at = given
        if answer is NO:
            return NO if now < at else UNKNOWN
        if answer is YES:
            return YES if now < at + YES_S else UNKNOWN
        # Who asked and got no answer in time has its miss; the next may ask again a little later.
        ended = at + self._ask_deadline_s
        return ASKED if now < ended else NO if now < ended + NO_S else UNKNOWN

    def give(self, fingerprint: bytes, group: int, keys: Iterable[bytes], answer: Answer) -> None:
        """Note the same answer for some keys; NO for ``NO_S``."""
        at = self._clock() + (NO_S if answer is NO else 0.0)
        self._update(self._group(fingerprint, group), dict.fromkeys(keys, (answer, at)))

    def refuse(self, fingerprint: bytes, group: int, key: bytes) -> None:
        """The key is NO for ``FAILED_S``, whatever the store answers meanwhile."""
        name, until = (fingerprint, group, key), self._clock() + FAILED_S
        self._refused.pop(name, None)
        self._refused[name] = until
        if len(self._refused) > MOST_REFUSED:
            self._refused.popitem(last=False)  # of a dict the first one is looked for behind all that are gone
        self._update(self._group(fingerprint, group), {key: (NO, until)})

    def answered(self, fingerprint: bytes, group: int, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        known, now = self._group(fingerprint, group), self._clock()
        yes, no = (YES, now), (NO, now + NO_S)
        fresh = {key: yes if there else no for key, there in zip(keys, found, strict=True)}
        for key in keys if self._refused else ():
            if (until := self._refused.get((fingerprint, group, key), now)) > now:
                fresh[key] = NO, until
        self._update(known, fresh)

    def _group(self, fingerprint: bytes, group: int) -> _Group:
        if (known := self._groups.get((fingerprint, group))) is None:
            known = self._groups[fingerprint, group] = _Group()
            if len(self._groups) > MOST_GROUPS:
                self._count -= len(self._groups.pop(next(iter(self._groups))).answers)
        return known

    def _update(self, known: _Group, fresh: dict[bytes, tuple[Answer, float]]) -> None:
        before = len(known.answers)
        known.answers.update(fresh)
        self._count += len(known.answers) - before
        if self._count > MOST_ANSWERS:
            self._shrink()

    def set_lengths(self, fingerprint: bytes, group: int, lengths: Sequence[int]) -> None:
        self._group(fingerprint, group).lengths = lengths

    def forget(self, fingerprint: bytes) -> None:
        for name in [name for name in self._groups if name[0] == fingerprint]:
            self._count -= len(self._groups[name].answers)
            self._groups[name].answers.clear()

    def within(self, fingerprint: bytes, group: int, seconds: float) -> Mapping[bytes, TierBlock]:
        """A live view of the blocks that were there when they were asked for so many seconds ago or less."""
        known = self._groups.get((fingerprint, group))
        return _Yes(fingerprint, group, known, seconds, self._clock) if known is not None else {}

    def _shrink(self) -> None:
        """Remove the older quarter of the answers of each group."""
        self._count = 0
        for known in self._groups.values():
            for key in list(known.answers)[: len(known.answers) // 4 + 1]:
                del known.answers[key]
            self._count += len(known.answers)


class _Yes(Mapping[bytes, TierBlock]):
    """Keys of a group whose answer was YES; of the blocks only the lengths are known."""

    def __init__(
        self, fingerprint: bytes, group: int, known: _Group, seconds: float, clock: Callable[[], float]
    ) -> None:
        self._fingerprint = fingerprint
        self._group = group
        self._known = known
        self._shards = tuple(TierShard(length, 0, 0) for length in known.lengths)
        self._since = clock() - seconds

    def __contains__(self, key: object) -> bool:
        given = self._known.answers.get(key)  # type: ignore[call-overload]
        return given is not None and given[0] is YES and given[1] > self._since

    def __getitem__(self, key: bytes) -> TierBlock:
        if key not in self:
            raise KeyError(key)
        return TierBlock(TierKey(self._fingerprint, self._group, key), self._shards)

    def __iter__(self) -> Iterator[bytes]:
        return (key for key in self._known.answers if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
