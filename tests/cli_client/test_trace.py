"""``kvoffd-cli trace``: from what engines ask for to a file that is replayed."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import kvoffd
import kvoffd_client
import kvoffd_proto
from kvoffd.cache.namespace import Group, Namespace
from kvoffd.cache.policy import Chain
from kvoffd.errors import KvoffdError
from kvoffd.server import tracer as tracer_module
from kvoffd.server.session import Session
from kvoffd.server.tracer import Tracer
from kvoffd.simulate.replay import replay
from kvoffd.simulate.trace import read_trace
from kvoffd_client.cli import main
from kvoffd_client.cli.trace import TraceWriter
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.admin import CHAIN_BYTES, TraceChain
from kvoffd_proto.messages import GroupKeys, GroupSpec, HintAction
from tests.kit.command import DEADLINE_S, start_cli
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until

KEYS = [bytes([number]) * 32 for number in range(1, 9)]
PROGRAM = "import sys; from kvoffd_client.cli import main; sys.exit(main())"


def chain(*numbers: int) -> TraceChain:
    return TraceChain(7, bytes(32), 0, 16, 4096, 4, b"".join(number.to_bytes(4, "big") for number in numbers))


def test_two_recordings_of_the_same_have_no_number_in_common(tmp_path: Path) -> None:
    numbers: list[set[int]] = []
    for name in ("first", "second"):
        with (tmp_path / name).open("xb") as opened:
            writer = TraceWriter(opened)
            writer.write([chain(*range(50))], 0)
            assert zlib.decompressobj(31).decompress((tmp_path / name).read_bytes()), "a kill loses nothing"
            writer.close()
        numbers.append(set(json.loads(gzip.decompress((tmp_path / name).read_bytes()))["hash_ids"]))
    assert len(numbers[0]) == 50
    assert not numbers[0] & numbers[1]


def test_a_replay_finds_kvoffd_where_the_console_did(tmp_path: Path) -> None:
    """The Debian package has both outside of Python's path, in a directory that only the console's script names."""
    library = tmp_path / "lib"
    library.mkdir()
    for package in (kvoffd, kvoffd_client, kvoffd_proto):
        place = Path(str(package.__file__)).parent
        (library / place.name).symlink_to(place)
    for place in map(Path, sys.path):  # what is installed, but no kvoffd
        for one in place.iterdir() if place.name == "site-packages" else ():
            if "kvoffd" not in one.name and not (library / one.name).exists():
                (library / one.name).symlink_to(one)
    (tmp_path / "trace").write_text('{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [1, 2]}\n' * 2)
    script = f"import sys; sys.path.insert(0, {str(library)!r}); {PROGRAM}"
    words = [os.path.realpath(sys.executable), "-I", "-S", "-c", script]
    words += ["trace", "replay", str(tmp_path / "trace"), "--blocks", "2", "--policy", "lru", "--json"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "lru" in ended.stdout


def test_what_was_asked_for_is_recorded_and_replayed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "asked.jsonl.gz"
    with (
        DaemonProcess("32MiB") as daemon,
        FakeEngine(daemon.directory, "tiny", blocks=32, page_bytes=4096) as engine,
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "trace", "record", str(file), "--json", "--directory", daemon.directory],
            stdout=subprocess.PIPE,
        ) as process,
    ):
        wait_until(lambda: file.exists() or process.poll() is not None, 30)
        assert process.poll() is None
        assert main(["trace", "record", str(tmp_path / "second"), "--directory", str(daemon.directory)]) == 2
        assert "records a trace" in capfd.readouterr().err
        assert not (tmp_path / "second").exists()
        engine.scheduler.hint(HintAction.RETAIN, [GroupKeys(0, b"".join(KEYS[:4]))], 80, 60.0)
        for keys in (KEYS[:4], KEYS[:6], KEYS[:4]):
            engine.lookup(keys)
            assert engine.store(keys, range(len(keys))).ok
            engine.release()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        done = json.loads(process.stdout.read())
        replayed = ["trace", "replay", str(file), "--policy", "lru", "--json", "--directory", str(daemon.directory)]
        assert main(replayed) == 0
        results = json.loads(capfd.readouterr().out)["results"]
        assert [one["policy"] for one in results[:2]] == ["lru", "lru+hints"]
        sizes = [one["size"] for one in results]
        assert sizes[-1] == "32.0 MiB (now)", "the daemon's own pool is among the sizes"
    assert (done["chains"], done["keys"], done["hints"], done["dropped"], done["ended"]) == (3, 14, 1, 0, "interrupt")
    assert done["bytes"] == file.stat().st_size
    lines = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    hinted, first, second, third = (line["hash_ids"] for line in lines)
    assert hinted == first == second[:4] == third
    assert [lines[0][name] for name in ("hint", "priority", "ttl_s")] == ["retain", 80, 60.0]
    assert len(set(second)) == 6
    assert not {int.from_bytes(key[:8], "big") >> 11 for key in KEYS} & set(second)
    assert (lines[0]["namespace"], lines[0]["group"], lines[0]["input_length"]) == (0, 0, 4 * lines[0]["block_tokens"])
    trace = read_trace(file)
    assert (trace.name, trace.accesses, trace.cut_off) == ("asked", 14, False)
    assert replay(trace, "lru", 6).hits == 8


def test_all_that_the_daemon_has_at_the_end_is_recorded(tmp_path: Path) -> None:
    """More short prompts than one answer holds, which came while the recorder was stopped."""
    file, prompts = tmp_path / "many", 3000
    with (
        DaemonProcess("16MiB") as daemon,
        FakeEngine(daemon.directory, "tiny") as engine,
        start_cli("trace", "record", str(file), "--json", "--directory", str(daemon.directory)) as process,
    ):
        wait_until(file.exists)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        for number in range(prompts):
            engine.lookup([number.to_bytes(32, "big")])
            engine.release()
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    done = json.loads(out)
    assert (done["chains"], done["dropped"], done["ended"]) == (prompts, 0, "interrupt")


def test_a_replay_that_is_killed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, said in ((signal.SIGKILL, "memory runs out; give smaller sizes"), (signal.SIGSEGV, "by signal 11.")):
        dies = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {number})"]
        monkeypatch.setattr("kvoffd_client.cli.trace.program", lambda *_, dies=dies: dies)
        assert main(["trace", "replay", str(tmp_path / "trace"), "--blocks", "1"]) == 2
        assert said in capsys.readouterr().err


def test_a_bad_path_and_a_full_disk_are_said_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with DaemonProcess("16MiB") as daemon:

        def refused(*words: str) -> str:
            assert main(["trace", "record", *words, "--directory", str(daemon.directory)]) == 2
            return capsys.readouterr().err

        (tmp_path / "there").write_text("mine")
        assert "exists already" in refused(str(tmp_path / "there"))
        assert (tmp_path / "there").read_text() == "mine"
        assert "No such file or directory" in refused(str(tmp_path / "no" / "file"))
        assert "--duration: 'soon'" in refused(str(tmp_path / "new"), "--duration", "soon")
        assert "records nothing" in refused(str(tmp_path / "new"), "--duration", "0s")
        full = tmp_path / "full"
        original = Path.open
        with pytest.MonkeyPatch.context() as patch:
            # What /dev/full says, behind a name that is new.
            patch.setattr(
                Path, "open", lambda path, mode="r": original(Path("/dev/full") if path == full else path, "wb")
            )
            assert os.strerror(errno.ENOSPC) in refused(str(full), "--duration", "0.1s")
        assert not full.exists()
        # What failed holds up nobody.
        words = ["trace", "record", str(tmp_path / "new"), "--max-size", "1B", "--directory", str(daemon.directory)]
        assert main(words) == 0
        out = capsys.readouterr().out
        assert out.startswith("0 lookups for 0 blocks in ")
        assert out.endswith("reached --max-size.\n")


def test_a_record_of_nothing_leaves_no_file(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    with (
        DaemonProcess("16MiB") as daemon,
        start_cli("trace", "record", str(file), "--directory", str(daemon.directory)) as process,
    ):
        wait_until(file.exists)
        daemon.kill()
        out, err = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, out) == (2, "")
        assert f"Nothing was recorded, and {file} was removed." in err
        assert not file.exists()


def test_a_record_of_hints_alone_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    with (
        DaemonProcess("16MiB") as daemon,
        FakeEngine(daemon.directory, "tiny") as engine,
        start_cli("trace", "record", str(file), "--directory", str(daemon.directory)) as process,
    ):
        wait_until(file.exists)
        engine.scheduler.hint(HintAction.RETAIN, [GroupKeys(0, KEYS[0])], 80, 60.0)
        wait_until(lambda: zlib.decompressobj(31).decompress(file.read_bytes()))
        daemon.kill()
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert out.startswith("0 lookups for 0 blocks and 1 hint in ")
    assert len(gzip.decompress(file.read_bytes()).splitlines()) == 1


def test_what_nobody_fetches_is_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracer without a daemon."""
    monkeypatch.setattr(tracer_module, "MAX_KEPT_BYTES", 3 * (CHAIN_BYTES + 32))
    monkeypatch.setattr(tracer_module, "FETCHED_BYTES", 2 * (CHAIN_BYTES + 32))
    cache: Any = SimpleNamespace(prompts=SimpleNamespace(watchers=[]))
    one, other = (cast(Session, SimpleNamespace(id=number, process="uid 0", ended=False)) for number in (1, 2))
    tracer = Tracer(cache, lambda: 0.0)
    group = Group(1, Namespace(bytes(32), "tiny", 1, 32, [GroupSpec("full", 16)], "{}"), 0)
    group.set_sizes([4096], [8192])

    def ask(*keys: bytes) -> None:
        for key in keys:
            for watch in tuple(cache.prompts.watchers):
                watch([Chain(group, key, np.empty(0, np.uint32), 0)])

    ask(KEYS[0])
    assert tracer.fetch(one) == ([], 0)
    for asked, fetched, lost in (
        (KEYS[:5], KEYS[:2], 0),
        (KEYS[5:6], KEYS[2:3], 3),  # the gap is in one place
        (KEYS[6:7], KEYS[6:7], 0),
    ):
        ask(*asked)
        chains, dropped = tracer.fetch(one)
        assert ([found.keys for found in chains], dropped) == (fetched, lost)
    with pytest.raises(KvoffdError, match="records a trace"):
        tracer.fetch(other)
    one.ended = True
    ask(KEYS[0])
    assert cache.prompts.watchers == []
    assert tracer.fetch(other) == ([], 0)
