"""What outlives the daemon: the pool, in a file or in systemd's store, quotas of namespaces, what the policy learned.

RESTART_KILLS=200 in the environment makes the kills under load a long run.
"""

from __future__ import annotations

import os
import random
import re
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvoffd_client import AdminClient
from kvoffd_client.testing import FakeEngine
from tests.kit.checked import STEP, CheckedEngine, Truth, overwrite
from tests.kit.command import command, run_daemon_here
from tests.kit.daemon import DaemonProcess, refusal_to_serve
from tests.kit.prompt_engine import PromptEngine
from tests.kit.service_manager import ServiceManager
from tests.kit.waiting import wait_until
from tests.kit.wire import NamespaceStats, books, keys

MIB = 1 << 20
BLOCKS = 16
SOME = range(BLOCKS)
KEYS = keys(*SOME)
NAMES = {"kvoffd-pool", "kvoffd-slot-table"}


@pytest.fixture
def in_file(pool_file: Path) -> Iterator[DaemonProcess]:
    """A running daemon with its pool in a file."""
    with DaemonProcess("32MiB", pool_file=str(pool_file)) as daemon:
        yield daemon


@pytest.fixture
def manager() -> Iterator[ServiceManager]:
    running = ServiceManager()
    yield running
    running.close()


@pytest.fixture
def managed(manager: ServiceManager) -> Iterator[DaemonProcess]:
    """A running daemon whose pool systemd keeps."""
    with DaemonProcess("32MiB", manager=manager) as daemon:
        manager.wait_stored_fds(2)
        yield daemon


@pytest.fixture(params=["in_file", "managed"])
def lasting(request: pytest.FixtureRequest) -> DaemonProcess:
    """A running daemon whose pool outlives it, either way."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, DaemonProcess)
    return found


def store(daemon: DaemonProcess, world_size: int = 2) -> Truth:
    """Blocks of an engine that is gone afterwards."""
    with CheckedEngine(daemon, world_size=world_size) as engine:
        engine.put(SOME)
        return engine.truth


def load(daemon: DaemonProcess, truth: Truth, world_size: int = 2) -> list[int]:
    """All that is ready, loaded and compared by another engine."""
    with CheckedEngine(daemon, truth, world_size=world_size) as engine:
        return engine.get(SOME)


def test_what_becomes_of_the_pool_is_said(pool_file: Path, manager: ServiceManager) -> None:
    """In the log of the start, by stats and doctor; and once its file is gone."""

    def said(daemon: DaemonProcess, words: str) -> None:
        assert f"The pool's memory {words}." in daemon.log
        assert f"its memory {words}\n" in command(daemon, "stats", "pool")[1]
        assert f"The pool's memory {words}.\n" in command(daemon, "doctor")[1]

    with DaemonProcess("8MiB") as daemon:
        said(daemon, "ends with this process")
    with DaemonProcess("8MiB", pool_file=str(pool_file)) as daemon:
        said(daemon, f"is kept in {pool_file}")
        pool_file.unlink()
        assert "its memory ends with this process\n" in command(daemon, "stats")[1]
    with DaemonProcess("8MiB", manager=manager) as daemon:
        manager.wait_stored_fds(2)
        daemon.stop()
        daemon.start()
        said(daemon, "is kept by systemd over restarts")


def starts_empty(daemon: DaemonProcess) -> str:
    """Start it, with a pool that is empty and works; why it is, in the daemon's words."""
    said = len(daemon.log)
    daemon.start()
    found = books(daemon.directory)
    assert found.namespaces == {}
    assert found.free_bytes == found.pool.size_bytes
    assert load(daemon, store(daemon)) == [*SOME]
    reasons = [line for line in daemon.log[said:].splitlines() if "starts empty" in line]
    assert len(reasons) == 1, daemon.log
    return reasons[0]


# --- what comes back -------------------------------------------------------------------------------


