"""When a request's lookup is sent and awaited, so that the answer is there when vLLM's scheduler asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import OffloadKey

from kvoffd_client.vllm.log import logger
from kvoffd_client.vllm.request_lookups import LookupSettings, RequestLookups

if TYPE_CHECKING:
    from kvoffd_client.vllm.vllm_types import EngineCore, EngineCoreRequest, Request

LOOKUP_WAIT_S = 0.0005
"""How long a lookup's answer is awaited inside vLLM's scheduler. An empty step, after which vLLM sleeps for a
millisecond, costs several times as much; and while the scheduler waits the daemon may have its core."""
WAIT_PAUSE_S = 1.0
"""After an answer was awaited in vain none is awaited for so long: a daemon that hangs costs 0.5 ms a second."""
MAX_EARLY_LOOKUPS = 256
EARLY_LOOKUP_AGE_S = 60.0
"""A request that was received so long ago and did not come to the scheduler will not come."""


class EarlyLookups:
    """Lookups of requests that vLLM has received and not yet given to its scheduler.

    vLLM receives requests in a thread of its own while a step runs. ``ask`` is called there; everything else in the
    scheduler's thread, after ``ask`` has returned for the request in question.
    """

    def __init__(self, settings: LookupSettings) -> None:
        self._settings = settings
        self._found: dict[str, tuple[int, float, RequestLookups]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def ask(self, request_id: str, groups: Sequence[Sequence[OffloadKey]], generation: int) -> None:
        """Look a request's keys up, unless too many requests wait. ``generation`` is the namespace's."""
        now = self._settings.clock()
        for oldest in list(self._found)[:1]:
            if now - self._found.get(oldest, (0, now))[1] > EARLY_LOOKUP_AGE_S:
                self._forget(oldest)
        if len(self._found) >= MAX_EARLY_LOOKUPS or request_id in self._found:
            return
        lookups = RequestLookups(self._settings)
        if lookups.refresh(groups):
            self._found[request_id] = generation, now, lookups

    def take(self, request_id: str, generation: int) -> RequestLookups | None:
        """Return what was asked for a request; None for nothing, or where the weights may have changed since."""
        found = self._found.pop(request_id, None)
        if found is None:
            return None
        asked_in, _, lookups = found
        if asked_in == generation:
            return lookups
        lookups.release()
        return None

    def forget_all(self) -> None:
        """End all leases."""
        for request_id in list(self._found):
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        if found := self._found.pop(request_id, None):
            found[2].release()


class LookupWait:
    """Decides whether to wait for a lookup's answer inside vLLM's scheduler, which otherwise never waits.

    Only where the engine could do nothing else but make an empty step. A wait in vain ends all waiting for
    WAIT_PAUSE_S.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._none_before = float("-inf")

    def due(self, lookups: RequestLookups, others: Iterable[RequestLookups | None]) -> float:
        """Return for how many seconds to wait; 0.0 for not at all.

        ``others`` are the lookups of all other requests that vLLM could run as far as it knows; None for one that has
        none. It can run those whose lookup is answered, or that never had one.
        """
        if not lookups.unanswered or self._clock() < self._none_before:
            return 0.0
        return LOOKUP_WAIT_S if all(other is not None and other.unanswered for other in others) else 0.0

    def in_vain(self) -> None:
        """Take note that no answer came."""
        self._none_before = self._clock() + WAIT_PAUSE_S


def tell_of_received_requests(engine_core: type[EngineCore], told: str) -> bool:
    """Have vLLM's ``engine_core`` class tell its connector of each request that it has received and hashed.

    The connector's method ``told``, where it has one, is called with the request, in the thread that receives requests.
    Repeatable. False where this vLLM prepares requests in another way.
    """
    prepare = getattr(engine_core, "preprocess_add_request", None)
    if prepare is None:
        return False
    if hasattr(prepare, "__wrapped__"):
        return True

    @functools.wraps(prepare)
    def preprocess_add_request(self: EngineCore, request: EngineCoreRequest) -> tuple[Request, int]:
        prepared = prepare(self, request)
        try:
            connector = self.scheduler.get_kv_connector()
            for each in getattr(connector, "_connectors", None) or [connector]:  # MultiConnector's children
                if tell := getattr(each, told, None):
                    tell(prepared[0])
        except Exception:
            logger.exception("kvoffd: a request was not looked up early.")
        return prepared

    engine_core.preprocess_add_request = preprocess_add_request
    return True
