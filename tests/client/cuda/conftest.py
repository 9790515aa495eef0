"""A stub driver for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.stub_cuda import StubCuda, fresh_stub


@pytest.fixture
def stub() -> Iterator[StubCuda]:
    """A driver of this test's own, its context current in the test's thread."""
    stub = fresh_stub()
    stub.start()
    yield stub
    stub.release()