def test_restart_brings_back_blocks_and_names(lasting: DaemonProcess) -> None:
    """Namespaces with their blocks, before an engine comes."""
    truth = store(lasting)
    before = books(lasting.directory)
    ((name, namespace),) = before.namespaces.items()
    ends: tuple[Callable[[], object], ...] = (lasting.kill, lasting.stop)
    for end in ends:
        end()
        lasting.start()
        after = books(lasting.directory)
        assert after.pid != before.pid
        assert after.namespaces[name].model == namespace.model
        assert after.listed[name].description == before.listed[name].description
        assert after.namespaces[name].ready_blocks == BLOCKS
        assert after.ready_bytes == 2 * BLOCKS * 65536
        assert after.balanced
        assert load(lasting, truth) == [*SOME]


def test_restart_brings_back_the_newest_first(pool_file: Path) -> None:
    """And what was oldest before is the first to go, but for what was asked for since."""
    with DaemonProcess("2MiB", pool_file=str(pool_file), eviction_policy="lru") as daemon:
        wanted = keys(*range(24))
        with FakeEngine(daemon.directory, blocks=BLOCKS) as engine:
            for number in range(24):
                assert engine.store(wanted[number : number + 1], [0]).ok
        daemon.kill()
        daemon.start()
        with FakeEngine(daemon.directory, blocks=BLOCKS) as engine:
            assert engine.lookup(wanted[:1]) == 1
            engine.release()
            assert engine.store(keys(*range(100, 100 + BLOCKS)), range(BLOCKS)).ok
            ready = [engine.lookup([key]) for key in wanted]
            assert 1 < sum(ready) < 24
            assert ready == [1, *sorted(ready[1:])]


@pytest.mark.parametrize("policy", ["lru", "arc", "learned"])
def test_a_prompt_of_several_turns_keeps_its_beginning_after_a_restart(policy: str, pool_file: Path) -> None:
    """Its first turn was stored long before the others, and goes last of it all the same."""
    chat, other, new = keys(*range(20)), keys(*range(100, 106)), keys(*range(200, 214))
    with DaemonProcess("2MiB", pool_file=str(pool_file), eviction_policy=policy) as daemon:
        with PromptEngine(daemon.directory, blocks=32) as engine:
            for name, prompt in (("first", chat[:10]), ("other", other), ("second", chat)):
                engine.serve(name, prompt)
        daemon.kill()
        daemon.start()
        with PromptEngine(daemon.directory, blocks=32) as engine:
            engine.serve("new", new)  # 26 of 32 blocks are taken, so eight go
            assert (engine.lookup(other[:1]), engine.lookup(chat), engine.lookup(new)) == (0, 18, 14)


def test_restart_keeps_a_reset_that_another_pool_saw(in_file: DaemonProcess) -> None:
    file = in_file.flags["pool-file"]
    with CheckedEngine(in_file) as engine:
        engine.put(SOME)
        assert in_file.stop() == 0
        del in_file.flags["pool-file"]
        in_file.start()
        assert engine.wait_ready(30)
        assert engine.scheduler.reset()
        engine.truth.drop()
        for ready in ([], [0, 1, 2, 3]):  # what is stored after the reset comes back
            assert in_file.stop() == 0
            in_file.flags["pool-file"] = file
            in_file.start()
            assert engine.wait_ready(30)
            assert engine.get(SOME) == ready
            engine.put(range(4))


# --- systemd ---------------------------------------------------------------------------------------


def test_systemd_stores_one_pool_and_one_table(manager: ServiceManager, managed: DaemonProcess) -> None:
    """However often the daemon starts, and a pool of another size replaces the one that is stored."""
    store(managed)
    assert {name for name, _ in manager.stored_fds} == NAMES
    managed.kill()
    managed.flags["pool-size"] = "48MiB"
    reason = starts_empty(managed)
    assert "32.0 MiB" in reason
    assert "48.0 MiB" in reason
    manager.wait_stored_fds(2)
    assert {name for name, _ in manager.stored_fds} == NAMES
    assert max(os.fstat(fd).st_size for _, fd in manager.stored_fds) == 48 * MIB
    managed.kill()
    os.close(manager.stored_fds.pop()[1])
    assert "kept other descriptors than one pool and one table" in starts_empty(managed)
    manager.wait_stored_fds(2)


