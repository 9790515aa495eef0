"""What C knows by number and Python as an object."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Numbered(Generic[T]):
    """Objects by their numbers, from 1 on. The number of one that is gone is given again."""

    def __init__(self) -> None:
        self._by_number: list[T | None] = [None]
        self._unused = array("I")

    def __len__(self) -> int:
        return len(self._by_number) - 1 - len(self._unused)

    def __iter__(self) -> Iterator[T]:
        return (one for one in self._by_number if one is not None)

    def next_numbers(self, count: int) -> array[int]:
        """Numbers for so many objects, to be entered with them or not at all."""
        if (lacking := count - len(self._unused)) > 0:
            first = len(self._by_number)
            self._by_number += [None] * lacking
            self._unused.extend(range(first, first + lacking))
        return self._unused[len(self._unused) - count :]

    def enter(self, numbers: array[int], objects: Sequence[T]) -> None:
        """These are the objects of the ``next_numbers``."""
        del self._unused[len(self._unused) - len(numbers) :]
        for number, one in zip(numbers, objects, strict=True):
            self._by_number[number] = one

    def find(self, numbers: Iterable[int]) -> list[T | None]:
        """The objects of numbers; None for 0."""
        return list(map(self._by_number.__getitem__, numbers))

    def page(self, first: int, places: int, wanted: Callable[[T], bool], limit: int) -> tuple[list[T], int]:
        """At most ``limit`` of the objects that are ``wanted``, among so many numbers from ``first`` on, and the number
        to go on with; 0 at the end."""
        found: list[T] = []
        end = min(first + places, len(self._by_number))
        for number in range(first, end):
            one = self._by_number[number]
            if one is not None and wanted(one):
                found.append(one)
                if len(found) == limit:
                    end = number + 1
                    break
        return found, end if end < len(self._by_number) else 0

    def remove(self, numbers: array[int]) -> None:
        for number in numbers:
            self._by_number[number] = None
        self._unused += numbers

    @property
    def nbytes(self) -> int:
        """Memory of the lists, without the objects."""
        return sys.getsizeof(self._by_number) + sys.getsizeof(self._unused)
