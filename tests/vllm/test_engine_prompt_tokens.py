"""The table of prompt tokens by source is that of two real engines' own counters, to the token."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvoffd_client import AdminClient
from tests.kit.amount import TIMES
from tests.kit.command import run_cli
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import BLOCK_TOKENS, EngineProcess, cached, prompt, wait_books, wait_connected, wait_stored
from tests.kit.models import make_tiny_llama
from tests.kit.ports import free_port
from tests.kit.redis_server import PROGRAM as REDIS
from tests.kit.redis_server import RedisServer
from tests.kit.require import require, require_nixl
from tests.kit.shapes import make_tiny_gemma3, make_tiny_qwen3_next
from tests.kit.waiting import wait_until
from tests.kit.wire import reported
from tests.vllm.test_engine_faults import TCP

pytestmark = [pytest.mark.engine, pytest.mark.concurrent, pytest.mark.timeout(600)]

MIXED = 40 * TIMES
"""Prompts of a mix for each change."""
MIXED_AT_NIGHT = 500
VLLMS = {"local_compute": ("computed",), "local_cache_hit": ("engine",), "external_kv_transfer": ()}
"""Our sources for each of vLLM's; all others are of the last one."""
TENANTS = "left", "right"


@dataclass(frozen=True)
class Kind:
    """What is special about two engines.

    Attributes:
        settings: of ``EngineProcess``.
        length: tokens of the prompts that a tier has.
        num_blocks: blocks of each KV cache: a batch of eight long prompts needs more.
        v2: whether each has vLLM's second model runner. Runners do not share a namespace.
    """

    make: Callable[[Path], Path] = make_tiny_llama
    settings: Mapping[str, Any] = field(default_factory=dict)
    length: int = 300
    num_blocks: int = 120
    v2: tuple[bool, bool] = (False, True)

    @property
    def block(self) -> int:
        """Tokens of a block of vLLM's."""
        return int(self.settings.get("block_size", BLOCK_TOKENS))

    @property
    def prompts(self) -> list[list[list[int]]]:
        """Those on the disk, in the store and at the peer."""
        return [[prompt(seed, self.length) for seed in range(first, first + 3)] for first in (100, 200, 300)]


KINDS = {
    "32": Kind(),
    "128": Kind(settings={"block_size": 128}, num_blocks=32),
    "together": Kind(v2=(True, True)),
    "window": Kind(make_tiny_gemma3, length=600, num_blocks=240),
    "mamba": Kind(make_tiny_qwen3_next, {"dtype": "bfloat16"}, length=900, num_blocks=60),
}
"""vLLM for CPU takes blocks of multiples of 32 tokens only, so none of 16."""


@dataclass
class Node:
    """Two engines and a daemon that has a disk, a store and a peer."""

    kind: Kind
    redis: RedisServer
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

    def line(self, tokens: list[int], **arguments: Any) -> str:
        """The line of a prompt that is new to the pool."""
        self.forget()
        with AdminClient(self.directory) as admin:
            before, _ = reported(admin)[-1]
            self.engines[0].generate([tokens], max_tokens=1, **arguments)
            name = wait_until(lambda: (last := reported(admin)[-1][0]) != before and last)
        (_, found) = run_cli("clients", "--requests", name, "--directory", str(self.directory)).stdout.splitlines()
        return found

    def forget(self) -> None:
        for engine in self.engines:
            engine.forget()

    def await_sum(self, total: int) -> Counter[str]:
        """Wait until this many tokens are counted; reports are sent once a second."""
        wait_until(lambda: self.counted().total() >= total, explain=lambda: (self.counted(), total))
        return self.counted()


