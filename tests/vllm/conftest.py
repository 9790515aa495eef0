"""What the connector's tests share."""

from __future__ import annotations

import faulthandler
import importlib.util
import logging
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from tests.kit import runner_v2
from tests.kit.fork_servers import import_vllm
from tests.kit.models import make_tiny_llama
from tests.kit.require import missing
from tests.vllm.engine_home import EngineHome
from tests.vllm.engine_server import EngineServer

HERE = Path(__file__).parent


class WithoutVllm(pytest.Module):
    """A file whose tests cannot be collected, for want of vLLM."""

    def collect(self) -> Iterable[pytest.Item]:
        missing("vllm", "vLLM is not installed; `make venv` installs it")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if importlib.util.find_spec("vllm") is None:
        return WithoutVllm.from_parent(parent, path=module_path)
    if "pytest.mark.engine" in module_path.read_text():
        return None  # its engines are other processes
    # vLLM, torch and their friends warn while they are imported; that is not ours to fix, so it happens here, once.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.core.sched.scheduler
        import vllm.v1.worker.cpu_worker  # noqa: F401
    # TVM, which vLLM brings, took crashes away, and tells of them where pytest's capture hides it.
    faulthandler.disable()
    faulthandler.enable(parent.config.stash[fault_handler_stderr_fd_key])
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines come last: other tests run while a process imports vLLM, from which engines are forked.

    Of those the ones come last that need the server, which starts beside tests of engines of their own. Side by side
    (--dist loadgroup) one process runs all that need it, since it takes 40 seconds of a CPU to start.
    """
    items.sort(key=rank)
    for item in items:
        if of_engine(item):
            item.add_marker(pytest.mark.xdist_group("server" if rank(item) > 1 else item.path.stem))


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        engines = {item.path.stem for item in session.items if of_engine(item)}
        wanted = {stem.endswith("_v2") or runner_v2.wanted() for stem in engines}
        # One of several processes has the few tests of the second runner, and imports vLLM for them when they come.
        for v2 in {False} if len(wanted) > 1 and hasattr(session.config, "workerinput") else wanted:
            import_vllm(v2=v2)


def of_engine(item: pytest.Item) -> bool:
    return item.path.parent == HERE and item.get_closest_marker("engine") is not None


def rank(item: pytest.Item) -> int:
    fixtures = getattr(item, "fixturenames", ())
    return of_engine(item) + ("early_server" in fixtures) + 2 * ("server" in fixtures)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHome]:
    """An engine and a server for all files; start daemons in its directory, and end them."""
    made = EngineHome(tmp_path_factory.mktemp("home"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def early_server(request: pytest.FixtureRequest, home: EngineHome) -> None:
    """The server begins to start, where a later test needs it: that takes half a minute of a CPU."""
    if any("server" in getattr(item, "fixturenames", ()) for item in request.session.items):
        home.launch_server()


@pytest.fixture(scope="session")
def server(home: EngineHome) -> EngineServer:
    """The server of ``home``, running."""
    return home.server


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the connector logs."""
    import vllm.logger

    from kvoffd_client.vllm.log import logger

    vllm.logger._print_warning_once.cache_clear()
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    def collect(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return False

    monkeypatch.setattr(logger, "handlers", [Collect()])  # for what the client logs
    # vLLM sets its logging up with the first configuration of an engine, and takes handlers away then.
    monkeypatch.setattr(logger, "filters", [collect])
    level = logger.level
    logger.setLevel(logging.INFO)  # which also forgets what it has found to be below another level
    yield lines
    logger.setLevel(level)
