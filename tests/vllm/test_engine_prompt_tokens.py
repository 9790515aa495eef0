"""The table of prompt tokens by source is that of two real engines' own counters, to the token."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvoffd_client import AdminClient
from tests.kit.amount import TIMES
from tests.kit.command import run_cli
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import BLOCK_TOKENS, EngineProcess, cached, full_blocks, prompt, wait_books, wait_connected
from tests.kit.ports import free_port
from tests.kit.redis_server import PROGRAM as REDIS
from tests.kit.redis_server import RedisServer
from tests.kit.require import require, require_nixl
from tests.kit.waiting import wait_until
from tests.kit.wire import reported
from tests.vllm.test_engine_faults import TCP

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LENGTH = 300
TOKENS = full_blocks(LENGTH)
BLOCKS = LENGTH // BLOCK_TOKENS
ON_DISK, IN_STORE, AT_PEER = ([prompt(seed, LENGTH) for seed in range(first, first + 3)] for first in (100, 200, 300))
ROUNDS = 12 * TIMES
VLLMS = {"local_compute": ("computed",), "local_cache_hit": ("engine",), "external_kv_transfer": ()}
"""Our sources for each of vLLM's; all others are of the last one."""


@dataclass
class Node:
    """Two engines, of vLLM's first and second model runner, and a daemon that has a disk, a store and a peer."""

    engines: list[EngineProcess]
    directory: Path
    store: str
    peer: str

    def counted(self) -> Counter[str]:
        with AdminClient(self.directory) as admin:
            return Counter(admin.stats().since_start.prompt_tokens)

    def by_vllm(self) -> Counter[str]:
        """Tokens by vLLM's sources, of both engines."""
        found = Counter[str]()
        for engine in self.engines:
            found.update({name: int(n) for name, n in engine.call("tokens_by_source", cached=False).items()})
        return found

    def forget(self) -> None:
        for engine in self.engines:
            engine.forget()

    def await_sum(self, total: int) -> Counter[str]:
        """Wait until this many tokens are counted; reports are sent once a second."""
        wait_until(lambda: self.counted().total() >= total, explain=lambda: (self.counted(), total))
        return self.counted()


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[Node]:
    require("redis", REDIS, "there is no redis-server; `make servers` installs it")
    require_nixl()
    with ExitStack() as stack:

        def place(parent: str) -> Path:
            made = Path(tempfile.mkdtemp(prefix="kvoffd-tokens-", dir=parent))
            stack.callback(shutil.rmtree, made)
            return made

        directory, pool, disk = place("/tmp"), place("/dev/shm") / "pool", place("/var/tmp")
        redis = stack.enter_context(RedisServer())
        (directory / "secret").write_text("a secret for tests")
        secret, address = {"peer_secret_file": str(directory / "secret")}, f"127.0.0.1:{free_port()}"
        options = {"patient": True, "num_blocks": 120, "max_model_len": 1024, "max_num_batched_tokens": 256}
        engines = [
            stack.enter_context(EngineProcess(model, directory, v2=v2, max_num_seqs=8, **options))
            for v2 in (False, True)
        ]
        on_disk = {"disk": f"{disk}=64MiB"}
        for prompts, settings in (
            (ON_DISK, on_disk | {"disk_write": "always"}),
            (IN_STORE, {"shared": redis.url, "shared_write": "always"}),
            (AT_PEER, {"pool_file": str(pool)}),
        ):
            for engine in engines:
                engine.forget()
            with DaemonProcess("64MiB", directory, **settings):
                wait_connected(directory, 2, pids=lambda: [pid for one in engines for pid in one.pids])
                if "disk" in settings:
                    wait_books(directory, lambda found: found.disks[0].state == "serving")
                engines[0].generate(prompts)
                blocks = len(prompts) * BLOCKS
                wait_books(directory, lambda found: found.ready_blocks >= blocks)  # noqa: B023
                if "disk" in settings:
                    wait_books(directory, lambda found: found.disks[0].blocks >= blocks)  # noqa: B023
                elif "shared" in settings:
                    wait_books(directory, lambda found: found.shared[0].written_blocks >= blocks)  # noqa: B023
        stack.enter_context(DaemonProcess("64MiB", environ=TCP, pool_file=str(pool), peer_listen=address, **secret))
        below: dict[str, Any] = {**on_disk, **secret, "disk_write": "never", "shared_write": "never"}
        below |= {"shared": redis.url, "peers": address, "shared_deadline": "60s", "shared_ask_deadline": "5s"}
        stack.enter_context(DaemonProcess("64MiB", directory, environ=TCP, **below))
        wait_connected(directory, 2, pids=lambda: [pid for one in engines for pid in one.pids])
        found = wait_books(directory, lambda found: all(one.up for one in found.shared) and found.disks[0].blocks)
        store, peer = (one.url for one in found.shared)
        yield Node(engines, directory, store, peer)


