"""One real engine through everything that may become of its daemon. It is never restarted for it."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import zmq

from kvoffd_client import AdminClient
from tests.chaos.supervisor import Supervisor
from tests.kit.amount import TIMES
from tests.kit.closing import Closing
from tests.kit.command import run_cli
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import (
    BLOCK_TOKENS,
    EngineProcess,
    cached,
    completions,
    full_blocks,
    prompt,
    tokens,
    wait_books,
    wait_connected,
)
from tests.kit.ports import free_port
from tests.kit.redis_server import PROGRAM as REDIS
from tests.kit.redis_server import RedisServer
from tests.kit.require import require, require_nixl
from tests.kit.waiting import wait_until
from tests.kit.wire import Books, KvSubscriber, books, reports
from tests.vllm.engine_home import EngineHome

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

LENGTHS = [1500, 900, 1200]
FULL = [full_blocks(length) for length in LENGTHS]
BLOCKS = sum(length // BLOCK_TOKENS for length in LENGTHS)
DEADLINE_S = 60.0
SHM = Path("/dev/shm")
CHAOS_ROUNDS = 2 * TIMES
CHAOS_LENGTHS = [1500, 300, 900, 1200, 700, 400]
CHAOS_TOKENS = 24
KINDS = ("kill", "stop until the watchdog", "stop shortly", "terminate")
LONG = 2000
LONG_PROMPTS = [prompt(seed, LONG) for seed in range(200, 204)]
COUNTERS = "prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_hits"
LONG_BLOCKS = LONG // BLOCK_TOKENS
TCP = {"UCX_TLS": "tcp"}
"""Peers of one machine would share memory otherwise."""


class Harness:
    """The engine, the daemon beside it, and what the prompts give without a daemon."""

    def __init__(self, home: EngineHome) -> None:
        self.home = home
        self.daemon = home.daemon
        self.prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
        self.chaos_prompts = [prompt(100 + seed, length) for seed, length in enumerate(CHAOS_LENGTHS)]
        home.ensure_no_daemon()
        home.engine.forget()
        self.expected = tokens(self.engine.generate(self.prompts))
        answers = self.engine.generate(self.chaos_prompts, CHAOS_TOKENS)
        assert all(answer.cached == 0 for answer in answers)
        self.chaos_expected = tokens(answers)

    @property
    def engine(self) -> EngineProcess:
        return self.home.engine

    def clear(self) -> None:
        """A daemon runs, and neither it nor the engine has any block."""
        self.home.ensure_daemon()
        self.engine.forget()
        with AdminClient(self.home.directory) as admin:
            admin.clear()

    def ensure_stored(self) -> None:
        """All prompts' blocks are in the daemon, nothing else is, and the engine has none of its own."""
        self.clear()
        self.engine.generate(self.prompts)
        self.until(lambda found: found.ready_blocks == BLOCKS)
        self.engine.forget()

    def check_loaded(self) -> None:
        """Every full block of the prompts is loaded, and their tokens are right."""
        answers = self.engine.generate(self.prompts)
        assert tokens(answers) == self.expected
        assert cached(answers) == FULL

    def until(self, condition: Callable[[Books], object]) -> Books:
        return wait_books(self.home.directory, condition, DEADLINE_S)

    def failed_loads(self) -> float:
        return self.engine.metrics().get("vllm:kvoffd_failed_loads", 0)


@pytest.fixture(scope="module")
def harness(home: EngineHome) -> Harness:
    return Harness(home)


def test_engine_without_a_daemon_uses_it_once_it_is_there(harness: Harness) -> None:
    """And its own cache cleared, it loads each full block."""
    harness.home.ensure_no_daemon()
    assert [answer.cached for answer in harness.engine.generate([prompt(50, 400)])] == [0]
    harness.ensure_stored()
    harness.check_loaded()


def test_daemon_killed_while_it_loads(harness: Harness) -> None:
    """No request fails, no token changes, and hits are back with the daemon."""
    harness.ensure_stored()
    before = harness.failed_loads()
    with harness.daemon.fault("load slow 30"):
        harness.engine.begin("generate", prompts=harness.prompts, max_tokens=8)
        harness.until(lambda found: found.load.running_jobs + found.load.queued_jobs >= len(LENGTHS))
        harness.daemon.kill()
        answers = completions(harness.engine.finish())
    assert tokens(answers) == harness.expected
    assert [answer.finish for answer in answers] == ["length"] * 3
    assert harness.failed_loads() >= before + 3
    harness.ensure_stored()
    harness.check_loaded()


