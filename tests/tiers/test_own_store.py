"""A store of another package, found by its entry point: the whole suite, and a whole daemon over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from kvoffd.config import load_config
from kvoffd.tiers.shared import store as stores
from kvoffd_client import AdminClient
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.package import install
from tests.kit.waiting import wait_until
from tests.kit.wire import keys
from tests.tiers.shared_conformance import SharedConformance

KEYS = keys(*range(8))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package was installed, with its metadata."""
    return install(Path(__file__).parent / "files_store", tmp_path_factory.mktemp("installed"))


class TestFiles(SharedConformance):
    @pytest.fixture
    def url(self, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.syspath_prepend(str(installed))
        found = {point.name: point for point in entry_points(group=stores.ENTRY_POINTS)}
        monkeypatch.setattr(stores, "_OTHERS", found)
        monkeypatch.setattr(stores, "SCHEMES", (*stores.SCHEMES, *found))
        url = f"files://{tmp_path}"
        assert load_config({"shared": [url]}, {}).config.shared == (url,)
        return url


class Daemon(DaemonProcess):
    """One in whose environment the package is installed."""

    def __init__(self, installed: Path, url: str) -> None:
        super().__init__("16MiB", environ={"PYTHONPATH": str(installed)}, shared=url, shared_write="always")


@pytest.fixture
def daemons(installed: Path, tmp_path: Path) -> Iterator[list[Daemon]]:
    with ExitStack() as running:
        yield [running.enter_context(Daemon(installed, f"files://{tmp_path}")) for _ in range(2)]


def test_two_daemons_share_blocks_over_it_and_say_so(daemons: list[Daemon], tmp_path: Path) -> None:
    with ExitStack() as running:
        ours, theirs = (running.enter_context(FakeEngine(one.directory, page_bytes=65536)) for one in daemons)
        admins = [running.enter_context(AdminClient(one.directory)) for one in daemons]
        shared = [lambda admin=admin: admin.stats().shared[0] for admin in admins]  # type: ignore[misc]
        for told in shared:
            wait_until(lambda told=told: told().up, explain=told)  # type: ignore[misc]
        ours.fill(range(8), seed=5)
        assert ours.store(KEYS, range(8)).ok
        wait_until(lambda: shared[0]().written_blocks == 8, explain=shared[0])
        wait_until(lambda: theirs.lookup(KEYS) == 8, explain=shared[1])
        assert theirs.load(KEYS, range(32, 40)).ok
        assert theirs.checksums(range(32, 40)) == ours.checksums(range(8))
        assert shared[1]().url == f"files://{tmp_path}"
        assert (shared[1]().read_blocks, shared[1]().mismatches) == (8, 0)
        for path in tmp_path.iterdir():
            path.unlink()
        tmp_path.rename(f"{tmp_path}-gone")
        assert theirs.lookup(keys(*range(100, 108))) == 0
        wait_until(lambda: [one.reason for one in admins[1].health().causes] == ["shared_unreachable"])
        assert "is no directory here; mount it." in admins[1].health().causes[0].sentence
