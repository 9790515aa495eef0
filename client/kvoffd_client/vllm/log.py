"""The connector's logger: a child of vLLM's, so that its lines appear where the engine's do."""

from __future__ import annotations

import logging
import time

from vllm.logger import init_logger

logger: logging.Logger = init_logger("vllm.kvoffd")

STARTING_GRACE_S = 5.0


class ConnectionWatch:
    """Logs once when a connection to the daemon comes or goes.

    Args:
        what: which connection, e.g. ``worker 0``.
        directory: where the daemon's sockets are.
    """

    def __init__(self, what: str, directory: str) -> None:
        self._what = what
        self._directory = directory
        self._up: bool | None = None
        self._quiet_until = time.monotonic() + STARTING_GRACE_S

    def observe(self, up: bool, problem: str | None) -> None:
        """Take note of the state; ``problem`` says why it is down."""
        if up == self._up or (self._up is None and not up and time.monotonic() < self._quiet_until):
            return
        if up:
            logger.info("kvoffd: the %s is connected to the daemon in %s.", self._what, self._directory)
        else:
            logger.warning(
                "kvoffd: the %s is not connected to the daemon in %s and goes on without it. %s",
                self._what,
                self._directory,
                problem or "",
            )
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