def test_failed_loads_are_recomputed(harness: Harness) -> None:
    """Whatever the engine's kv_load_failure_policy is, and their blocks are not believed again."""
    assert "kv_load_failure_policy was 'fail' and is now 'recompute'" in harness.engine.log
    harness.ensure_stored()
    before = harness.failed_loads()
    dropped = sum(one.invalidated_blocks for one in books(harness.home.directory).namespaces.values())
    with harness.daemon.fault("load fails"):
        answers = harness.engine.generate(harness.prompts)
    assert tokens(answers) == harness.expected
    assert [answer.finish for answer in answers] == ["length"] * 3
    # One failure a request: none was looked up again.
    assert harness.failed_loads() == before + 3
    # vLLM 0.33 stores the recomputed blocks at once, 0.32 with the next request that has them.
    wanted = dropped + sum(FULL) // BLOCK_TOKENS
    harness.until(lambda found: sum(one.invalidated_blocks for one in found.namespaces.values()) == wanted)


def test_a_daemon_that_lies_changes_tokens(harness: Harness) -> None:
    """The control: so these tests can fail."""
    harness.ensure_stored()
    with harness.daemon.fault("load lies"):
        answers = harness.engine.generate(harness.prompts)
    assert all(answer.cached > 0 for answer in answers)
    assert all(answer.tokens != expected for answer, expected in zip(answers, harness.expected, strict=True))
    harness.engine.forget()
    assert tokens(harness.engine.generate(harness.prompts)) == harness.expected


def test_a_daemon_that_hangs_is_a_cache_miss(harness: Harness) -> None:
    harness.ensure_stored()
    os.kill(harness.daemon.pid, signal.SIGSTOP)
    try:
        [answer] = harness.engine.generate([prompt(60, 500)])
    finally:
        os.kill(harness.daemon.pid, signal.SIGCONT)
    assert answer.cached == 0
    assert answer.finish == "length"


def test_blocks_come_back_after_sleep(harness: Harness) -> None:
    harness.ensure_stored()
    harness.engine.call("nap", level=1)
    harness.home.ensure_daemon()
    harness.check_loaded()


class EngineEvents(Closing):
    """Takes in what is published at ``endpoint``, as maps: vLLM's classes take 15 seconds of a CPU to import. Events of
    the engine's own cache do not count."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self._events: list[dict[str, Any]] = []

    def read(self) -> None:
        """Take in what has come."""
        while self._socket.poll(0):
            _topic, sequence, payload = self._socket.recv_multipart()
            assert len(sequence) == 8
            _, events, *_ = msgspec.msgpack.decode(payload)
            self._events.extend(events)

    @property
    def cleared(self) -> bool:
        """Whether all blocks were removed at once."""
        return bool(self._of("AllBlocksCleared"))

    @property
    def stored(self) -> set[int]:
        """Hashes of the blocks that were stored."""
        return self._hashes("BlockStored")

    @property
    def removed(self) -> set[int]:
        return self._hashes("BlockRemoved")

    @property
    def described(self) -> dict[tuple[int, ...], int]:
        """Hashes of the blocks that were stored, by their tokens."""
        return {
            tuple(event["token_ids"][number * BLOCK_TOKENS :][:BLOCK_TOKENS]): short_hash(item)
            for event in self._of("BlockStored")
            for number, item in enumerate(event["block_hashes"])
        }

    def _of(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind, but for those of the engine's own cache."""
        return [one for one in self._events if one["type"] == kind and one.get("medium", "CPU") == "CPU"]

    def _hashes(self, kind: str) -> set[int]:
        return {short_hash(item) for event in self._of(kind) for item in event["block_hashes"]}

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def short_hash(item: int | bytes) -> int:
    """As the integer that vLLM's publisher makes of it by default."""
    return item if isinstance(item, int) else int.from_bytes(item, "big") & (1 << 64) - 1


