"""Every test here runs over the stub driver, and over a real GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.daemon import DaemonProcess
from support.gpu_machine import Machine, real_gpus
from support.stub_cuda import fresh_stub


@pytest.fixture
def stub_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Machine]]:
    """Makes a machine with a stub driver, given the stub's variables; its daemon runs."""
    machines: list[Machine] = []

    def make(stub: dict[str, str], daemon: type[DaemonProcess] = DaemonProcess, **flags: str) -> Machine:
        log = tmp_path / "driver.log"
        for name, value in {"STUB_LOG": str(log), **stub}.items():
            monkeypatch.setenv(name, value)
        machine = Machine(fresh_stub().path, log, daemon, **flags)
        machines.append(machine)
        machine.daemon.start()
        return machine

    yield make
    for machine in machines:
        machine.daemon.close()


@pytest.fixture(params=["stub", pytest.param("real", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A running daemon that takes GPU memory."""
    log: Path | None = None
    library = ""
    if request.param == "stub":
        log = tmp_path / "driver.log"
        monkeypatch.setenv("STUB_LOG", str(log))
        monkeypatch.setenv("STUB_DEVICES", "2")
        library = fresh_stub().path
    elif not real_gpus():
        pytest.skip("no GPU here")
    machine = Machine(library, log)
    with machine.daemon:
        yield machine
