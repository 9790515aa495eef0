"""``kvoffd-cli namespace set`` with a real daemon: what is set holds, is shown, and outlives the daemon."""

from __future__ import annotations

import json
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffd.cache import quota
from kvoffd.cache.quota import Quotas
from kvoffd.config import Config
from kvoffd.server.kept_limits import KeptLimits
from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess

PAGE = 16384
KEYS = [number.to_bytes(32, "big") for number in range(350)]


def test_a_quota_holds_is_shown_and_outlives_the_daemon(pool_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with DaemonProcess("16MiB", pool_file=str(pool_file), eviction_policy="lru") as daemon:

        def cli(*words: str, status: int = 0) -> str:
            assert main([*words, "--directory", str(daemon.directory)]) == status
            printed = capsys.readouterr()
            return printed.err if status else printed.out

        def listed(label: str) -> dict[str, object]:
            found = json.loads(cli("namespaces", "--json"))["namespaces"]
            return next(one for one in found if one["label"] == label)

        def store(label: str, first: int, count: int) -> None:
            with FakeEngine(daemon.directory, label, blocks=count, page_bytes=PAGE) as engine:
                for start in range(first, first + count, 50):
                    end = min(start + 50, first + count)
                    engine.fill(range(end - start), seed=1)
                    engine.store(KEYS[start:end], range(end - start))

        store("polite", 0, 200)
        store("flood", 0, 10)
        assert "at most" not in cli("namespaces")
        assert "'lots' is not a size" in cli("namespace", "set", "flood", "--max", "lots", status=2)
        assert "No open namespace" in cli("namespace", "set", "other", "--max", "1MiB", status=2)
        assert listed("flood")["quota_bytes"] is None
        assert "at most 2.00 MiB." in cli("namespace", "set", "flood", "--max", "2MiB")
        assert "set the quota of the namespace" in daemon.log
        store("flood", 10, 300)
        assert (listed("flood")["ready_bytes"], listed("polite")["ready_bytes"]) == (2 << 20, 200 * 4 * PAGE)
        page = cli("namespaces")
        assert all(word in page for word in ("at most", "2.00 MiB"))
        daemon.kill()
        daemon.start()
        assert [listed(label)["quota_bytes"] for label in ("polite", "flood")] == [None, 2 << 20]
        assert "quotas of namespaces" not in daemon.log.rpartition("takes a pool")[2]
        (found,) = [one for one in json.loads(cli("stats", "--json"))["namespaces"] if one["label"] == "flood"]
        assert found["quota_bytes"] == 2 << 20
        assert "no quota." in cli("namespace", "set", "flood", "--max", "none")
        daemon.stop()
        daemon.start()
        assert listed("flood")["quota_bytes"] is None


def test_a_file_of_no_use_is_said_and_one_quota_too_many_is_left_out(
    pool_file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, kept = Config(pool_file=str(pool_file)), Path(f"{pool_file}.limits")

    def taken_over() -> dict[bytes, int]:
        caplog.clear()
        quotas = Quotas()
        KeptLimits(quotas, config).go_on()
        return dict(quotas)

    quotas = Quotas()
    writer = KeptLimits(quotas, config)
    writer.go_on()
    writer.close()
    assert not kept.exists(), "there is nothing to keep"
    quotas.set(b"a" * 32, 1 << 29)
    quotas.set(b"b" * 32, 987_654)
    writer.close()
    good = kept.read_bytes()
    assert taken_over() == dict(quotas)
    assert not caplog.messages
    with monkeypatch.context() as patch:
        patch.setattr(quota, "MAX_QUOTAS", 1)
        assert list(taken_over()) == [b"a" * 32]
    assert "have a quota" in caplog.messages[0]
    odd = b'{"fingerprint":"zz","quota_bytes":0}\n'
    huge = odd.replace(b"zz", b"aa").replace(b":0", b":1" + b"0" * 400)
    for damage, sentence in (
        (b"", "its checksum is wrong"),
        (good[:-5], "its checksum is wrong"),
        (good.replace(b"987654", b"987655"), "its checksum is wrong"),
        (b"%08x\n%s" % (zlib.crc32(b"[]\n"), b"[]\n"), "Expected `object`"),
        (b"%08x\n%s" % (zlib.crc32(odd), odd), "non-hexadecimal"),
        (b"%08x\n%s" % (zlib.crc32(huge), huge), "<= 9223372036854775807"),
        (bytes(1 << 20), "more than"),
    ):
        kept.write_bytes(damage)
        assert taken_over() == {}
        assert sentence in caplog.messages[0]
        assert "There are none." in caplog.messages[0]


@pytest.fixture
def hugetlbfs(tmp_path: Path) -> Iterator[Path]:
    """A hugetlbfs that needs no huge pages, as long as nothing is mapped."""
    where = tmp_path / "huge"
    where.mkdir()
    mounted = subprocess.run(["mount", "-t", "hugetlbfs", "none", where], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no hugetlbfs can be mounted: {mounted.stderr}")
    yield where
    subprocess.run(["umount", where], check=True)


def test_beside_a_pool_of_huge_pages_nothing_can_be_written_so_they_are_kept_in_the_directory(
    hugetlbfs: Path, tmp_path: Path
) -> None:
    config = Config(pool_file=str(hugetlbfs / "pool"), directory=tmp_path)
    quotas = Quotas()
    writer = KeptLimits(quotas, config)
    quotas.set(b"a" * 32, 1 << 20)
    writer.close()
    assert not writer.problem
    quotas = Quotas()
    KeptLimits(quotas, config).go_on()
    assert dict(quotas) == {b"a" * 32: 1 << 20}
    assert not list(hugetlbfs.iterdir())
