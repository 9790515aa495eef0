"""A stub driver for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.stub_cuda import StubCuda, fresh_stub


@pytest.fixture
def stub() -> Iterator[StubCuda]:
    """A driver of this test's own."""
    stub = fresh_stub()
    yield stub
    stub.release()