@pytest.mark.parametrize("pool_size", ["32MiB", "48MiB"])
def test_systemd_descriptors_of_other_names_are_closed_and_removed(
    manager: ServiceManager, managed: DaemonProcess, pool_size: str
) -> None:
    """They stay open nowhere: whether the stored pool is used, or one of another size replaces it."""
    read_end, write_end = os.pipe()
    manager.stored_fds.append(("another", write_end))
    managed.kill()
    managed.flags["pool-size"] = pool_size
    managed.start()
    manager.wait_stored_fds(2)
    assert {name for name, _ in manager.stored_fds} == NAMES
    os.set_blocking(read_end, False)
    assert os.read(read_end, 1) == b"", "nobody has the other end any more"
    os.close(read_end)
    assert "they are closed: 1 named another." in managed.log
    assert managed.stop() == 0


def test_systemd_descriptors_for_another_process_are_ignored() -> None:
    given = {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "kvoffd-pool:kvoffd-slot-table", "LISTEN_PID": "1"}
    with DaemonProcess("4MiB", environ=given) as daemon:
        assert books(daemon.directory).free_bytes == 4 * MIB
        assert daemon.stop() == 0


# --- the file --------------------------------------------------------------------------------------


def refused(pool_file: Path, directory: Path, pool_size: str = "32MiB") -> str:
    """The sentence of a start, which is that of ``kvoffd config`` too."""
    flags = "--directory", str(directory), "--pool-size", pool_size, "--pool-file", str(pool_file)
    sentence = refusal_to_serve(*flags)
    checked = run_daemon_here("config", *flags, "--http-address", "")
    assert checked.returncode == 2
    of_both = [re.sub(r"[\d.]+", "N", one) for one in (sentence, checked.stderr)]  # free memory changes
    assert of_both[0] == of_both[1]
    return sentence


def test_pool_file_may_lie_in_a_directory_that_the_start_makes(pool_file: Path) -> None:
    directory = pool_file.parent / "made"
    flags = "--directory", str(directory), "--pool-file", str(directory / "pool"), "--pool-size", "8MiB"
    checked = run_daemon_here("config", *flags, "--http-address", "")
    assert (checked.returncode, checked.stderr) == (0, "")


def test_pool_file_belongs_to_one_daemon(in_file: DaemonProcess, pool_file: Path, tmp_path: Path) -> None:
    """It is private, takes its memory at once, and neither a second daemon nor a link gets it."""
    truth = store(in_file)
    status = pool_file.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= status.st_size >= 32 * MIB
    assert status.st_size <= 32 * MIB * 1.02 + 2 * 2 * MIB
    assert "is using the pool file" in refused(pool_file, tmp_path)
    assert load(in_file, truth) == [*SOME]
    in_file.kill()
    link = pool_file.with_name("link")
    link.symlink_to(pool_file)
    assert "cannot be opened" in refused(link, tmp_path)
    link.unlink()
    os.link(pool_file, link)
    assert "not a pool file" in refused(link, tmp_path)
    link.unlink()
    pool_file.chmod(0o640)
    assert "0640" in refused(pool_file, tmp_path)
    pool_file.chmod(0o600)
    in_file.start()
    assert load(in_file, truth) == [*SOME]


def test_pool_file_that_is_something_else_is_refused_unchanged(pool_file: Path, tmp_path: Path) -> None:
    for content in (b"precious", b"KVOFFDS"):
        pool_file.write_bytes(content)
        pool_file.chmod(0o600)
        before = pool_file.stat()
        assert "not a pool file of kvoffd" in refused(pool_file, tmp_path)
        assert pool_file.read_bytes() == content
        assert pool_file.stat().st_ino == before.st_ino
    pool_file.unlink()
    here = pool_file.parent
    for file, why in (
        (here, f"is a directory; name a file in it, such as {here}/kvoffd.pool."),
        (here / "missing" / "pool", "cannot be opened"),
    ):
        assert why in refused(file, tmp_path)
    assert "are available" in refused(pool_file, tmp_path, "500TiB")
    assert list(here.iterdir()) == []


