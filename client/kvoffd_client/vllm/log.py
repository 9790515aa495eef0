"""The connector's logger, a child of vLLM's, so that its lines appear in the engine's log."""

from __future__ import annotations

import logging

from vllm.logger import init_logger

logger: logging.Logger = init_logger("vllm.kvoffd")

# The client logs connections and, once per outage, the reason; but only vLLM's loggers have handlers.
_client_logger = logging.getLogger("kvoffd_client")
if not _client_logger.handlers:
    _client_logger.parent = logger


def is_no_refusal(record: logging.LogRecord) -> bool:
    """Return whether a record is not vLLM's warning about a deferred store.

    This connector normally defers stores while the daemon is busy. They are offered again in the next step, and
    counted; a line per request and step would flood the engine's log.
    """
    return not str(record.msg).endswith("cannot store chunks")
