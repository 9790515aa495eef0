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

    def collect(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return False

    monkeypatch.setattr(logger, "handlers", [Collect()])  # for what the client logs
    # vLLM sets its logging up with the first configuration of an engine, and takes handlers away then.
    monkeypatch.setattr(logger, "filters", [collect])
    level = logger.level
    logger.setLevel(logging.INFO)  # which also forgets what it has found to be below another level
    yield lines
    logger.setLevel(level)