def test_pool_file_on_a_disk_is_refused(tmp_path: Path) -> None:
    if "tmpfs" in subprocess.getoutput(f"stat -f -c %T {tmp_path}"):
        pytest.skip("the tests' own directory is on tmpfs")
    assert "would lie on a disk" in refused(tmp_path / "pool", tmp_path)
    assert not (tmp_path / "pool").exists()


def test_pool_file_with_a_damaged_header_or_of_another_size_is_replaced(pool_file: Path) -> None:
    """Tables that are not to be trusted are of tests/pool. Each is a start with an empty pool."""
    pool_file.touch(0o600)  # an empty file is taken
    with DaemonProcess("32MiB", pool_file=str(pool_file)) as daemon:
        store(daemon)
        for position, content in ((3, b"N"), (8, b"\x63"), (58, b"\xff")):
            daemon.kill()
            before = pool_file.stat().st_ino
            overwrite(pool_file, position, content)
            assert "damaged" in starts_empty(daemon), position
            assert pool_file.stat().st_ino != before
        daemon.kill()
        os.truncate(pool_file, 16 * MIB)
        starts_empty(daemon)
        daemon.stop()
        daemon.flags["pool-size"] = "48MiB"
        reason = starts_empty(daemon)
        assert "32.0 MiB" in reason
        assert "48.0 MiB" in reason
        assert books(daemon.directory).pool.size_bytes == 48 * MIB


def test_pool_file_with_a_flipped_byte_or_a_hole_is_used(in_file: DaemonProcess, pool_file: Path) -> None:
    """The byte of a record costs its block alone; a hole is filled before a missing page can kill the daemon."""
    truth = store(in_file, world_size=1)
    in_file.kill()
    # Records have the key in them; the pool's bytes are random.
    overwrite(pool_file, pool_file.read_bytes().index(KEYS[BLOCKS - 1]) + 31, b"\xee")
    in_file.start()
    assert len(load(in_file, truth, world_size=1)) == BLOCKS - 1
    assert re.search(r"15 blocks .* are ready", in_file.log)
    assert "Dropped 1 pool slot at recovery: damaged" in in_file.log
    in_file.kill()
    size = pool_file.stat().st_size
    hole = ["--punch-hole", "--offset", str(size - 4 * MIB), "--length", str(2 * MIB)]
    subprocess.run(["fallocate", *hole, str(pool_file)], check=True)
    in_file.start()
    assert pool_file.stat().st_blocks * 512 >= size
    assert len(load(in_file, truth, world_size=1)) == BLOCKS - 1


# --- quotas, and what the policy learned ---------------------------------------------------------------


def set_quota(daemon: DaemonProcess, most: str, status: int = 0) -> str:
    """``kvoffd-cli namespaces quota``; what it prints."""
    found, text = command(daemon, "namespaces", "quota", "demo", "--max", most)
    assert found == status, text
    return text


def namespace(daemon: DaemonProcess, label: str) -> NamespaceStats:
    return next(one for one in books(daemon.directory).namespaces.values() if one.model == label)


def use(daemon: DaemonProcess) -> None:
    """Store two blocks; look up others."""
    with FakeEngine(daemon.directory) as engine:
        assert engine.store(keys(1, 2), [0, 1]).ok
        assert engine.lookup(keys(1, 2, 3)) == 2
        assert engine.lookup(keys(1, 4, 5, 6)) == 1


def learned_requests(daemon: DaemonProcess) -> int:
    """Requests that what the policy knows is made of."""
    with AdminClient(daemon.directory) as admin:
        return admin.stats().learned.requests


