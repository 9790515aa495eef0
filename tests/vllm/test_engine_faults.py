"""One real engine through everything that may become of its daemon. It is never restarted for it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self, TypeVar

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch

from kvoffd_client import AdminClient, DaemonUnavailable
from kvoffd_proto.messages import StatsReply
from kvoffd_proto.sockets import SocketPaths
from tests.chaos.supervisor import Supervisor
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import (
    BLOCK_TOKENS,
    Completion,
    EngineProcess,
    completions,
    full_blocks,
    prompt,
    ready_blocks,
    tokens,
    wait_connected,
    wait_stats,
)
from tests.kit.faulty_daemon import FaultyDaemon
from tests.kit.models import make_tiny_llama
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

T = TypeVar("T")
LENGTHS = [1500, 900, 1200]
DEADLINE_S = 30.0
SHM = Path("/dev/shm")
CHAOS_ROUNDS = int(os.environ.get("ENGINE_CHAOS_ROUNDS", "8"))
CHAOS_LENGTHS = [1500, 300, 900, 1200, 700, 400]
CHAOS_TOKENS = 24
CHAOS_DEADLINE_S = 60.0
DISK_LENGTH = 3000
DISK_DEADLINE_S = 60.0
KINDS = ("kill", "kill", "terminate", "stop until the watchdog", "stop shortly")


class Harness:
    """A daemon (not started), an engine that reports KV events, and what the prompts give without a daemon."""

    def __init__(self, model: Path) -> None:
        self.daemon = FaultyDaemon("256MiB")
        self.events_endpoint = f"ipc://{self.daemon.directory}/engine-events.sock"
        self.engine = EngineProcess(
            model,
            self.daemon.directory,
            extra_config={
                "self_describing_kv_events": True,
                "lookup_deadline_ms": 2000,
                # A machine busy with other tests may read slowly; a block that is given up would fail a test.
                "disk_wait": "wait",
            },
            events={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.events_endpoint},
        )
        self.prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
        self.expected: list[list[int]] = []
        self.chaos_prompts = [prompt(100 + seed, length) for seed, length in enumerate(CHAOS_LENGTHS)]
        self.chaos_expected: list[list[int]] = []

    def ensure_daemon(self) -> None:
        """Running, with the engine connected to it: each test begins so."""
        if not self.daemon.running:
            self.daemon.start()
        with AdminClient(self.daemon.directory) as admin:
            wait_connected(admin)

    def ensure_no_daemon(self) -> None:
        if self.daemon.running:
            self.daemon.kill()

    def ensure_stored(self) -> None:
        """All prompts' blocks are in the daemon, nothing else is, and the engine has none of its own."""
        self.ensure_daemon()
        with AdminClient(self.daemon.directory) as admin:
            admin.clear()
        self.engine.forget()
        self.engine.generate(self.prompts)
        wanted = sum(length // BLOCK_TOKENS for length in LENGTHS)
        self.until(lambda stats: ready_blocks(stats) == wanted)
        self.engine.forget()

    def until(self, condition: Callable[[StatsReply], bool]) -> StatsReply:
        with AdminClient(self.daemon.directory) as admin:
            return wait_stats(admin, condition, DEADLINE_S)

    def failed_loads(self) -> float:
        return self.engine.metrics().get("vllm:kvoffd_failed_loads", 0)


class Subscriber:
    """Reads KV events as vLLM's own example subscriber does, with vLLM's own decoder."""

    def __init__(self, endpoint: str, topic: bytes) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.subscribe(topic)
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        self._events: list[KVCacheEvent] = []

    def read(self) -> None:
        """Take in what has come."""
        while self._socket.poll(0):
            _topic, sequence, payload = self._socket.recv_multipart()
            assert len(sequence) == 8
            self._events.extend(self._decoder.decode(payload).events)

    def of(self, kind: type[T]) -> list[T]:
        """Events of a kind, but for those of the engine's own cache."""
        return [event for event in self._events if isinstance(event, kind) and getattr(event, "medium", "CPU") == "CPU"]

    def hashes(self, kind: type[BlockStored] | type[BlockRemoved]) -> set[int]:
        """Their block hashes."""
        return {short_hash(item) for event in self.of(kind) for item in event.block_hashes}

    def described(self) -> dict[tuple[int, ...], int]:
        """Hashes of the blocks that were stored, by their tokens."""
        found: dict[tuple[int, ...], int] = {}
        for event in self.of(BlockStored):
            for number, item in enumerate(event.block_hashes):
                found[tuple(event.token_ids[number * BLOCK_TOKENS :][:BLOCK_TOKENS])] = short_hash(item)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()


def short_hash(item: int | bytes) -> int:
    """As the integer that vLLM's publisher makes of it by default."""
    return item if isinstance(item, int) else int.from_bytes(item, "big") & (1 << 64) - 1


def invalidated_blocks(stats: StatsReply) -> int:
    return sum(item.invalidated_blocks for item in stats.namespaces)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    made = Harness(make_tiny_llama(tmp_path_factory.mktemp("models") / "model"))
    try:
        made.engine.start()
        made.expected = tokens(made.engine.generate(made.prompts))
        answers = made.engine.generate(made.chaos_prompts, CHAOS_TOKENS)
        assert all(answer.cached == 0 for answer in answers)
        made.chaos_expected = tokens(answers)
        yield made
    finally:
        made.engine.close()
        made.daemon.close()


def test_an_engine_starts_and_serves_without_a_daemon_and_uses_it_once_it_is_there(harness: Harness) -> None:
    assert not harness.daemon.running
    assert all(answer.cached == 0 for answer in harness.engine.generate([prompt(50, 400)]))
    harness.ensure_stored()
    answers = harness.engine.generate(harness.prompts)
    assert tokens(answers) == harness.expected
    assert [answer.cached for answer in answers] == [full_blocks(length) for length in LENGTHS]


def test_killing_the_daemon_while_loads_run_changes_no_token_and_hits_return(harness: Harness) -> None:
    harness.ensure_stored()
    before = harness.failed_loads()
    with harness.daemon.fault("load slow 30"):
        harness.engine.begin("generate", prompts=harness.prompts, max_tokens=8)
        harness.until(lambda stats: stats.load.running_jobs + stats.load.queued_jobs >= len(LENGTHS))
        harness.daemon.kill()
        answers = completions(harness.engine.finish())
    assert tokens(answers) == harness.expected
    assert [answer.finish for answer in answers] == ["length"] * 3
    assert harness.failed_loads() >= before + 3
    harness.ensure_stored()
    again = harness.engine.generate(harness.prompts)
    assert tokens(again) == harness.expected
    assert [answer.cached for answer in again] == [full_blocks(length) for length in LENGTHS]


def test_killing_the_daemon_while_stores_run_changes_no_token(harness: Harness) -> None:
    harness.ensure_daemon()
    others = [prompt(seed, 700) for seed in range(10, 14)]
    with harness.daemon.fault("store slow 30"):
        harness.engine.begin("generate", prompts=others, max_tokens=40)
        harness.until(lambda stats: stats.store.running_jobs > 0)
        harness.daemon.kill()
        first = completions(harness.engine.finish())
    harness.ensure_daemon()
    harness.engine.forget()
    assert tokens(harness.engine.generate(others, max_tokens=40)) == tokens(first)


def test_a_failed_load_is_recomputed_and_its_blocks_are_not_believed_again(harness: Harness) -> None:
    harness.ensure_stored()
    before = harness.failed_loads()
    dropped = invalidated_blocks(harness.until(lambda stats: True))
    with harness.daemon.fault("load fails"):
        answers = harness.engine.generate(harness.prompts)
    assert tokens(answers) == harness.expected
    assert [answer.finish for answer in answers] == ["length"] * 3
    # One failure a request: none was looked up again.
    assert harness.failed_loads() == before + 3
    # vLLM 0.33 stores the recomputed blocks at once, 0.32 with the next request that has them.
    wanted = sum(full_blocks(length) // BLOCK_TOKENS for length in LENGTHS)
    harness.until(lambda stats: invalidated_blocks(stats) == dropped + wanted)


def test_a_daemon_that_lies_changes_tokens_so_these_tests_can_fail(harness: Harness) -> None:
    harness.ensure_stored()
    with harness.daemon.fault("load lies"):
        answers = harness.engine.generate(harness.prompts)
    assert all(answer.cached > 0 for answer in answers)
    assert all(answer.tokens != expected for answer, expected in zip(answers, harness.expected, strict=True))
    harness.engine.forget()
    assert tokens(harness.engine.generate(harness.prompts)) == harness.expected


def test_a_daemon_that_hangs_is_a_cache_miss(harness: Harness) -> None:
    harness.ensure_stored()
    fresh = prompt(60, 500)
    os.kill(harness.daemon.pid, signal.SIGSTOP)
    try:
        [answer] = harness.engine.generate([fresh])
    finally:
        os.kill(harness.daemon.pid, signal.SIGCONT)
    assert answer.cached == 0
    assert answer.finish == "length"


def test_vllms_subscriber_reads_stores_and_removals_from_the_engine_and_from_the_daemon(harness: Harness) -> None:
    harness.ensure_daemon()
    wanted = prompt(70, 10 * BLOCK_TOKENS)
    daemon_endpoint = f"ipc://{SocketPaths(harness.daemon.directory).events}"
    with Subscriber(harness.events_endpoint, b"") as engine, Subscriber(daemon_endpoint, b"kv@") as daemon:
        fresh = count(72)

        def heard() -> bool:
            """A subscription takes effect some time after it was made; what is published before is not for it."""
            harness.engine.generate([prompt(next(fresh), 2 * BLOCK_TOKENS)], max_tokens=2)
            engine.read()
            daemon.read()
            return bool(engine.of(BlockStored) and daemon.of(BlockStored))

        wait_until(heard, DEADLINE_S)
        harness.engine.generate([wanted], max_tokens=4)

        def wait_for_events(condition: Callable[[], bool]) -> None:
            def step() -> bool:
                harness.engine.generate([prompt(71, 16)], max_tokens=2)  # events leave the engine with its steps
                engine.read()
                daemon.read()
                return condition()

            wait_until(step, DEADLINE_S)

        # Ten blocks whose tokens, as the engine's events describe them, are those of the prompt, in any order.
        chunks = {tuple(wanted[start : start + BLOCK_TOKENS]) for start in range(0, len(wanted), BLOCK_TOKENS)}
        wait_for_events(lambda: chunks <= engine.described().keys())
        wait_for_events(lambda: {engine.described()[chunk] for chunk in chunks} <= daemon.hashes(BlockStored))
        with AdminClient(harness.daemon.directory) as admin:
            admin.clear()
        wait_for_events(lambda: engine.hashes(BlockRemoved) >= engine.hashes(BlockStored))
        assert daemon.of(AllBlocksCleared)
        assert not engine.of(AllBlocksCleared), "the engine's own blocks are still there"


@pytest.fixture
def supervisor(harness: Harness) -> Iterator[Supervisor]:
    """In the place of the harness's daemon one that is started again, with its old pool, whenever it ends."""
    if not os.access(SHM, os.W_OK):
        pytest.skip("/dev/shm is not there")
    harness.ensure_no_daemon()
    with TemporaryDirectory(dir=SHM) as pool:
        started = Supervisor("256MiB", Path(pool) / "pool", harness.daemon.directory).start()
        try:
            yield started
        finally:
            started.close()


def stats_of(supervisor: Supervisor, blocks: int = 0) -> StatsReply:
    """Statistics once the engine is connected and at least so many blocks are ready."""
    supervisor.wait_serving(1)

    def found() -> StatsReply | None:
        try:
            with AdminClient(supervisor.directory) as admin:
                wait_connected(admin)
                return wait_stats(admin, lambda stats: ready_blocks(stats) >= blocks, CHAOS_DEADLINE_S)
        except DaemonUnavailable:
            return None  # on a busy machine the watchdog ends a daemon that was stopped shortly, only now

    return wait_until(found, CHAOS_DEADLINE_S)


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
def test_chaos_fails_no_request_and_changes_no_token(harness: Harness, supervisor: Supervisor) -> None:
    """The daemon is killed and stopped at random."""
    seed = random.SystemRandom().getrandbits(31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    struck: Counter[str] = Counter()
    loaded = longest = 0.0
    failed_before = harness.failed_loads()
    for number in range(CHAOS_ROUNDS):
        stats_of(supervisor)
        harness.engine.forget()
        order = rng.sample(range(len(CHAOS_LENGTHS)), rng.randint(3, len(CHAOS_LENGTHS)))
        lives = supervisor.lives
        begun = time.monotonic()
        prompts = [harness.chaos_prompts[place] for place in order]
        harness.engine.begin("generate", prompts=prompts, max_tokens=CHAOS_TOKENS)
        time.sleep(rng.uniform(0.0, 0.8))
        kind = rng.choice(KINDS)
        struck[kind] += 1
        strike(supervisor, kind, rng)
        answers = completions(harness.engine.finish())
        longest = max(longest, time.monotonic() - begun)
        assert tokens(answers) == [harness.chaos_expected[place] for place in order], (number, kind)
        assert all(answer.finish == "length" for answer in answers)
        loaded += sum(answer.cached for answer in answers)
        supervisor.wait_serving(lives + (kind != "stop shortly"))
    print(
        f"{CHAOS_ROUNDS} rounds {dict(struck)}: {loaded:.0f} tokens loaded, "
        f"{harness.failed_loads() - failed_before:.0f} loads failed and were recomputed, "
        f"longest round {longest:.1f} s, {supervisor.lives} daemons"
    )
    assert loaded > 0


def test_what_was_stored_before_a_kill_is_loaded_after_it_and_gives_the_same_tokens(
    harness: Harness, supervisor: Supervisor
) -> None:
    stats_of(supervisor)
    harness.engine.forget()
    harness.engine.generate(harness.chaos_prompts, CHAOS_TOKENS)
    before = stats_of(supervisor, blocks=sum(length // BLOCK_TOKENS for length in CHAOS_LENGTHS))
    supervisor.signal(signal.SIGKILL)
    supervisor.wait_serving(2)
    adopted = stats_of(supervisor)
    assert adopted.epoch != before.epoch
    assert adopted.pool.ready_bytes >= 0.999 * before.pool.ready_bytes
    harness.engine.forget()
    answers = harness.engine.generate(harness.chaos_prompts, CHAOS_TOKENS)
    assert tokens(answers) == harness.chaos_expected
    assert [answer.cached for answer in answers] == [full_blocks(length) for length in CHAOS_LENGTHS]
    after = stats_of(supervisor)
    assert after.epoch == adopted.epoch
    assert after.load.bytes > 0


def timed(engine: EngineProcess, wanted: list[int], salt: str | None = None) -> tuple[Completion, float]:
    """A prompt alone, and the time to its first token; the others follow at once."""
    started = time.monotonic()
    engine.generate([wanted], 1, salt=salt)
    seconds = time.monotonic() - started
    return engine.generate([wanted], salt=salt)[0], seconds


def test_blocks_come_back_from_disk_also_after_the_daemon_was_restarted(
    harness: Harness, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pool is too small for the prompts, the disk holds them."""
    engine, prompts = harness.engine, [prompt(seed, DISK_LENGTH) for seed in range(200, 204)]
    every = len(prompts) * (DISK_LENGTH // BLOCK_TOKENS)

    def on_disk(stats: StatsReply) -> bool:
        return stats.disks[0].blocks >= every

    harness.ensure_no_daemon()
    with DaemonProcess(
        "32MiB", harness.daemon.directory, disk=f"{tmp_path}=256MiB", disk_write="always", disk_deadline="60s"
    ) as daemon:
        with AdminClient(daemon.directory) as admin:
            wait_connected(admin)
            computed = [engine.generate([one])[0] for one in prompts]
            stats = wait_stats(admin, on_disk, DISK_DEADLINE_S)
            assert ready_blocks(stats) < every, "the pool should be too small"

            engine.forget()
            from_disk, disk_s = timed(engine, prompts[0])
            assert from_disk.tokens == computed[0].tokens
            promoted = admin.stats().below
            assert promoted is not None
            assert promoted.promoted_blocks >= full_blocks(DISK_LENGTH) // BLOCK_TOKENS
            by_source = engine.call("cached_by_source")
            assert by_source["disk"] >= full_blocks(DISK_LENGTH)
            engine.forget()
            _, compute_s = timed(engine, prompts[0], salt="never seen")
        with capsys.disabled():
            print(f"\n{DISK_LENGTH} tokens to the first one: {disk_s:.3f} s from disk, {compute_s:.3f} s computed")

        daemon.stop()
        daemon.start()
        engine.forget()
        with AdminClient(daemon.directory) as admin:
            wait_connected(admin)
            assert wait_stats(admin, on_disk, DISK_DEADLINE_S).pool.ready_bytes == 0
            again = [engine.generate([one])[0] for one in prompts]
            assert [one.tokens for one in again] == [one.tokens for one in computed]
            assert [one.cached for one in again] == [full_blocks(DISK_LENGTH)] * len(prompts)
            below = admin.stats().below
        assert below is not None
        assert below.promoted_blocks >= len(prompts) * (full_blocks(DISK_LENGTH) // BLOCK_TOKENS)
        assert not below.failed_promotions


@pytest.mark.timing
def test_killing_the_engine_in_mid_store_leaves_nothing_behind(harness: Harness) -> None:
    harness.ensure_daemon()
    with AdminClient(harness.daemon.directory) as admin:
        stored = sum(item.stored_blocks for item in admin.stats().namespaces)
        with harness.daemon.fault("store slow 1"):
            harness.engine.begin("generate", prompts=[prompt(80, 1000)], max_tokens=100)
            wait_stats(admin, lambda stats: stats.store.running_jobs > 0)
            harness.engine.kill()
            killed = time.monotonic()
            wait_stats(admin, lambda stats: stats.sessions == 1)
            assert time.monotonic() - killed < 0.5
            stats = wait_stats(admin, lambda stats: stats.store.running_jobs + stats.pool.writing_bytes == 0)
    assert stats.leases == 0
    assert stats.pool.pinned_bytes == 0
    assert sum(item.stored_blocks for item in stats.namespaces) == stored
    pool = stats.pool
    assert pool.free_bytes + pool.writing_bytes + pool.ready_bytes + pool.leaving_bytes == pool.pool_bytes