@pytest.fixture(
    scope="module",
    params=[name if name == "32" else pytest.param(name, marks=pytest.mark.nightly) for name in KINDS],
)
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    kind = KINDS[request.param]
    require("redis", REDIS, "there is no redis-server; `make servers` installs it")
    require_nixl()
    with ExitStack() as stack:

        def place(parent: str) -> Path:
            made = Path(tempfile.mkdtemp(prefix="kvoffd-tokens-", dir=parent))
            stack.callback(shutil.rmtree, made)
            return made

        def connect() -> None:
            for engine in engines:
                wait_connected(directory, pids=lambda: engine.pids)  # noqa: B023

        directory, pool, disk = place("/tmp"), place("/dev/shm") / "pool", place("/var/tmp")
        redis = stack.enter_context(RedisServer())
        (directory / "secret").write_text("a secret for tests")
        secret, address = {"peer_secret_file": str(directory / "secret")}, f"127.0.0.1:{free_port()}"
        model = kind.make(tmp_path_factory.mktemp("models") / "model")
        options: dict[str, Any] = {"patient": True, "num_blocks": kind.num_blocks, "max_model_len": 1024}
        options |= {"max_num_batched_tokens": 256, "max_num_seqs": 8, **kind.settings}
        engines = [EngineProcess(model, directory, v2=v2, **options) for v2 in kind.v2]
        for engine in engines:
            stack.callback(engine.close)
            engine.launch()
        for engine in engines:
            engine.wait_ready()
        on_disk = {"disk": f"{disk}=64MiB"}
        for prompts, settings in zip(
            kind.prompts,
            (
                on_disk | {"disk_write": "always"},
                {"shared": redis.url, "shared_write": "always"},
                {"pool_file": str(pool)},
            ),
            strict=True,
        ):
            for engine in engines:
                engine.forget()
            with DaemonProcess("64MiB", directory, **settings):
                connect()
                if "disk" in settings:
                    wait_books(directory, lambda found: found.disks[0].state == "serving")
                for engine in engines[: len({*kind.v2})]:
                    engine.generate(prompts)
                blocks = wait_stored(directory).ready_blocks
                if "disk" in settings:
                    wait_books(directory, lambda found: found.disks[0].blocks >= blocks)  # noqa: B023
                elif "shared" in settings:
                    wait_books(directory, lambda found: found.shared[0].written_blocks >= blocks)  # noqa: B023
        stack.enter_context(DaemonProcess("64MiB", environ=TCP, pool_file=str(pool), peer_listen=address, **secret))
        below: dict[str, Any] = {**on_disk, **secret, "disk_write": "never", "shared_write": "never"}
        below |= {"shared": redis.url, "peers": address, "shared_deadline": "60s", "shared_ask_deadline": "5s"}
        stack.enter_context(DaemonProcess("64MiB", directory, environ=TCP, **below))
        connect()
        found = wait_books(directory, lambda found: all(one.up for one in found.shared) and found.disks[0].blocks)
        store, peer = (one.url for one in found.shared)
        yield Node(kind, redis, engines, directory, store, peer)


@pytest.mark.parametrize("node", ["32", pytest.param("128", marks=pytest.mark.nightly)], indirect=True)
def test_each_source_has_its_tokens(node: Node) -> None:
    """A prompt that begins in the pool and goes on in a store has both, and ``clients --requests`` has the names."""
    engine, before, length = node.engines[0], node.counted(), node.kind.length
    whole = (length - 1) // node.kind.block * node.kind.block
    places = (("disk", "disk"), ("store", node.store), ("peer", node.peer))
    for prompts, (source, name) in zip(node.kind.prompts, places, strict=True):
        node.forget()
        assert cached(engine.generate(prompts[:1], max_tokens=1)) == [whole]
        node.forget()
        assert cached(engine.generate(prompts[:1], max_tokens=1)) == [whole], "from the pool now"
        assert cached(engine.generate(prompts[:1], max_tokens=1)) == [whole], "from its own cache"
        expected = {source: whole, "pool": whole, "engine": whole, "computed": 3 * (length - whole)}
        before += Counter(expected)
        assert node.await_sum(before.total()) == before
        with AdminClient(node.directory) as admin:
            latest = [tokens for _, tokens in reported(admin)[-3:]]
        rest = {"computed": length - whole}
        assert latest == [rest | {each: whole} for each in (name, "pool", "engine")]


def assert_sums(node: Node, before: Counter[str], was: Counter[str]) -> Counter[str]:
    """Assert that what was counted since is what vLLM counted, and return it by our sources."""
    by_vllm = node.by_vllm()
    by_vllm.subtract(was)
    found = node.await_sum(before.total() + by_vllm.total())
    found.subtract(before)
    left = Counter(found)
    ours = {theirs: sum(left.pop(name, 0) for name in names) for theirs, names in VLLMS.items()}
    ours["external_kv_transfer"] = left.total()
    assert ours == by_vllm, found
    assert min(ours.values()) > 0
    return found


def assert_nothing_is_held(node: Node) -> None:
    """Assert that no prompt has left a lease, a pin or a wait behind."""
    wait_books(node.directory, lambda found: not (found.leases or found.pool.pinned_bytes))