def test_a_quota_that_cannot_be_written_down_holds_and_is_written_when_the_daemon_ends(pool_file: Path) -> None:
    with DaemonProcess("16MiB", pool_file=str(pool_file), eviction_policy="lru") as daemon:
        file = daemon.directory / "kvoffd.state"
        use(daemon)
        (in_the_way := Path(f"{file}.new")).mkdir()
        assert f"{file} cannot be written: [Errno 21]" in set_quota(daemon, "4MiB", status=2)
        assert namespace(daemon, "demo").quota_bytes == 4 * MIB, "it holds"
        assert books(daemon.directory).problems == {"state_unwritable": 1}
        in_the_way.rmdir()
        daemon.stop()
        daemon.start()
        assert namespace(daemon, "demo").quota_bytes == 4 * MIB, "the end of the daemon tries it again"


def test_policy_of_the_next_daemon_knows_what_was_learned(tmp_path: Path) -> None:
    """A link in the file's place is neither followed nor written through."""
    other = tmp_path / "other"
    other.write_bytes(b"mine")
    with DaemonProcess("16MiB", eviction_policy="learned") as daemon:
        file = daemon.directory / "kvoffd.policy"
        Path(f"{file}.new").symlink_to(other)
        use(daemon)
        known = learned_requests(daemon)
        assert known
        assert daemon.stop() == 0
        assert file.read_bytes().startswith(b"learned\n")
        assert file.stat().st_mode & 0o777 == 0o600
        assert not file.is_symlink()
        daemon.start()
        assert learned_requests(daemon) == known
        assert "Ignoring the policy state" not in daemon.log
        daemon.stop()
        file.unlink()
        file.symlink_to(other)
        daemon.start()
        assert learned_requests(daemon) == 0
        assert "Ignoring the policy state" in daemon.log
        assert other.read_bytes() == b"mine"


def test_state_files_of_no_use_are_logged_and_left_out(pool_file: Path) -> None:
    """A file that is cut, flipped, another's or no file at all keeps no daemon from its start. The pool is void."""
    with DaemonProcess("16MiB", pool_file=str(pool_file), eviction_policy="learned") as daemon:
        use(daemon)
        set_quota(daemon, "8MiB")
        policy, state = daemon.directory / "kvoffd.policy", daemon.directory / "kvoffd.state"
        daemon.stop()
        good = {file: file.read_bytes() for file in (policy, state)}
        assert f":{8 * MIB}}}".encode() in good[state]
        for damaged in ({policy: good[policy][:-1], state: good[state][:20]}, {policy: b"", state: b""}, {}):
            said = len(daemon.log)
            for file in (policy, state):
                file.unlink(missing_ok=True)
                if damaged:
                    file.write_bytes(damaged[file])
                else:
                    os.mkfifo(file)
            daemon.start()
            assert learned_requests(daemon) == 0
            with FakeEngine(daemon.directory) as engine:
                assert engine.lookup(keys(1)) == 0, "nobody knows whether it was cleared"
                assert namespace(daemon, "demo").quota_bytes is None
            for file in (policy, state):
                pattern = f"(Ignoring the policy state in|Cannot use these parts of) {re.escape(str(file))}[:,]"
                wait_until(lambda pattern=pattern, said=said: re.search(pattern, daemon.log[said:]))  # type: ignore[misc]
            daemon.kill()


# --- kills under load ---------------------------------------------------------------------------------

KILLS = int(os.environ.get("RESTART_KILLS", "2"))
ENGINES = 2
MAX_BATCHES = 24
"""Stores of one engine in one life; the pool holds those of several lives, so that nothing is evicted."""
LIVES_IN_POOL = 4


