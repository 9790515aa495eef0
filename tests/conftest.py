"""Fixtures that every part of the tests may use."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

# For ``tests.kit``: pytest's importlib mode adds no directory of ours by itself.
sys.path.insert(0, str(Path(__file__).parents[1]))

from kvoffd_client import AdminClient
from tests.kit import require
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until

# What a shell starts in its background ignores SIGINT, and so do its children: Ctrl-C would be lost on them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


DOOR = ("daemon", "cli", "faults", "chaos", "sim")
"""Folders of the door suite; the real engines of ``tests/vllm``, marked ``engine``, are the rest of it."""

HERE = Path(__file__).parent
VLLM = HERE / "vllm"
LONGEST = (
    "daemon/test_peers.py",
    "daemon/test_fleet.py",
    "tiers/test_peers.py",
    "simulate/test_fleet.py",
    "daemon/test_shared.py",
    "daemon/test_neighbours.py",
    "tiers/test_shared_cluster.py",
    "simulate/test_simulate.py",
    "tiers/test_shared_s3.py",
    "tiers/test_shared.py",
)
"""Half a minute and more, each run by one process: they come first, so that none runs alone at the end."""


def pytest_configure(config: pytest.Config) -> None:
    require.required()  # a wrong name is an error before anything runs
    if find_spec("hypothesis"):  # a GPU's machine has none
        from hypothesis import HealthCheck, settings

        # How long an example takes is the machine's.
        settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("shared machine")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What -m begins with need not be imported to be left out: vLLM alone takes 15 seconds of a CPU."""
    is_file = collection_path.name.startswith("test_")
    match config.option.markexpr.split():
        case "engine", *_:
            return (is_file and "mark.engine" not in collection_path.read_text()) or None
        case "vllm", *_:
            other = is_file and collection_path.parent != VLLM
            return (other and "mark.vllm" not in collection_path.read_text()) or None
        case "not", "vllm", *_:
            return collection_path in (VLLM, VLLM.with_name("routers")) or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end: the garbage collector need not look at it, now or while tests run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else nanobind, which Triton brings, prints at the end what it takes for leaks


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Processes side by side import all files, each in an order of its own, and then sort their tests: who is the first
    to import a file has pytest rewrite its assertions, a fifth of a second for a thousand lines, for the others too."""
    report = yield
    side = getattr(collector.config, "workerinput", None)
    if side and isinstance(collector, pytest.Dir) and collector.path != VLLM:
        at = len(report.result) * int(side["workerid"].removeprefix("gw")) // side["workercount"]
        report.result = [*report.result[at:], *report.result[:at]]
    return report


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    """Each test leaves signals as they were: a daemon that one runs here would end the process at a later one's."""
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The connector has the client's lines go to vLLM's handlers, whose stream is that of the test that imported it."""
    of_vllm = "vllm" in item.path.parts
    logging.getLogger("kvoffd_client").parent = logging.getLogger("vllm.kvoffd") if of_vllm else logging.root


def pytest_itemcollected(item: pytest.Item) -> None:
    folder = item.path.relative_to(HERE).parts[0]
    if folder in DOOR or item.get_closest_marker("engine"):
        item.add_marker(pytest.mark.door)
    if item.path.parent == VLLM:
        item.add_marker(pytest.mark.vllm)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, then the others by name; vLLM's stay in the order that they have there."""
    places = {HERE / file: place for place, file in enumerate(LONGEST)}

    def place(item: pytest.Item) -> tuple[int, Path]:
        return places.get(item.path, len(LONGEST)), VLLM if item.path.parent == VLLM else item.path

    items.sort(key=place)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a test leaves in the environment, as commands that run vLLM do, is not for the engines of other tests."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """A running daemon with a pool of 64 MiB."""
    with DaemonProcess() as running:
        yield running


@pytest.fixture(scope="module")
def module_daemon() -> Iterator[DaemonProcess]:
    """A daemon with a pool of 64 MiB for one module's tests; ask for ``shared_daemon`` instead."""
    with DaemonProcess() as running:
        yield running


@pytest.fixture
def shared_daemon(module_daemon: DaemonProcess) -> Iterator[DaemonProcess]:
    """The module's running daemon without blocks and sessions: for tests that neither end it nor need it fresh.

    Counters and open namespaces are those of all tests before: compare counters with what they were.
    """
    with AdminClient(module_daemon.directory) as admin:
        wait_until(lambda: len(admin.sessions().sessions) == 1, explain=admin.sessions)  # earlier tests' have ended
        admin.clear()
    yield module_daemon
    assert module_daemon.running, module_daemon.log


@pytest.fixture
def pool_file() -> Iterator[Path]:
    """A place in /dev/shm for a pool's file and those beside it; skips the test where there is no /dev/shm."""
    require.require("shm", os.access("/dev/shm", os.W_OK), "/dev/shm is not there")
    with TemporaryDirectory(dir="/dev/shm", prefix="kvoffd-test-", suffix=".pool") as directory:
        yield Path(directory) / "pool"