def stored_in(daemon: KvSubscriber) -> set[int]:
    events = [event for message in daemon.messages() for event in message.events if event.kind == "stored"]
    return {short_hash(key) for event in events for key in event.keys}


def test_kv_events_of_engine_and_daemon(harness: Harness) -> None:
    """The engine's stream has the daemon's stores and removals, with the tokens of each block."""
    harness.clear()
    harness.engine.generate([prompt(71, 16)], max_tokens=2)  # which says that the engine's own blocks were cleared
    wanted = prompt(70, 10 * BLOCK_TOKENS)
    with EngineEvents(harness.home.events_endpoint) as engine, KvSubscriber(harness.home.directory) as daemon:
        fresh = count(72)

        def heard() -> bool:
            """A subscription takes effect some time after it was made; what is published before is not for it."""
            harness.engine.generate([prompt(next(fresh), 2 * BLOCK_TOKENS)], max_tokens=2)
            engine.read()
            return bool(engine.stored)

        wait_until(heard, DEADLINE_S)
        harness.engine.generate([wanted], max_tokens=4)

        def wait_for_events(condition: Callable[[], bool]) -> None:
            def step() -> bool:
                harness.engine.generate([prompt(71, 16)], max_tokens=2)  # events leave the engine with its steps
                engine.read()
                return condition()

            wait_until(step, DEADLINE_S)

        # Ten blocks whose tokens, as the engine's events describe them, are those of the prompt, in any order.
        chunks = {tuple(wanted[start : start + BLOCK_TOKENS]) for start in range(0, len(wanted), BLOCK_TOKENS)}
        wait_for_events(lambda: chunks <= engine.described.keys())
        wait_for_events(lambda: {engine.described[chunk] for chunk in chunks} <= stored_in(daemon))
        with AdminClient(harness.home.directory) as admin:
            admin.clear()
        wait_for_events(lambda: engine.removed >= engine.stored)
        assert any(event.kind == "cleared" for message in daemon.messages()[1:] for event in message.events)
        assert not engine.cleared, "the engine's own blocks are still there"


@pytest.fixture
def supervisor(harness: Harness) -> Iterator[Supervisor]:
    """In the place of the harness's daemon one that is started again, with its old pool, whenever it ends."""
    require("shm", os.access(SHM, os.W_OK), "/dev/shm is not there")
    harness.home.ensure_no_daemon()
    with TemporaryDirectory(dir=SHM) as pool:
        started = Supervisor("256MiB", Path(pool) / "pool", directory=harness.home.directory).start()
        try:
            yield started
        finally:
            started.close()


def wait_serving(harness: Harness, supervisor: Supervisor, lives: int = 1) -> None:
    """Until so many daemons were started, the last one serves, and the engine is connected to it."""
    supervisor.wait_serving(lives)
    wait_connected(harness.home.directory, 1, DEADLINE_S, lambda: harness.engine.pids)


def strike(supervisor: Supervisor, kind: str, rng: random.Random) -> None:
    match kind:
        case "kill":
            supervisor.signal(signal.SIGKILL)
        case "terminate":
            supervisor.signal(signal.SIGTERM)
        case "stop until the watchdog":
            supervisor.signal(signal.SIGSTOP)
        case _:
            supervisor.signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0.05, 0.6))
            supervisor.signal(signal.SIGCONT)


