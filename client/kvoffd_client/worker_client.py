"""The worker's client: registration, stores, loads, fences."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence

from kvoffd_client.client_options import DEFAULT_OPTIONS, ClientOptions, Identity
from kvoffd_client.connection import SessionClient
from kvoffd_client.namespace_spec import NamespaceSpec
from kvoffd_client.shared_memory import Registration
from kvoffd_client.worker_session import WorkerSession
from kvoffd_proto.messages import BLOCK_ID_BYTES, GroupTransfer, JobResult, Load, Role, Store

log = logging.getLogger("kvoffd_client")

FENCE_PATIENCE_S = 0.05
"""How long a fence waits for jobs to end by themselves before it cancels those that have not started."""
LOAD_WAIT_S = 10.0
"""How often a fence says that it still waits for loads."""


class WorkerClient(SessionClient[WorkerSession]):
    """Moves one worker's blocks to and from one daemon, which it registers the worker's KV memory with.

    Every job gets exactly one result, from the daemon or, when that is gone, from the client itself.

    Args:
        registration: the worker's KV memory; must outlive this client. The other arguments are as SchedulerClient's.

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
        if not 0 <= registration.rank < namespace.world_size:
            raise ValueError(f"Rank {registration.rank} is outside the namespace's world of {namespace.world_size}.")
        if len(registration.groups) != len(namespace.groups):
            raise ValueError(
                f"The registration has {len(registration.groups)} groups and the namespace {len(namespace.groups)}."
            )
        if registration.blocks_per_key < 1 or not registration.memories or not registration.tensors:
            raise ValueError("A registration needs memory, tensors and at least one block per key.")
        self._registration = registration
        self._namespace = namespace
        identity = Identity(os.fspath(directory), Role.WORKER, name, software, namespace, registration)
        super().__init__(identity, options, WorkerSession)

    @property
    def ready(self) -> bool:
        """The memory is registered and the daemon answers: jobs are sent."""
        return self._session.usable and self._session.registration_wanted

    @property
    def unfinished(self) -> int:
        """Jobs without a result (those waiting in take_results() have one)."""
        return len(self._session.jobs)

    def store(self, job_id: int, groups: Sequence[GroupTransfer]) -> None:
        """Copy engine blocks into the pool. When not ready, a failed result (SESSION_ENDED) is queued at once.

        Raises:
            ValueError: a job of this id is unfinished, or lengths in ``groups`` do not fit.
            TypeError: keys or block ids in ``groups`` are no bytes.
        """
        self.submit([Store(job_id, list(groups))])

    def load(self, job_id: int, lease_id: int, groups: Sequence[GroupTransfer], keep_lease: bool = False) -> None:
        """Copy blocks that a scheduler's lookup leased into engine blocks. Otherwise as ``store``.

        The lease ends with a good load of every rank of the namespace. With ``keep_lease``, for workers that load the
        shards of one rank, the scheduler releases it.
        """
        self.submit([], [Load(job_id, lease_id, list(groups), keep_lease)])

    def submit(self, stores: Sequence[Store], loads: Sequence[Load] = ()) -> None:
        """Start the stores and loads of one step: they go out in one message. See ``store`` and ``load``."""
        for some in (stores, loads):
            for job in some:
                self._check(job.groups)
        self._connection.call(self._session.submit, stores, loads, time.monotonic())

    def take_results(self) -> list[JobResult]:
        """Results since the last call, those included that have arrived and were not read yet."""
        session = self._session
        if not session.jobs and not session.results:  # vLLM asks in every step
            return []
        self._connection.poll()
        with self._connection.lock:
            taken, session.results = session.results, []
        return taken

    def wait_results(self, timeout_s: float) -> list[JobResult]:
        """As take_results(), but wait up to ``timeout_s`` seconds for the first one."""
        self._connection.wait(lambda: bool(self._session.results), timeout_s)
        return self.take_results()

    def fence(self, job_ids: Iterable[int], timeout_s: float, unsent: int = 0) -> None:
        """Wait until the daemon touches the blocks of these jobs no more; then each of them has a result.

        What has not started after FENCE_PATIENCE_S is cancelled. Stores that still run after ``timeout_s`` seconds are
        abandoned: the lifeline is closed, so that the daemon will not commit them, they fail here, and the client
        connects again. Loads are waited for however long it takes, since a copy may still land: a completion or the
        daemon's death ends that. Unknown ids are ignored. Results stay for take_results(). ``unsent`` is how many
        stores the caller has dropped at this fence before it submitted them, for the daemon's count.
        """
        connection, session = self._connection, self._session
        wanted = set(job_ids)
        settled = connection.wait(lambda: not session.has_any(wanted), min(FENCE_PATIENCE_S, timeout_s))
        if settled and not unsent:
            return
        connection.call(session.cancel, wanted, unsent)
        if connection.wait(lambda: not session.has_any(wanted), timeout_s):
            return
        with connection.lock:
            if session.has_any(wanted, loads=False):
                session.abandon_stores(time.monotonic())
                connection.flush()
        while not connection.wait(lambda: not session.has_any(wanted), LOAD_WAIT_S):
            log.warning("Still waiting for loads: the daemon neither finishes them nor ends.")

    def unregister(self, timeout_s: float) -> bool:
        """Give the registration up for good and wait until the daemon touches the memory no more.

        False when the daemon did not confirm that in time; then the session is ended, and only the daemon's
        death or its own clean-up lets go of the memory. The client takes no jobs afterwards.
        """
        return self._connection.outcome_of(self._session.unregister, timeout_s) == [True]

    def close(self) -> None:
        """End the session and the thread, in less than a second. Unfinished jobs fail. Repeatable."""
        super().close()
        self._registration.close_exports()

    def _check(self, groups: Sequence[GroupTransfer]) -> None:
        group_count = len(self._namespace.groups)
        for item in groups:
            if not isinstance(item.keys, bytes) or not isinstance(item.block_ids, bytes):
                raise TypeError("A GroupTransfer has bytes; GroupTransfer.of(keys, block_ids) makes it from lists.")
            if not 0 <= item.group < group_count:
                raise ValueError(f"The namespace has {group_count} groups; {item.group} is none of them.")
            self._namespace.count_keys(item.keys)
            if len(item.block_ids) % BLOCK_ID_BYTES:
                raise ValueError(f"{len(item.block_ids)} bytes are not a whole number of int32 block ids.")
