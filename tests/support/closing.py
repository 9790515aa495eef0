"""Context managers of the tests' helpers: what is started or opened is closed in any case."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """An object that is open from its construction and is closed at the end of a ``with``."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Starting(Closing):
    """An object that is started at the begin of a ``with``, and closed when that fails or at its end."""

    @abstractmethod
    def start(self) -> Self: ...

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise
