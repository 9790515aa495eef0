"""Memory, namespaces, options, and the library's face."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvoffd
import kvoffd_client
from kvoffd_client import ClientOptions, NamespaceSpec, SharedMemory, admin_client
from kvoffd_client import memory as memory_module
from kvoffd_proto.messages import GroupSpec


def test_memory_is_zeroed_shared_and_cannot_be_resized() -> None:
    with SharedMemory(10_000, "test") as memory:
        assert memory.view.shape == (10_000,)
        assert not memory.view.any()
        memory.view[9_999] = 7
        assert os.pread(memory.fd, 1, 9_999) == b"\7"
        # Sealed against more seals too: one against writing would keep the daemon from mapping it for loads.
        assert fcntl.fcntl(memory.fd, fcntl.F_GET_SEALS) == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    for wrong in (0, True):
        with pytest.raises(ValueError, match="at least one byte"):
            SharedMemory(wrong)


@pytest.mark.parametrize("refusal", [0, errno.EINVAL, errno.EPERM, errno.ENOSYS])
def test_memory_is_resident_in_huge_pages_if_possible(monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    """Neither kernels before 5.14 nor a seccomp filter populate it."""
    advised: list[int] = []

    class Mapping(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            advised.append(option)
            if refusal:
                raise OSError(refusal, os.strerror(refusal))
            super().madvise(option)

    monkeypatch.setattr(mmap, "mmap", Mapping)
    with SharedMemory(50 * 4096 + 1) as memory:
        assert os.fstat(memory.fd).st_blocks * 512 >= 51 * 4096
    assert advised == [mmap.MADV_HUGEPAGE, memory_module.MADV_POPULATE_WRITE]


def test_memory_is_closed_once_whoever_holds_arrays_on_it_or_forgets_it() -> None:
    memory = SharedMemory(4096)
    fd, part = memory.fd, memory.view[:10]
    memory.close()
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    part[0] = 1
    assert np.sum(part) == 1
    unused = SharedMemory(4096, "unused")
    unused.close()
    assert "memfd:unused" not in Path("/proc/self/maps").read_text()
    fd = SharedMemory(4096).fd
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_memory_that_the_kernel_refuses_closes_its_descriptor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    close = os.close

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    def spy(fd: int) -> None:
        closed.append(fd)
        close(fd)

    monkeypatch.setattr(memory_module, "_make_resident", refuse)
    monkeypatch.setattr(os, "close", spy)
    with pytest.raises(OSError, match="no memory"):
        SharedMemory(4096)
    gc.collect()
    assert len(closed) == 1


def test_a_named_namespace_depends_on_all_its_arguments_and_an_option_is_refused_by_name() -> None:
    base = NamespaceSpec.named("a")
    assert base == NamespaceSpec.named("a")
    others = [
        NamespaceSpec.named("b"),
        NamespaceSpec.named("a", world_size=2),
        NamespaceSpec.named("a", key_bytes=16),
        NamespaceSpec.named("a", groups=[GroupSpec("full_attention", 16)]),
        NamespaceSpec.named("a", groups=[GroupSpec("full_attention", 0), GroupSpec("full_attention", 0)]),
        NamespaceSpec.named("a", salt="x"),
        NamespaceSpec.named("a", salt="y"),
    ]
    assert len({spec.fingerprint for spec in [base, *others]}) == len(others) + 1
    assert len(base.fingerprint) == 32
    for wrong in (0, float("nan"), True, "1"):
        with pytest.raises(ValueError, match="request_timeout_s"):
            ClientOptions(request_timeout_s=wrong)  # type: ignore[arg-type]


HEAVY = {"msgspec", "numpy", "zmq"}


def _modules_after(statement: str) -> set[str]:
    program = f"import json, sys; {statement}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_every_public_name_is_there_and_is_documented() -> None:
    named = {name for names in kvoffd_client._HOMES.values() for name in names.split()}
    assert named | {"__version__"} == set(kvoffd_client.__all__) == set(dir(kvoffd_client))
    assert all(getattr(kvoffd_client, name).__doc__ for name in named)
    assert kvoffd_client.AdminClient is admin_client.AdminClient
    assert kvoffd_client.__version__ == kvoffd.__version__
    with pytest.raises(AttributeError, match="no attribute 'Client'"):
        _ = kvoffd_client.Client


def test_the_package_costs_nothing_before_a_name_is_used() -> None:
    assert not HEAVY & _modules_after("import kvoffd_client")
    assert "numpy" not in _modules_after("from kvoffd_client import AdminClient")