@pytest.mark.timeout(400 + 20 * CHAOS_ROUNDS)
def test_chaos(harness: Harness, supervisor: Supervisor) -> None:
    """The daemon is killed and stopped at random: no request fails, and no token changes."""
    seed = random.SystemRandom().getrandbits(31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    struck: Counter[str] = Counter()
    loaded = 0
    for number in range(CHAOS_ROUNDS):
        wait_serving(harness, supervisor)
        harness.engine.forget()
        order = rng.sample(range(len(CHAOS_LENGTHS)), rng.randint(3, len(CHAOS_LENGTHS)))
        lives = supervisor.lives
        prompts = [harness.chaos_prompts[place] for place in order]
        harness.engine.begin("generate", prompts=prompts, max_tokens=CHAOS_TOKENS)
        time.sleep(rng.uniform(0.0, 0.8))  # the strike comes at any time
        kind = KINDS[number] if number < len(KINDS) else rng.choice(KINDS)
        struck[kind] += 1
        strike(supervisor, kind, rng)
        answers = completions(harness.engine.finish())
        assert tokens(answers) == [harness.chaos_expected[place] for place in order], (number, kind)
        assert all(answer.finish == "length" for answer in answers)
        loaded += sum(answer.cached for answer in answers)
        supervisor.wait_serving(lives + (kind != "stop shortly"))
    print(f"{CHAOS_ROUNDS} rounds {dict(struck)}: {loaded} tokens loaded, {supervisor.lives} daemons")


def one_by_one(engine: EngineProcess, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Tokens of the prompts, and how many of each were not computed."""
    answers = [engine.generate([one])[0] for one in prompts]
    return tokens(answers), cached(answers)


def _reports(directory: Path, count: int) -> list[Any] | None:
    """The reports of prompts under this daemon, once there are so many."""
    found = [one for one in reports(directory) if not one.again]
    return found if len(found) >= count else None


def test_blocks_come_back_from_disk(harness: Harness, tmp_path: Path) -> None:
    """The pool is too small for the prompts, the disk holds them, also after the daemon was restarted."""
    home, engine, every = harness.home, harness.engine, len(LONG_PROMPTS) * LONG_BLOCKS
    home.ensure_no_daemon()
    engine.forget()

    def promoted() -> int:
        return books(home.directory).tiers.promoted_blocks

    def on_disk(found: Books) -> bool:
        return found.disks[0].blocks >= every

    def at_rest(found: Books) -> bool:
        return not (found.store.queued_jobs or found.store.running_jobs or found.tiers.writes_waiting)

    with DaemonProcess(
        "24MiB", home.directory, disk=f"{tmp_path}=256MiB", disk_write="always", disk_deadline="60s"
    ) as daemon:
        wait_connected(home.directory, pids=lambda: engine.pids)
        computed, _ = one_by_one(engine, LONG_PROMPTS)
        for _ in range(10):
            if on_disk(harness.until(lambda found: on_disk(found) or at_rest(found))):
                break
            # The machine stood still: a prompt's last blocks were more than the daemon takes at a time.
            engine.forget()
            assert one_by_one(engine, LONG_PROMPTS)[0] == computed
        found = books(home.directory)
        assert on_disk(found)
        assert found.ready_blocks < every, "the pool should be too small"
        engine.forget()
        read = engine.call("tokens_by_source", cached=True).get("disk", 0)
        assert one_by_one(engine, LONG_PROMPTS[:1]) == (computed[:1], [full_blocks(LONG)])
        assert promoted() > 0
        assert engine.call("tokens_by_source", cached=True)["disk"] > read

        daemon.stop()
        daemon.start()
        wait_connected(home.directory, pids=lambda: engine.pids)
        assert harness.until(on_disk).ready_bytes == 0
        for number in range(1, 11):
            engine.forget()
            found = one_by_one(engine, LONG_PROMPTS)
            said = wait_until(partial(_reports, home.directory, number * len(LONG_PROMPTS)))
            if all(one.outcome != "late" for one in said[-len(LONG_PROMPTS) :]):
                break  # else the machine stood still for longer than a prompt waits
        assert found == (computed, [full_blocks(LONG)] * len(LONG_PROMPTS)), said
        assert promoted() >= len(LONG_PROMPTS) * (full_blocks(LONG) // BLOCK_TOKENS)
        assert not any(books(home.directory).tiers.promotions_failed.values())


def test_no_memory_is_advised_that_nothing_would_use(harness: Harness) -> None:
    """The pool is full and evicts or rejects, but vLLM's own cache has what is asked for again: percentages agree."""
    home, engine, prompts = harness.home, harness.engine, [prompt(seed, 1921) for seed in range(300, 305)]
    home.ensure_no_daemon()
    with DaemonProcess("24MiB", home.directory), AdminClient(home.directory) as admin:
        wait_connected(home.directory, pids=lambda: engine.pids)
        engine.generate([prompt(299, 65)], max_tokens=1)
        wait_until(lambda: admin.stats().since_start.prompt_tokens)  # reports of prompts of the tests before are here
    engine.forget()

    def counters() -> list[float]:
        return [engine.metrics()[f"vllm:{name}"] for name in COUNTERS]

    with DaemonProcess("24MiB", home.directory), AdminClient(home.directory) as admin:
        wait_connected(home.directory, pids=lambda: engine.pids)
        before = counters()
        for _ in range(5):
            engine.generate(prompts, max_tokens=1)
        asked = 5 * sum(len(one) // BLOCK_TOKENS for one in prompts)
        wait_until(lambda: admin.stats().since_start.asked_keys == asked, explain=lambda: admin.stats().since_start)
        queries, own, loaded = (after - was for after, was in zip(counters(), before, strict=True))
        now = admin.stats().since_start
        found = [now.not_needed_keys, now.loaded_keys, sum(now.misses.values())]
        assert [100 * count / asked for count in found] == pytest.approx(
            [100 * count / queries for count in (own, loaded, queries - own - loaded)], abs=1.0
        )
        wait_until(lambda: (now := admin.stats().since_start).evicted_blocks or now.rejected_keys)  # stores come later
        report = json.loads(run_cli("doctor", "--json", "--directory", str(home.directory)).stdout)
    assert not {one["check"] for one in report["findings"]} & {"pool_too_small", "starving", "thrash"}, report
    assert not report["paying_off"]
    assert "the engines' own caches had" in " ".join(report["verdict"])


def test_blocks_come_from_another_nodes_store(harness: Harness) -> None:
    """What one daemon wrote to Redis the next one, whose own pool is empty, loads from there: another node."""
    require("redis", REDIS, "there is no redis-server; `make servers` installs it")
    home, engine, prompts = harness.home, harness.engine, LONG_PROMPTS[:2]
    home.ensure_no_daemon()
    engine.forget()
    with RedisServer() as server:
        flags = {"shared": server.url, "shared_write": "always", "shared_deadline": "60s", "shared_ask_deadline": "5s"}
        with DaemonProcess("64MiB", home.directory, **flags):
            wait_connected(home.directory, pids=lambda: engine.pids)
            computed, cached = one_by_one(engine, prompts)
            assert cached == [0, 0]
            harness.until(lambda found: found.shared[0].written_blocks >= len(prompts) * LONG_BLOCKS)
        engine.forget()
        with DaemonProcess("64MiB", home.directory, **flags):
            wait_connected(home.directory, pids=lambda: engine.pids)
            harness.until(lambda found: found.shared[0].up)
            assert one_by_one(engine, prompts) == (computed, [full_blocks(LONG)] * 2)
            (shared,) = books(home.directory).shared
    assert shared.read_blocks >= len(prompts) * (full_blocks(LONG) // BLOCK_TOKENS)
    assert shared.mismatches == 0


def test_blocks_come_from_another_nodes_pool(harness: Harness, pool_file: Path, tmp_path: Path) -> None:
    """What one node's pool has the engine of another, whose own is empty, loads from there."""
    require_nixl()
    home, engine, prompts = harness.home, harness.engine, LONG_PROMPTS[:2]
    home.ensure_no_daemon()
    engine.forget()
    (tmp_path / "secret").write_text("a secret for tests")
    address, secret = f"127.0.0.1:{free_port()}", str(tmp_path / "secret")
    lends: dict[str, Any] = {"pool_file": str(pool_file), "peer_secret_file": secret, "peer_listen": address}
    reads: dict[str, Any] = {
        "peers": address,
        "peer_secret_file": secret,
        "shared_deadline": "60s",
        "shared_ask_deadline": "5s",
    }
    with DaemonProcess("64MiB", home.directory, pool_file=str(pool_file)):
        wait_connected(home.directory, pids=lambda: engine.pids)
        computed, cached = one_by_one(engine, prompts)
        assert cached == [0, 0]
        harness.until(lambda found: found.ready_blocks >= len(prompts) * LONG_BLOCKS)
    engine.forget()
    with DaemonProcess("64MiB", environ=TCP, **lends), DaemonProcess("64MiB", home.directory, environ=TCP, **reads):
        wait_connected(home.directory, pids=lambda: engine.pids)
        harness.until(lambda found: found.shared[0].up)
        assert one_by_one(engine, prompts) == (computed, [full_blocks(LONG)] * 2)
        (peer,) = books(home.directory).shared
    assert peer.read_blocks >= len(prompts) * (full_blocks(LONG) // BLOCK_TOKENS)
    assert peer.mismatches == 0