def test_each_source_has_its_tokens(node: Node) -> None:
    """A prompt that begins in the pool and goes on in a store has both, and ``clients --requests`` has the names."""
    engine, before = node.engines[0], node.counted()
    for prompts, source, name in (
        (ON_DISK, "disk", "disk"),
        (IN_STORE, "store", node.store),
        (AT_PEER, "peer", node.peer),
    ):
        node.forget()
        assert cached(engine.generate(prompts[:1], max_tokens=1)) == [TOKENS]
        node.forget()
        assert cached(engine.generate(prompts[:1], max_tokens=1)) == [TOKENS], "from the pool now"
        assert cached(engine.generate(prompts[:1], max_tokens=1)) == [TOKENS], "from its own cache"
        expected = {source: TOKENS, "pool": TOKENS, "engine": TOKENS, "computed": 3 * (LENGTH - TOKENS)}
        before += Counter(expected)
        assert node.await_sum(before.total()) == before
        with AdminClient(node.directory) as admin:
            latest = [tokens for _, tokens in reported(admin)[-3:]]
        rest = {"computed": LENGTH - TOKENS}
        assert latest == [rest | {each: TOKENS} for each in (name, "pool", "engine")]


def test_the_sums_are_those_of_vllm(node: Node) -> None:
    """Over mixed prompts to two engines at once, also such as look nothing up, are pre-empted or sampled thrice."""
    random, before, was = Random(76), node.counted(), node.by_vllm()
    fresh = iter(range(1000, 10**6))
    known = [*ON_DISK, *IN_STORE, *AT_PEER]

    def made() -> list[int]:
        kind = random.random()
        if kind < 0.2:
            return prompt(next(fresh), random.randrange(1, 2 * BLOCK_TOKENS))
        if kind < 0.3:
            known.append(prompt(next(fresh), random.randrange(BLOCK_TOKENS, 400)))
        begin = random.choice(known)
        if kind < 0.6:
            return begin
        return begin[: random.randrange(1, len(begin) + 1)] + prompt(next(fresh), random.randrange(1, 150))

    node.forget()
    for number, engine in enumerate(node.engines, 1):
        engine.begin("generate", prompts=[ON_DISK[number], IN_STORE[number], AT_PEER[number]], max_tokens=3)
    for engine in node.engines:
        engine.finish()
    for _ in range(ROUNDS):
        if random.random() < 0.5:
            node.forget()
        for engine in node.engines:
            arguments: dict[str, Any] = {"prompts": [made() for _ in range(random.randrange(1, 7))], "max_tokens": 3}
            arguments |= random.choice(
                [
                    {},
                    {},
                    {"salt": "tenant"},
                    {"preempt": True},
                    {"sampling": {"n": 3, "temperature": 1.0, "top_k": 1}},
                    {"sampling": {"prompt_logprobs": 1}},
                    {"transfer": [{"kv_load_tiers": []}] * len(arguments["prompts"])},
                ]
            )
            engine.begin("generate", **arguments)
        for engine in node.engines:
            engine.finish()
    by_vllm = node.by_vllm()
    by_vllm.subtract(was)
    found = node.await_sum(before.total() + by_vllm.total())
    found.subtract(before)
    ours = {theirs: sum(found.pop(name, 0) for name in names) for theirs, names in VLLMS.items()}
    ours["external_kv_transfer"] = found.total()
    assert ours == by_vllm, found
    assert min(ours.values()) > 0
    assert all(found[source] > 0 for source in ("pool", "disk", "store", "peer")), found


def test_an_operator_sees_what_stores_said_and_what_the_request_limits(node: Node) -> None:
    engine = node.engines[0]

    def line(tokens: list[int], **arguments: Any) -> str:
        """The line of a prompt that is new to the pool."""
        node.forget()
        with AdminClient(node.directory) as admin:
            before, _ = reported(admin)[-1]
            engine.generate([tokens], max_tokens=1, **arguments)
            name = wait_until(lambda: (last := reported(admin)[-1][0]) != before and last)
        (_, found) = run_cli("clients", "--requests", name, "--directory", str(node.directory)).stdout.splitlines()
        return found

    new = line(prompt(90_001, LENGTH))
    assert f" kvoffd had none. A store was asked for {BLOCKS} and " in new, "neither has it"
    assert "first key missing, number 1" in new
    assert ": never stored in this namespace since the daemon's start or its last clear." in new
    salted = line(prompt(90_002, LENGTH), salt="tenant")
    assert salted.endswith(" Its keys contain its cache_salt: only prompts with the same share them.")
    with AdminClient(node.directory) as admin:
        admin.clear()
    barred = line(ON_DISK[0], transfer=[{"kv_load_tiers": []}])
    assert "its kv_load_tiers exclude the tier" in barred
    assert "not read in time" not in barred
