"""Every test here runs over the stub driver, and over a real GPU where there is one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvoffd_proto.cuda import LIBRARY_VARIABLE
from tests.kit.gpu_machine import Machine, real_gpus
from tests.kit.stub_cuda import fresh_stub


@pytest.fixture
def stub_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Machine]]:
    """Makes a machine with a stub driver, given the stub's variables; its daemon runs."""
    with ExitStack() as daemons:

        def make(stub: dict[str, str], **options: Any) -> Machine:
            log = tmp_path / "driver.log"
            for name, value in {"STUB_LOG": str(log), **stub}.items():
                monkeypatch.setenv(name, value)
            machine = Machine(fresh_stub().path, log, **options)
            daemons.enter_context(machine.daemon)
            return machine

        yield make


@pytest.fixture(params=["stub", pytest.param("real", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, stub_machine: Callable[..., Machine]) -> Iterator[Machine]:
    """A running daemon that takes GPU memory."""
    if request.param == "stub":
        yield stub_machine({"STUB_DEVICES": "2", "STUB_SEED": "1"})  # what is not waited for is done in any order
    elif not real_gpus():
        pytest.skip("no GPU here")
    else:
        real = Machine(os.environ.get(LIBRARY_VARIABLE, ""), None)
        with real.daemon:
            yield real