class Loader:
    """One engine that stores batches of new keys and loads old ones, as fast as it can, until its daemon dies."""

    def __init__(self, daemon: DaemonProcess, number: int) -> None:
        self.engine = CheckedEngine(daemon, Truth(), page_bytes=16384, layers=4)
        self.stored: list[range] = []
        """Batches whose store was reported as done."""
        self._next = number << 32
        self.loads = 0

    def run(self, dead: threading.Event) -> None:
        rng, most = random.Random(self._next), len(self.stored) + MAX_BATCHES
        try:
            while not dead.is_set():
                if len(self.stored) < most and (not self.stored or rng.random() < 0.6):
                    batch = range(self._next, self._next + STEP)
                    self._next += STEP
                    self.engine.put(batch)
                    self.stored.append(batch)
                else:
                    self.engine.get(rng.choice(self.stored), 5.0)
                    self.loads += 1
        except AssertionError as error:
            # What was under way when the daemon died has failed, and may be there or not, but must never be wrong.
            if "served" in str(error) or not dead.is_set():
                raise

    def back(self) -> int:
        """How many blocks are there. All of them are right, those of stores that failed too."""
        self.engine.get(self.engine.truth.keys() - {number for batch in self.stored for number in batch})
        return sum(len(self.engine.get(batch)) for batch in self.stored)


def one_life(daemon: DaemonProcess, loaders: list[Loader], rng: random.Random) -> None:
    """Let the engines work, and kill the daemon at some time after a number of stores."""
    dead = threading.Event()
    enough = sum(len(loader.stored) for loader in loaders) + rng.randrange(8, MAX_BATCHES)
    with ThreadPoolExecutor(ENGINES) as threads:
        running = [threads.submit(loader.run, dead) for loader in loaders]
        try:
            wait_until(
                lambda: sum(len(loader.stored) for loader in loaders) >= enough or any(one.done() for one in running),
                interval_s=rng.uniform(0.001, 0.02),
            )
        finally:
            dead.set()
            daemon.kill()
    for one in running:
        one.result()


@pytest.mark.timeout(120 + 10 * KILLS)
def test_restart_after_kills_under_load_loses_no_ready_block(pool_file: Path) -> None:
    block_bytes = 4 * 16384
    pool_bytes = int(ENGINES * MAX_BATCHES * STEP * block_bytes * LIVES_IN_POOL * 1.2)
    rng = random.Random(KILLS)
    ready_before = back = 0
    with DaemonProcess(str(pool_bytes), pool_file=str(pool_file)) as daemon:
        loaders = [Loader(daemon, number) for number in range(ENGINES)]
        for life in range(KILLS):
            one_life(daemon, loaders, rng)
            daemon.start()
            for loader in loaders:
                assert loader.engine.wait_ready(20)
                back += loader.back()
                ready_before += sum(map(len, loader.stored))
            if life % LIVES_IN_POOL == LIVES_IN_POOL - 1:
                with AdminClient(daemon.directory) as admin:
                    admin.clear()
                for loader in loaders:
                    loader.stored.clear()
                    loader.engine.truth.clear()
        assert "Traceback" not in daemon.log
        for loader in loaders:
            loader.engine.close()
    loads = sum(loader.loads for loader in loaders)
    print(f"{KILLS} kills: {back} of {ready_before} ready blocks were back, {loads} loads of {STEP} under load")
    assert ready_before > 100 * KILLS
    assert back >= 0.999 * ready_before


def test_a_second_signal_ends_the_daemon_at_once(pool_file: Path) -> None:
    """Though a job could take a minute more. Others see an orderly end, and the pool is kept."""
    with (
        DaemonProcess("16MiB", faults=True, pool_file=str(pool_file), shutdown_deadline="60s") as daemon,
        CheckedEngine(daemon) as engine,
        ThreadPoolExecutor(1) as others,
    ):
        engine.put(range(8))
        with daemon.fault("store waits"):
            running = others.submit(engine.store, keys(100), [0], 60.0)
            wait_until(lambda: books(daemon.directory).store.running_jobs == 1)
            daemon.process.send_signal(signal.SIGTERM)
            daemon.wait_log("1 jobs may finish")
            daemon.process.send_signal(signal.SIGINT)
            assert daemon.process.wait(30.0) == 128 + signal.SIGINT
            assert not running.result(30.0).ok
        assert "A second signal came" in daemon.log
        assert not list(daemon.directory.glob("*.sock"))
        daemon.start()
        assert engine.wait_ready(30.0)
        assert engine.has(range(8))
