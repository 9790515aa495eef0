"""``kvoffd-cli namespace set`` with a real daemon: what is set holds, is shown, and outlives the daemon."""

from __future__ import annotations

import json
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffd.cache.shares import Shares
from kvoffd.config import Config
from kvoffd.server.kept_limits import KeptLimits
from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.messages import NamespaceLimits
from tests.kit.daemon import DaemonProcess

PAGE = 16384
KEYS = [number.to_bytes(32, "big") for number in range(350)]


def test_limits_hold_are_shown_and_outlive_the_daemon(pool_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        assert "keeps" not in cli("namespaces")
        assert "at least 3.00 MiB; 3.00 MiB are kept for it now" in cli("namespace", "set", "polite", "--min", "3MiB")
        assert "minimum 3.00 MiB, maximum no bound, weight none" in daemon.log
        for words, problem in (
            (("--min", "11MiB"), "three quarters of the pool"),
            (("--min", "3MiB", "--max", "1MiB"), "is more than the maximum"),
            (("--weight", "-1"), "A weight is more than 0"),
            (("--weight", "heavy"), "is not a number"),
            (("--max", "lots"), "is not a size"),
            ((), "Say what to set"),
        ):
            assert problem in cli("namespace", "set", "flood", *words, status=2)
            assert listed("flood")["limits"] == {"minimum_bytes": 0, "maximum_bytes": None, "weight": None}
        assert "No open namespace" in cli("namespace", "set", "other", "--min", "1MiB", status=2)
        store("flood", 10, 300)
        assert listed("polite")["ready_bytes"] == 192 * PAGE
        cli("namespace", "set", "flood", "--max", "2MiB", "--weight", "1.5")
        store("flood", 0, 10)
        assert listed("flood")["ready_bytes"] == 2 << 20
        page = cli("namespaces")
        assert all(word in page for word in ("keeps", "most", "weight", "2.00 MiB", "1.5"))
        before = [listed(label)["limits"] for label in ("polite", "flood")]
        daemon.kill()
        daemon.start()
        assert [listed(label)["limits"] for label in ("polite", "flood")] == before
        assert "limits of namespaces" not in daemon.log.rpartition("takes a pool")[2]
        (found,) = [one for one in json.loads(cli("stats", "--json"))["namespaces"] if one["label"] == "polite"]
        assert (found["minimum_bytes"], found["maximum_bytes"], found["weight"]) == (3 << 20, None, None)
        assert found["kept_bytes"] == 3 << 20, "it was idle since the start: it has no share by weight"
        (in_the_way := Path(f"{pool_file}.limits.new")).mkdir()
        said = cli("namespace", "set", "flood", "--max", "4MiB", status=2)
        assert f"the next one may not have them: {pool_file}.limits cannot be written: [Errno 21]" in said
        assert listed("flood")["limits"] == before[1] | {"maximum_bytes": 4 << 20}, "they hold"
        in_the_way.rmdir()
        daemon.stop()
        daemon.start()
        assert listed("flood")["limits"] == before[1] | {"maximum_bytes": 4 << 20}, "it was tried again at the end"
        cli("namespace", "set", "polite", "--min", "none")
        assert "no limits" in cli("namespace", "set", "flood", "--max", "none", "--weight", "none")
        daemon.stop()
        assert Path(f"{pool_file}.limits").read_bytes() == b"00000000\n"


def test_a_file_of_no_use_is_said_and_what_the_pool_cannot_keep_is_left_out(
    pool_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, kept = Config(pool_file=str(pool_file)), Path(f"{pool_file}.limits")

    def taken_over(pool_bytes: int) -> dict[bytes, NamespaceLimits]:
        caplog.clear()
        shares = Shares(pool_bytes, lambda: 0.0)
        KeptLimits(shares, config).go_on()
        return dict(shares)

    shares = Shares(1 << 30, lambda: 0.0)
    writer = KeptLimits(shares, config)
    writer.go_on()
    writer.close()
    assert not kept.exists(), "there is nothing to keep"
    shares.set(b"a" * 32, NamespaceLimits(1 << 29, None, 2.5))
    shares.set(b"b" * 32, NamespaceLimits(0, 1 << 20))
    writer.close()
    good = kept.read_bytes()
    assert taken_over(1 << 30) == dict(shares)
    assert not caplog.messages
    assert list(taken_over(1 << 28)) == [b"b" * 32]
    assert "three quarters of the pool" in caplog.messages[0]
    odd = b'{"fingerprint":"zz","minimum_bytes":0,"maximum_bytes":null,"weight":null}\n'
    huge = odd.replace(b"zz", b"aa").replace(b":0", b":1" + b"0" * 400)
    for damage, sentence in (
        (b"", "its checksum is wrong"),
        (good[:-5], "its checksum is wrong"),
        (good.replace(b"2.5", b"9.5"), "its checksum is wrong"),
        (b"%08x\n%s" % (zlib.crc32(b"[]\n"), b"[]\n"), "Expected `object`"),
        (b"%08x\n%s" % (zlib.crc32(odd), odd), "non-hexadecimal"),
        (b"%08x\n%s" % (zlib.crc32(huge), huge), "<= 9223372036854775807"),
        (bytes(1 << 20), "more than"),
    ):
        kept.write_bytes(damage)
        assert taken_over(1 << 30) == {}
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
    config, limits = Config(pool_file=str(hugetlbfs / "pool"), directory=tmp_path), NamespaceLimits(1 << 20)
    shares = Shares(1 << 30, lambda: 0.0)
    writer = KeptLimits(shares, config)
    shares.set(b"a" * 32, limits)
    writer.close()
    assert not writer.problem
    shares = Shares(1 << 30, lambda: 0.0)
    KeptLimits(shares, config).go_on()
    assert dict(shares) == {b"a" * 32: limits}
    assert not list(hugetlbfs.iterdir())
