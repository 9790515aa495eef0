"""Every test here runs over the stub driver, and over a real GPU where there is one."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffd_proto.cuda import LIBRARY_VARIABLE
from tests.kit.gpu_machine import Machine, real_gpus
from tests.kit.stub_cuda import fresh_stub


@pytest.fixture
def stub_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Machine]]:
    """Makes a machine with a stub driver, given the stub's variables; its daemon runs."""
    machines: list[Machine] = []

    def make(stub: dict[str, str], **options: Any) -> Machine:
        log = tmp_path / "driver.log"
        for name, value in {"STUB_LOG": str(log), **stub}.items():
            monkeypatch.setenv(name, value)
        machine = Machine(fresh_stub().path, log, **options)
        machines.append(machine)
        machine.daemon.start()
        return machine

    yield make
    for machine in machines:
        machine.daemon.close()


DRIVERS = ["stub", pytest.param("real", marks=pytest.mark.gpu)]


def machine_of(
    driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **flags: Any
) -> Generator[Machine, None, None]:
    """A running daemon with these flags, over one of DRIVERS."""
    log: Path | None = None
    library = os.environ.get(LIBRARY_VARIABLE, "")
    if driver == "stub":
        log = tmp_path / "driver.log"
        monkeypatch.setenv("STUB_LOG", str(log))
        monkeypatch.setenv("STUB_DEVICES", "2")
        monkeypatch.setenv("STUB_SEED", "1")  # what is not waited for is done in any order
        library = fresh_stub().path
    elif not real_gpus():
        pytest.skip("no GPU here")
    machine = Machine(library, log, **flags)
    with machine.daemon:
        yield machine


@pytest.fixture(params=DRIVERS)
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A running daemon that takes GPU memory."""
    yield from machine_of(request.param, tmp_path, monkeypatch)
