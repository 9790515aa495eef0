"""What the connector's tests share."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest

# vLLM, torch and their friends warn while they are imported; that is not ours to fix, so it happens here, once.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.core.sched.scheduler
    import vllm.v1.worker.cpu_worker  # noqa: F401


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the connector logs."""
    from kvoffd_client.vllm.log import logger

    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    monkeypatch.setattr(logger, "handlers", [Collect()])
    level = logger.level
    logger.setLevel(logging.INFO)  # which also forgets what it has found to be below another level
    yield lines
    logger.setLevel(level)
