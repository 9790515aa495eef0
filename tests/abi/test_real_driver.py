"""Debian's libcuda, which finds no GPU here: what it exports, names and refuses is what we and the double say."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from kvoffd_client import AdminClient
from kvoffd_client.testing import FakeEngine
from kvoffd_proto import cuda
from kvoffd_proto.cuda import Cuda
from tests.kit.cuda_abi import compiler
from tests.kit.cuda_calls import TEST_PROTOTYPES, load
from tests.kit.cuda_files import include_directory, real_driver
from tests.kit.exporter import Exporter
from tests.kit.gpu_machine import Machine
from tests.kit.stub_cuda import fresh_stub
from tests.kit.waiting import wait_until


@pytest.fixture(scope="module")
def library() -> str:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("there is a GPU here")
    return str(real_driver())


def test_it_exports_what_we_call_and_its_header_declares(library: str) -> None:
    loaded = ctypes.CDLL(library)
    assert [name for name in {**cuda.PROTOTYPES, **TEST_PROTOTYPES} if not hasattr(loaded, name)] == []
    header = include_directory("12.0") / "cuda.h"
    plain = subprocess.run([compiler(), "-E", "-P", str(header)], check=True, capture_output=True, text=True).stdout
    declared = set(re.findall(r"\bCUresult (cu\w+)\(", plain))
    assert len(declared) > 350
    assert [name for name in declared if not hasattr(loaded, name)] == []
    assert not hasattr(loaded, "cuMemMap_v2"), "a symbol that is not there is seen"


def test_it_names_errors_as_we_do(library: str) -> None:
    loaded, text = load(library), ctypes.c_char_p()
    ours = {value: name for name, value in vars(cuda).items() if name.startswith("ERROR_")}
    for value, name in ours.items():
        assert loaded.cuGetErrorName(value, ctypes.byref(text)) == 0
        assert text.value == f"CUDA_{name}".encode()


def test_a_form_of_a_call_is_given_by_version_as_the_double_does(library: str) -> None:
    def ask(path: str, symbol: str, version: int) -> tuple[int, bool, int]:
        function, found = ctypes.c_void_p(), ctypes.c_uint()
        arguments = (symbol.encode(), ctypes.byref(function), version, cuda.GET_PROC_ADDRESS_DEFAULT)
        status = load(path).cuGetProcAddress_v2(*arguments, ctypes.byref(found))
        return status, bool(function.value), found.value

    stub = fresh_stub()
    stub.set("version", 12080)
    # A call that the library has, of CUDA 12.2, and the one that the double has, of 12.8.
    for version, own in ((12010, 12070), (12020, 12080), (12080, 12080), (13000, 13000)):
        assert ask(library, "cuGraphAddNode", version) == ask(stub.path, "cuMemcpyBatchAsync", own)
    stub.set("version", 12020)
    for version in (12080, 13000):
        assert ask(library, "cuMemcpyBatchAsync", version) == ask(stub.path, "cuMemcpyBatchAsync", version)
    assert Cuda(library).version() == 12020


# --- a daemon and a worker where this is the driver ---------------------------------------------------


def test_a_daemon_without_a_gpu_serves_host_memory(library: str, tmp_path: Path) -> None:
    key = bytes(32)
    with Machine(library, None).daemon as daemon:
        with Exporter(daemon.directory, fresh_stub().path, "ordinary") as gpu_worker:
            said = re.compile(r"CUDA_ERROR_NO_DEVICE \(100\).*sees no GPU.*NVIDIA_VISIBLE_DEVICES")
            wait_until(lambda: said.search(gpu_worker.ask("ready", timeout_s=0.5)["problem"] or ""), 30)
            assert not gpu_worker.ask("ready", timeout_s=0)["ready"]
            assert daemon.log.count("Engines on a GPU cannot register: cuInit failed: CUDA_ERROR_NO_DEVICE (100)") == 1
        with FakeEngine(daemon.directory, blocks=4) as engine, AdminClient(daemon.directory) as admin:
            engine.fill([0, 1], seed=1)
            before = engine.checksums([0, 1])
            assert engine.store([key], [0]).ok
            assert engine.lookup([key]) == 1
            assert engine.load([key], [1]).ok
            assert engine.checksums([1]) == before[:1]
            assert admin.health().ready
        assert "Traceback" not in daemon.log
