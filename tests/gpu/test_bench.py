"""The bench of copies of a GPU, in miniature."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from kvoffd_client import AdminClient
from kvoffd_client.cuda_export import LIBRARY_VARIABLE
from tests.bench.daemon import STREAM_JOBS, copy_bench
from tests.bench.daemon.__main__ import main, run_bench
from tests.bench.daemon.copy_bench import bench_copy_gpu
from tests.bench.daemon.results import BenchFailed
from tests.kit.gpu_machine import Machine
from tests.kit.stub_cuda import Ranges
from tests.kit.waiting import wait_until

KIB, MIB = 2**10, 2**20
MakeMachine = Callable[..., Machine]
small = partial(bench_copy_gpu, piece_sizes=(16 * KIB, 64 * KIB), job_bytes=4 * MIB, rounds=2, slice_s=0.1)


def quiet(_: str) -> None: ...


@pytest.fixture(autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has benches take the stub where the machine's daemon does."""
    if "machine" in request.fixturenames and (machine := request.getfixturevalue("machine")).is_stub:
        monkeypatch.setenv(LIBRARY_VARIABLE, machine.library)


@pytest.fixture
def make(stub_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch) -> MakeMachine:
    """A stub machine, for the bench too."""

    def made(stub: dict[str, str]) -> Machine:
        machine = stub_machine(stub)
        monkeypatch.setenv(LIBRARY_VARIABLE, machine.library)
        return machine

    return made


def test_every_case_is_reported_and_nothing_is_left_behind(machine: Machine) -> None:
    report = small(machine.daemon.directory, quiet, compute=True)
    found = msgspec.to_builtins(report.to_object())
    assert len(found["results"]) == 2 * (5 + 2) == len({result["case"] for result in found["results"]})
    for result in found["results"]:
        assert result["value"] > 0
        assert result["floor"] > 0
    copied = [result for result in found["results"] if result["cpu_seconds"] is not None]
    assert len(copied) == 2 * 5
    assert {result["cpu_per"] for result in copied} == {"GB"}
    assert [result["unit"] for result in found["results"][10:]] == ["steps/s", "GB/s"] * 2
    assert [curve.is_floor for curve in report.curves] == [False] * 3 + [True] * 3
    assert found["gpu"]["unlockable_bytes"] == 0
    assert found["gpu"]["name"]
    if machine.is_stub:
        assert found["gpu"]["daemon_bytes"] == MIB, "what the stub's memory shrinks by from call to call"
        assert found["gpu"]["driver"].endswith("CUDA 12.8")
        driver = ctypes.CDLL(machine.library)
        assert [driver.stub_ranges(int(kind)) for kind in (Ranges.DEVICE, Ranges.HOST)] == [0, 0]
        assert driver.stub_contexts(0) == 0
    else:
        assert found["gpu"]["daemon_bytes"] > MIB
    with AdminClient(machine.daemon.directory) as admin:
        wait_until(lambda: admin.stats().pool.pinned_for_gpu_bytes == 0)
        stats = admin.stats()
    assert stats.pool.of("free") == stats.pool.size_bytes
    assert stats.errors == {}


def test_the_bench_copies_what_it_says_on_the_gpu(make: MakeMachine) -> None:
    machine = make({})
    small(machine.daemon.directory, quiet, piece_sizes=(64 * KIB,))
    batches = [line.split() for line in machine.driver_log() if line.startswith("batch ") and " of " in line]
    jobs = STREAM_JOBS + STREAM_JOBS + 2 * (STREAM_JOBS // 2) + 1 + 1
    assert sum(int(words[3]) for words in batches) == (2 + 1) * jobs * 4 * MIB
    # More where a piece is cut in two, as where the pool's address is no multiple of 8 MiB.
    assert all(int(words[1]) * 64 * KIB >= int(words[3]) for words in batches), "neighbours were copied as one"
    assert machine.driver_log().count(f"copy {4 * MIB}") == (2 + 1) * (1 + 1 + 2 + 1 + 1), "the floor"


def test_a_second_bench_finds_the_gpu_let_go_and_measures_the_daemons_memory_again(machine: Machine) -> None:
    for _ in range(2):
        report = small(machine.daemon.directory, quiet, piece_sizes=(64 * KIB,))
        assert report.gpu.daemon_bytes is not None


def test_where_the_daemon_has_a_gpu_in_use_its_memory_is_not_measured(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_bench, "RELEASE_WAIT_S", 0.2)
    with machine.exporter("ordinary") as worker:
        worker.wait_ready()
        with AdminClient(machine.daemon.directory) as admin:
            wait_until(lambda: admin.stats().pool.pinned_for_gpu_bytes > 0)
        run_bench(small, machine.daemon.directory, as_json=False)
    out = capsys.readouterr().out
    assert "GPU: " in out
    assert "not measured, since the daemon had a GPU in use already" in out


def test_a_pool_that_cannot_be_locked_is_told(make: MakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    machine = make({"STUB_FAIL": "cuMemHostRegister_v2:0:2"})
    run_bench(small, machine.daemon.directory, as_json=False)
    assert "not page-locked, so slow: 64.0 MiB of the pool" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("failure", "compute", "reason"),
    [
        ("cuInit:1:100", False, r"there is no GPU to measure; see nvidia-smi\. cuInit failed"),
        ("cuMemHostAlloc:1:2", False, r"needs 8\.00 MiB of pinned memory .* cuMemHostAlloc failed"),
        ("cuMemAlloc_v2:4:2", False, r"gives the bench no 16\.0 MiB of its memory; .*CUDA_ERROR_OUT_OF_MEMORY \(2\)\."),
        ("cuModuleLoadData:1:218", True, r"ended before its time"),
    ],
)
def test_what_the_driver_refuses_ends_the_bench_with_a_sentence(
    make: MakeMachine, failure: str, compute: bool, reason: str
) -> None:
    machine = make({"STUB_FAIL": failure})
    with pytest.raises(BenchFailed, match=reason):
        small(machine.daemon.directory, quiet, compute=compute)


@pytest.mark.parametrize(
    ("library", "gpu", "reason"),
    [("", "7", "There is no GPU 7: CUDA finds 1 here"), ("/nowhere/libcuda.so", "0", "install a driver")],
)
def test_without_that_gpu_or_any_driver_one_sentence_says_so(
    library: str,
    gpu: str,
    reason: str,
    make: MakeMachine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = make({})
    if library:
        monkeypatch.setenv(LIBRARY_VARIABLE, library)
    command = ["copy", "--memory", "cuda", "--gpu", gpu, "--directory", str(machine.daemon.directory)]
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert reason in err
    assert err.count("\n") == 1
