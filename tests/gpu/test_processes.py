"""An engine's process, a daemon's process, GPU memory between them: bytes, deaths, memory released."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvoffd_client import AdminClient
from tests.kit.gpu_machine import Machine, real_gpus
from tests.kit.waiting import wait_until

KINDS = ["ordinary", "chunks"]


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(32, "big") for number in numbers)


def mapped_bytes(admin: AdminClient) -> int:
    return sum(session.registered_bytes for session in admin.sessions().sessions)


@pytest.mark.parametrize("kind", [*KINDS, "apart"])
@pytest.mark.parametrize(
    "page_bytes", [16384 - 8, *(pytest.param(size, marks=pytest.mark.nightly) for size in (512, 300 * 1024))]
)
def test_blocks_come_back_byte_for_byte(machine: Machine, kind: str, page_bytes: int) -> None:
    layers = 40 if page_bytes < 16384 else 3  # the former are rows to the pool too
    with machine.exporter(kind, layers=layers, page_bytes=page_bytes) as worker, machine.scheduler() as scheduler:
        before = worker.fill(1)
        stored = worker.store(keys(1, 2, 3, 4), 6, 1, 2, 3)
        assert (stored["ok"], stored["bytes"]) == (True, 4 * layers * page_bytes)
        other = worker.fill(2)
        loaded = worker.load(scheduler, keys(1, 2, 3, 4), 0, 5, 4, 7)
        assert (loaded["ok"], loaded["bytes"]) == (True, 4 * layers * page_bytes)
        one = worker.load(scheduler, keys(2), 6)
        assert (one["ok"], one["bytes"]) == (True, layers * page_bytes)
        after = worker.pages()
        assert [after[block] for block in (0, 5, 4, 7, 6)] == [before[block] for block in (6, 1, 2, 3, 1)]
        assert [after[block] for block in (1, 2, 3)] == [other[block] for block in (1, 2, 3)], "others were written"
    with AdminClient(machine.daemon.directory) as admin:
        stats = admin.stats()
    assert (stats.store.refused_batches, stats.load.refused_batches) == (0, 0)


@pytest.mark.parametrize("kind", [*KINDS, "on another GPU"])
def test_blocks_of_one_engine_are_loaded_by_another(machine: Machine, kind: str) -> None:
    elsewhere = kind not in KINDS
    if elsewhere and not machine.is_stub and real_gpus() < 2:
        pytest.skip("one GPU here")
    second = {"gpu": 1} if elsewhere else {"kind": kind}
    with machine.exporter(gpu=0) as one, machine.exporter(**second) as other, machine.scheduler() as scheduler:
        before = one.fill(3)
        assert one.store(keys(7), 2)["ok"]
        assert other.load(scheduler, keys(7), 5)["ok"]
        assert other.pages()[5] == before[2]
        if elsewhere and machine.is_stub:
            assert {"context of 0 made", "context of 1 made"} <= set(machine.driver_log())


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_engines_memory_is_let_go_at_once_and_its_blocks_stay(machine: Machine, kind: str) -> None:
    with machine.scheduler() as scheduler, AdminClient(machine.daemon.directory) as admin:
        with machine.exporter(kind) as worker:
            before = worker.fill(4)
            assert worker.store(keys(1), 0)["ok"]
            assert mapped_bytes(admin) > 0
            worker.kill()
            wait_until(lambda: mapped_bytes(admin) == 0, 5)
            if machine.is_stub:
                wait_until(lambda: "context of 0 gone" in machine.driver_log(), 5)
                released = "ipc close" if kind == "ordinary" else "reservation freed"
                assert released in machine.driver_log()
        with machine.exporter(kind) as again:
            assert again.load(scheduler, keys(1), 3)["ok"]
            assert again.pages()[3] == before[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_daemon_costs_the_engine_its_blocks_and_no_more(machine: Machine, kind: str) -> None:
    with machine.exporter(kind) as worker:
        epoch = worker.wait_ready()["epoch"]
        pages = worker.fill(5)
        assert worker.store(keys(1), 0)["ok"]
        machine.daemon.kill()
        failed = worker.store(keys(2), 1)
        assert (failed["ok"], failed["error"]) == (False, "SESSION_ENDED")
        assert worker.pages() == pages
        machine.daemon.start()
        assert worker.wait_ready()["epoch"] != epoch
        assert worker.store(keys(3), 1)["bytes"] > 0


def test_after_unregistering_nothing_is_mapped(machine: Machine) -> None:
    with machine.exporter("chunks") as worker, AdminClient(machine.daemon.directory) as admin:
        assert mapped_bytes(admin) > 0
        assert worker.ask("unregister")["ok"]
        assert mapped_bytes(admin) == 0
        if machine.is_stub:
            assert "reservation freed" in machine.driver_log()


def test_a_daemon_without_gpu_engines_has_made_no_context(machine: Machine) -> None:
    with machine.scheduler():
        if machine.is_stub:
            assert machine.driver_log() == []
        assert machine.daemon.stop() == 0


def test_the_pool_is_page_locked_while_an_engine_is_on_a_gpu(machine: Machine) -> None:
    with AdminClient(machine.daemon.directory) as admin:
        assert admin.stats().pool.pinned_for_gpu_bytes == 0
        with machine.exporter():
            wait_until(lambda: admin.stats().pool.pinned_for_gpu_bytes == admin.stats().pool.size_bytes)
        wait_until(lambda: admin.stats().pool.pinned_for_gpu_bytes == 0)


def test_what_the_driver_does_not_lock_is_reported(stub_machine: Callable[..., Machine]) -> None:
    machine = stub_machine({"STUB_FAIL": "cuMemHostRegister_v2:0:2"})
    with machine.exporter(), AdminClient(machine.daemon.directory) as admin:
        wait_until(lambda: admin.stats().pool.unpinnable_bytes == admin.stats().pool.size_bytes)
        assert admin.stats().pool.pinned_for_gpu_bytes == 0


def test_a_refused_batch_is_counted(stub_machine: Callable[..., Machine]) -> None:
    machine = stub_machine({"STUB_FAIL": "cuMemcpyBatchAsync:1:1"})
    with machine.exporter() as worker, AdminClient(machine.daemon.directory) as admin:
        wait_until(lambda: admin.stats().pool.pinned_for_gpu_bytes == admin.stats().pool.size_bytes)
        assert worker.store(keys(1, 2), 0, 1)["ok"]
        assert admin.stats().store.refused_batches == 1
    assert machine.driver_log().count("cuMemcpyBatchAsync fails") == 1


def test_a_daemon_that_is_stopped_lets_the_gpu_go(machine: Machine) -> None:
    with machine.exporter():
        assert machine.daemon.stop() == 0
        if machine.is_stub:
            assert {"ipc close", "context of 0 gone"} <= set(machine.driver_log())
        assert "Traceback" not in machine.daemon.log


def test_the_pool_is_pinned_from_the_start_and_lingers(stub_machine: Callable[..., Machine]) -> None:
    machine = stub_machine({}, pin_pool="start", limits={"pin_linger_s": 600})
    with AdminClient(machine.daemon.directory) as admin:

        def pinned() -> bool:
            return admin.stats().pool.pinned_for_gpu_bytes == admin.stats().pool.size_bytes

        wait_until(pinned)
        wait_until(lambda: admin.stats().pool.pinning_gpu_bytes == 1 << 20)
        machine.exporter().close()
        wait_until(lambda: "ipc close" in machine.driver_log())
        assert pinned()
        assert sum(line.startswith("context of 0 ") for line in machine.driver_log()) == 2, (
            "the exporter's, the daemon's"
        )
    assert machine.daemon.stop() == 0
    assert "context of 0 gone" in machine.driver_log()


def test_a_driver_that_does_not_start_leaves_the_pool_for_later(stub_machine: Callable[..., Machine]) -> None:
    machine = stub_machine({"STUB_FAIL": "cuInit:0:100"}, pin_pool="start")
    machine.daemon.wait_log("The pool is not pinned until an engine on a GPU registers: cuInit failed")
    assert machine.daemon.stop() == 0
