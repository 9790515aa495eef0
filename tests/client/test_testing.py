"""What authors of engines rely on: the fake engine, the page for them, and what it shows."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

import kvoffd_client
from kvoffd_client import DaemonUnavailable, ErrorCode, GroupTransfer, JobResult, LookupFuture, RequestRefused
from kvoffd_client.health_request import ask_health
from kvoffd_client.testing import FakeEngine, running_daemon
from kvoffd_proto import messages as m
from tests.kit.daemon import DaemonProcess
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.waiting import LONGER_THAN_A_TEST_S, wait_until
from tests.kit.wire import keys

PAGE = Path(kvoffd_client.__file__).parents[1] / "ENGINE.md"


@pytest.mark.parametrize("world_size", [1, 2])
def test_blocks_go_out_and_come_back_elsewhere(shared_daemon: DaemonProcess, world_size: int) -> None:
    with FakeEngine(shared_daemon.directory, world_size=world_size) as engine:
        engine.fill(range(20), seed=1)
        before = engine.checksums(range(20))
        stored = engine.store(keys(*range(20)), range(20))
        assert (stored.ok, stored.bytes, stored.failed_keys) == (True, 20 * 4 * 16384 * world_size, [])
        assert engine.store(keys(0), [0]).bytes == 0, "it is there already"
        engine.fill(range(20), seed=2)
        assert engine.lookup(keys(*range(25))) == 20
        loaded = engine.load(keys(*range(20)), range(100, 120))
        assert loaded.ok
        assert engine.checksums(range(100, 120)) == before
        assert engine.checksums(range(20)) != before


def test_nonsense_is_an_error_of_the_caller(shared_daemon: DaemonProcess) -> None:
    with FakeEngine(shared_daemon.directory, blocks=4) as engine:
        for call in (engine.store, engine.load):
            with pytest.raises(ValueError, match="32 bytes"):
                call([b"short"], [0])
            with pytest.raises(ValueError, match="one block id per key"):
                call(keys(0, 1), [0])
            with pytest.raises(ValueError, match="but not"):
                call(keys(0), [4])
        assert engine.store(keys(0), [0]).ok
        assert engine.lookup(keys(0)) == 1
        for wrong, sentence in ((b"short", "32 bytes"), ("x" * 32, "bytes, not str")):
            with pytest.raises(ValueError, match=sentence):
                engine.lookup([wrong])  # type: ignore[list-item]
        assert engine.load(keys(0), [1]).ok, "the lease of the lookup before is kept"
    with pytest.raises(ValueError, match="at least 1"):
        FakeEngine(shared_daemon.directory, layers=0)


def test_without_a_daemon_the_constructor_says_where_it_looked(tmp_path: Path) -> None:
    began, timeout_s = time.monotonic(), 1.0
    with pytest.raises(DaemonUnavailable, match=str(tmp_path)):
        FakeEngine(tmp_path, connect_timeout_s=timeout_s)
    assert timeout_s <= time.monotonic() - began < 5 * timeout_s


def test_a_refusal_is_raised_without_waiting(fake: FakeDaemon) -> None:
    fake.answers[m.Register] = lambda request, _: m.Error(request.request_id, ErrorCode.BAD_GEOMETRY, "Does not fit.")
    with pytest.raises(RequestRefused, match="Does not fit"):
        FakeEngine(fake.directory, connect_timeout_s=LONGER_THAN_A_TEST_S)


def test_the_lookup_before_one_that_is_interrupted_is_released_too(
    fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that come up are asked for again, under another lease."""

    def answer(request: m.AnyRequest, _: object) -> m.AnyReply:
        assert isinstance(request, m.Lookup)
        return m.LookupReply(request.request_id, request.lease_id, [bytes([m.PENDING])], 0, 600_000)

    def wait(found: LookupFuture, timeout_s: float) -> bool:
        waited.append(found.lease_id)
        if len(waited) > 1:
            raise KeyboardInterrupt
        return wait_for_answer(found, timeout_s)

    waited, wait_for_answer = list[int](), LookupFuture.wait
    fake.answers[m.Lookup] = answer
    monkeypatch.setattr(LookupFuture, "wait", wait)
    with FakeEngine(fake.directory, layers=1, blocks=2) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.lookup(keys(0))
        engine.release()
        wait_until(lambda: {*waited} <= {one.lease_ids[0] for one in fake.requests if isinstance(one, m.Release)})


def test_a_store_that_takes_too_long_is_given_up(fake: FakeDaemon) -> None:
    with FakeEngine(fake.directory, layers=1, blocks=2) as engine:
        fake.hold_jobs = True
        late = engine.store(keys(0), [0], timeout_s=0.1)
        assert (late.ok, late.error, late.failed_keys) == (False, ErrorCode.DEADLINE, keys(0))
        assert engine.lookup(keys(0)) == 1
        assert engine.load(keys(0), [1], timeout_s=0.1).error is not None


def test_the_lines_of_the_page_run(shared_daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    program, whole_engine = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert f"A test runs these {sum(bool(line) for line in program.splitlines())} lines." in PAGE.read_text()
    exec(compile(program, str(PAGE), "exec"), {"directory": shared_daemon.directory})  # noqa: S102 - the page is ours
    assert capsys.readouterr().out == "Job 1 copied 16384 bytes.\n"
    exec(compile(whole_engine, str(PAGE), "exec"), {"directory": shared_daemon.directory})  # noqa: S102 - the page is ours


def test_lists_become_bytes_and_bytes_are_asked_for(shared_daemon: DaemonProcess) -> None:
    keys = [bytes([number]) * 32 for number in range(2)]
    transfer = GroupTransfer.of(keys, [5, 2**31 - 1], first_block=3)
    assert transfer == GroupTransfer(0, b"".join(keys), (5).to_bytes(4, "little") + b"\xff\xff\xff\x7f", 3)
    for ids in ([-(2**31) - 1], [2**31], [1.5]):
        with pytest.raises(ValueError, match="Block ids are whole numbers"):
            GroupTransfer.of(keys, ids)  # type: ignore[arg-type]
    with FakeEngine(shared_daemon.directory) as engine, pytest.raises(ValueError, match=r"GroupTransfer\.of"):
        engine.workers[0].store(1, [GroupTransfer(0, b"".join(keys), [0, 1])])  # type: ignore[arg-type]


def test_a_result_says_how_it_ended() -> None:
    assert JobResult(3, True, 8192, 0.1).sentence == "Job 3 copied 8192 bytes."
    assert JobResult(3, False, 0, 0.1, ErrorCode.NO_SPACE).sentence.startswith("Job 3 failed: The pool has no space")


def test_a_daemon_of_a_test_ends_with_it_and_says_why_it_does_not_start() -> None:
    with running_daemon("12MiB") as directory, FakeEngine(directory, blocks=1) as engine:
        assert ask_health(directory) is not None
        assert engine.store([b"k" * 32], [0]).ok
    assert not os.path.exists(directory)
    with pytest.raises(DaemonUnavailable, match="pool_size"), running_daemon("tiny"):
        raise AssertionError("it started")
