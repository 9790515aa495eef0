"""The connector's logger: a child of vLLM's, so that its lines appear where the engine's do."""

from __future__ import annotations

import logging

from vllm.logger import init_logger

logger: logging.Logger = init_logger("vllm.kvoffd")

# The client says why it is not connected, once per outage and reason; vLLM gives handlers to its own loggers only.
_client_logger = logging.getLogger("kvoffd_client")
if not _client_logger.handlers:
    _client_logger.parent = logger


class ConnectionWatch:
    """Logs when a connection to the daemon is there (again). That it is not, the client logs itself, with the reason.

    Args:
        what: which connection, e.g. ``worker 0``.
        directory: where the daemon's sockets are.
    """

    def __init__(self, what: str, directory: str) -> None:
        self._what = what
        self._directory = directory
        self._up = False

    def observe(self, up: bool) -> None:
        """Take note of the state."""
        if up and not self._up:
            logger.info("kvoffd: the %s is connected to the daemon in %s.", self._what, self._directory)
        self._up = up


class RefusalFilter(logging.Filter):
    """Drops vLLM's warning for each step in which a store was put off.

    Putting stores off while the daemon is busy is this connector's normal way (they are offered again in the next
    step, and counted); a line per request and step would bury the engine's log.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """False for that one warning."""
        return not str(record.msg).endswith("cannot store chunks")

    @classmethod
    def install(cls, logger_name: str) -> None:
        """Attach one to a logger that has none yet."""
        target = logging.getLogger(logger_name)
        if not any(isinstance(item, cls) for item in target.filters):
            target.addFilter(cls())
