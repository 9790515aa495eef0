"""The fixtures of the hostile suite: every attack runs beside an honest engine.

``target`` is a running daemon of limited means, shared by a module's tests, and asserts after the test what
``Target.under_attack`` says. A module that needs other settings overrides ``flags`` or ``pool_size``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.target import Target
from tests.kit.steal import TooSlow


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.timing(only=TooSlow))


@pytest.fixture(scope="module")
def flags() -> dict[str, str]:
    """Settings of the module's daemon besides ``tests.hostile.target.FLAGS``."""
    return {}


@pytest.fixture(scope="module")
def pool_size() -> str:
    return "16MiB"


@pytest.fixture(scope="module")
def targets(flags: dict[str, str], pool_size: str) -> Iterator[list[Target]]:
    running: list[Target] = []
    yield running
    for one in running:
        one.close()


@pytest.fixture
def target(targets: list[Target], flags: dict[str, str], pool_size: str) -> Iterator[Target]:
    """The daemon, while the test attacks it; a new one where an earlier test has left it harmed."""
    if targets and not targets[0].whole:
        targets.pop().close()
    if not targets:
        targets.append(Target(pool_size, flags))
    with targets[0].under_attack():
        yield targets[0]
