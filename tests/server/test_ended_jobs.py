"""What becomes of a job whose end fails inside the daemon."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffd.transfer.plan import Outcome
from kvoffd_client.jobs import GroupTransfer, Job, submit_of
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import Role
from tests.fuzz.choices import Choices
from tests.fuzz.requests import KEY_BYTES, NAMES, NAMESPACES, WORLD
from tests.fuzz.service import ServiceHarness


def test_a_store_whose_end_fails_has_a_result_and_holds_its_session_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = ServiceHarness(Choices(b""))
    service = harness.service
    try:
        for rank in range(WORLD[NAMESPACES[0]]):
            harness.admit(Role.WORKER, NAMESPACES[0], rank=rank)
        session = next(iter(service.sessions))
        stores = [Job(number, [GroupTransfer.of([bytes([number]) * KEY_BYTES], [number])]) for number in (1, 2)]
        harness.handle(session.route, submit_of(9, NAMES[0], KEY_BYTES, stores))
        assert service.jobs.unfinished == 2

        def commit_store(*_: Any) -> int:
            raise AssertionError("a bug")

        monkeypatch.setattr(service.cache, "commit_store", commit_store)
        harness.engine.end_first(Outcome.DONE)
        harness.take_done()
        (batch,) = session.completions.replay()
        assert [(one.job_id, one.ok, one.error) for one in batch.results] == [
            (1, False, ErrorCode.INTERNAL),
            (2, False, ErrorCode.INTERNAL),
        ]
        assert (service.jobs.unfinished, session.in_flight, session.store_bytes) == (0, 0, 0)
        ended: list[bool] = []
        service.sessions.end(session, lambda: ended.append(True))
        assert ended == [True], "nothing touches its memory any more"
    finally:
        for session in service.sessions:
            for fd in session.segments.values():
                session.lifeline.close_descriptor(fd)
        harness.pool.close()