def test_the_sums_are_those_of_vllm(node: Node) -> None:
    """Over mixed prompts to two engines at once, also such as look nothing up, are pre-empted or sampled thrice."""
    random, before, was = Random(76), node.counted(), node.by_vllm()
    fresh, left = iter(range(1000, 10**6)), MIXED if node.kind is KINDS["32"] else max(MIXED, MIXED_AT_NIGHT)
    known = [one for prompts in node.kind.prompts for one in prompts]

    def made() -> list[int]:
        kind = random.random()
        if kind < 0.2:
            return prompt(next(fresh), random.randrange(1, 2 * node.kind.block))
        if kind < 0.3:
            known.append(prompt(next(fresh), random.randrange(node.kind.block, min(node.kind.length + 100, 900))))
        begin = random.choice(known)
        if kind < 0.6:
            return begin
        begin = begin[: random.randrange(1, len(begin) + 1)]
        return begin + prompt(next(fresh), random.randrange(1, min(150, 1000 - len(begin))))

    node.forget()
    for number, engine in enumerate(node.engines, 1):
        engine.begin("generate", prompts=[prompts[number] for prompts in node.kind.prompts], max_tokens=3)
    for engine in node.engines:
        engine.finish()
    while left > 0:
        if random.random() < 0.5:
            node.forget()
        for engine in node.engines:
            arguments: dict[str, Any] = {"prompts": [made() for _ in range(random.randrange(1, 7))], "max_tokens": 3}
            left -= len(arguments["prompts"])
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
    found = assert_sums(node, before, was)
    assert all(found[source] > 0 for source in ("pool", "disk", "store", "peer")), found
    assert_nothing_is_held(node)


def test_the_sums_are_those_of_vllm_for_batches_larger_than_the_kv_cache(node: Node) -> None:
    """Of two tenants to two engines at once: prompts share beginnings within a tenant, wait for one another, are
    pre-empted, and their stores and loads are for more blocks than there are."""
    random, before, was = Random(84), node.counted(), node.by_vllm()
    begins = [prompt(seed, random.randrange(300, 700)) for seed in range(500, 505)]
    for _ in range(2):
        for engine in node.engines:
            prompts = [
                {
                    "prompt_token_ids": random.choice(begins)[: random.randrange(200, 700)]
                    + prompt(random.randrange(600, 620), random.randrange(1, 300)),
                    "cache_salt": random.choice(TENANTS),
                }
                for _ in range(16)
            ]
            blocks = sum(len(one["prompt_token_ids"]) for one in prompts) // node.kind.block
            assert blocks > 2 * node.kind.num_blocks or node.kind.make is not make_tiny_llama
            engine.begin("generate", prompts=prompts, max_tokens=3)
        for engine in node.engines:
            assert {one["finish"] for one in engine.finish()} == {"length"}
        node.forget()
    assert_sums(node, before, was)
    assert_nothing_is_held(node)


@pytest.mark.parametrize("node", ["32"], indirect=True)
def test_an_operator_sees_what_stores_said_and_what_the_request_limits(node: Node) -> None:
    line = node.line
    length = node.kind.length
    new = line(prompt(90_001, length))
    assert f" kvoffd had none. A store was asked for {length // node.kind.block} and " in new, "neither has it"
    assert "first key missing, number 1" in new
    assert ": never stored in this namespace since the daemon's start (never stored)." in new
    salted = line(prompt(90_002, length), salt="tenant")
    assert salted.endswith(" Its keys contain its cache_salt: only prompts with the same share them.")
    with AdminClient(node.directory) as admin:
        admin.clear()
    barred = line(node.kind.prompts[1][0], transfer=[{"kv_load_tiers": []}])
    assert f"which the request's kv_load_tiers exclude (excluded: {node.store})." in barred
    assert "not read in time" not in barred


@pytest.mark.nightly
@pytest.mark.parametrize("node", ["32"], indirect=True)
def test_an_outage_of_the_store_is_the_reason_in_the_line_and_in_the_sums(node: Node) -> None:
    length, url = node.kind.length, node.store

    def misses() -> Counter[str]:
        with AdminClient(node.directory) as admin:
            return Counter(admin.stats().since_start.misses)

    for fault in ("standing still", "killed"):
        with AdminClient(node.directory) as admin:
            admin.clear()
        if fault == "killed":
            node.redis.kill()
        else:
            node.redis.signal(signal.SIGSTOP)
        for number, tokens in enumerate([node.kind.prompts[1][0], prompt(95_000, length), prompt(95_001, length)]):
            before = misses()
            line = node.line([number + 10, *tokens] if fault == "killed" and number else tokens)
            assert f" (tier down: {url})." in line
            assert misses() - before == {"tier_down": length // node.kind.block}
        if fault == "killed":
            node.redis.start()
        else:
            node.redis.signal(signal.SIGCONT)
        wait_books(node.directory, lambda found: all(one.up for one in found.shared))
