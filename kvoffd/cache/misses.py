"""Why keys that lookups asked for were not there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvoffd.cache.namespace import BlockState, MissReason, Namespace
from kvoffd.system.native import native

ENTRIES = 2**19
"""Keys of which it is known why they left, all namespaces together: 4 MiB. A key replaces one at random."""
KEYS_AT_ONCE = 2**16
"""Keys that may wait to be counted."""
_READY, _WRITING = bytes([BlockState.READY]), bytes([BlockState.WRITING])
_NONE = array("Q", bytes(8 * 16))
_Groups = Sequence[tuple[int, bytes]]


class Misses:
    """Counts misses by reason in the counters of their namespaces, after the answer. For the cache's thread."""

    def __init__(self) -> None:
        self._native = native()
        self._entries = np.zeros(ENTRIES, dtype=np.uint64)
        self._table = self._entries.ctypes.data, ENTRIES
        self._asked: list[tuple[Namespace, _Groups, Sequence[bytes], Sequence[bytes]]] = []
        self._keys_asked = 0
        self._counts = _NONE[:]
        """By reason, of what is being counted."""

    def note(self, namespace: Namespace, group: int, keys: Sequence[bytes], reason: MissReason) -> None:
        """These keys are not there from now on, for this reason."""
        index = namespace.index[group].at
        self._native.note_reasons(index, *self._table, b"".join(keys), len(keys), reason)

    def asked(self, namespace: Namespace, groups: _Groups, pool: Sequence[bytes], answered: Sequence[bytes]) -> None:
        """A lookup missed some keys: ``groups`` as it gave them, states in the ``pool``, and states ``answered``."""
        self._asked.append((namespace, groups, pool, answered))
        self._keys_asked += sum(map(len, answered))
        if self._keys_asked > KEYS_AT_ONCE:
            self.count()

    def reason_of(self, namespace: Namespace, group: int, key: bytes) -> MissReason:
        """Why a key was not there when it was asked for, as far as is known: stored meanwhile or not."""
        counts = _NONE[:]
        at = counts.buffer_info()[0]
        self._native.count_reasons(namespace.index[group].at, *self._table, key, 1, bytes(1), at)
        return MissReason(next(reason for reason, count in enumerate(counts) if count))

    def count(self) -> None:
        """Count what was asked since the last call."""
        counts, at = self._counts, self._counts.buffer_info()[0]
        for namespace, groups, pool, answered in self._asked:
            misses = namespace.counters.misses
            for (group, keys), before, after in zip(groups, pool, answered, strict=True):
                if before is not after and (limited := before.count(_READY) - after.count(_READY)):
                    misses[MissReason.LEASE_LIMIT] += limited
                    after = np.maximum(np.frombuffer(before, np.uint8), np.frombuffer(after, np.uint8)).tobytes()
                if writing := after.count(_WRITING):
                    misses[MissReason.PARTIAL] += writing
                self._native.count_reasons(namespace.index[group].at, *self._table, keys, len(after), after, at)
            for reason, number in zip(MissReason, counts, strict=False):
                if number:
                    misses[reason] += number
            counts[:] = _NONE
        self._asked.clear()
        self._keys_asked = 0
