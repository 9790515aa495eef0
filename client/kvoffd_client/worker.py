"""The worker's client: registration, stores, loads, fences."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.options import ClientOptions
from kvoffd_client.registration import Registration
from kvoffd_proto.messages import GroupTransfer, JobResult

DEFAULT_OPTIONS = ClientOptions()

__all__ = ["Registration", "WorkerClient"]


class WorkerClient:
    """Moves one worker's blocks to and from one daemon. No call blocks unless it says wait. Thread-safe.

    It connects and registers in the background, and again whenever the daemon goes. Every job gets exactly one
    result, from the daemon or, when that is gone, from the client itself.

    Args:
        directory: where the daemon's sockets are.
        namespace: opened (or joined) at every connection.
        registration: the worker's KV memory; must outlive this client.
        name: shown to operators.
        software: client and engine versions, shown to operators.
        options: timeouts and bounds.

    Raises:
        ValueError: the registration does not fit the namespace.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        namespace: NamespaceSpec,
        registration: Registration,
        *,
        name: str = "worker",
        software: str = "",
        options: ClientOptions = DEFAULT_OPTIONS,
    ) -> None:
        raise NotImplementedError

    @property
    def ready(self) -> bool:
        """The memory is registered and the daemon answers: jobs are sent."""
        raise NotImplementedError

    @property
    def credit_bytes(self) -> int:
        """Bytes of stores the session may have outstanding, running ones included; 0 when not ready."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The daemon's life this client is (or was last) connected to; 0 before the first."""
        raise NotImplementedError

    @property
    def problem(self) -> str | None:
        """A sentence that says why the client is not ready; None while it is."""
        raise NotImplementedError

    @property
    def shard_bytes(self) -> list[int]:
        """Per group, bytes of this rank's shard of a block, as the daemon told; empty before the first registration."""
        raise NotImplementedError

    @property
    def unfinished(self) -> int:
        """Jobs without a result (those waiting in take_results() have one)."""
        raise NotImplementedError

    def store(self, job_id: int, groups: Sequence[GroupTransfer]) -> None:
        """Copy engine blocks into the pool. When not ready, a failed result (SESSION_ENDED) is queued at once.

        Raises:
            ValueError: a job of this id is unfinished, or lengths in ``groups`` do not fit.
        """
        raise NotImplementedError

    def load(self, job_id: int, lease_id: int, groups: Sequence[GroupTransfer]) -> None:
        """Copy blocks that a scheduler's lookup leased into engine blocks. Otherwise as ``store``."""
        raise NotImplementedError

    def take_results(self) -> list[JobResult]:
        """Results that came since the last call."""
        raise NotImplementedError

    def wait_results(self, timeout_s: float) -> list[JobResult]:
        """As take_results(), but wait up to ``timeout_s`` seconds for the first one."""
        raise NotImplementedError

    def fence(self, job_ids: Iterable[int], timeout_s: float) -> None:
        """Wait until the daemon touches the blocks of these jobs no more; then each of them has a result.

        What has not started is cancelled. Stores that still run after ``timeout_s`` seconds are abandoned: the lifeline
        is closed, so that the daemon will not commit them, they fail here, and the client connects again. Loads are
        waited for however long it takes, since a copy may still land: a completion or the daemon's death ends that.
        Unknown ids are ignored. Results stay for take_results().
        """
        raise NotImplementedError

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until ready; False when it is not after ``timeout_s`` seconds."""
        raise NotImplementedError

    def unregister(self, timeout_s: float) -> bool:
        """Give the registration up for good and wait until the daemon touches the memory no more.

        False when the daemon did not confirm that in time; then the session is ended, and only the daemon's
        death or its own clean-up lets go of the memory. The client takes no jobs afterwards.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the session and the thread, in less than a second. Unfinished jobs fail. Repeatable."""
        raise NotImplementedError

    def __enter__(self) -> WorkerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
