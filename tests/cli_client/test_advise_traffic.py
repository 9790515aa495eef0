"""``kvoffd-cli advise`` over a real daemon's traffic: each sentence is provoked, and its numbers counted apart."""

from __future__ import annotations

import json
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest

from kvoffd_client import AdminClient
from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of vLLM and torch, at their import
    from kvoffd_client.vllm.fingerprint import namespace_of
    from tests.vllm.test_fingerprint import FACTS, GROUP

LAYERS, PAGE_BYTES, TOKENS = 2, 4096, 64
BLOCK_BYTES = LAYERS * PAGE_BYTES
POOL_BLOCKS = 2048
POOL = f"{POOL_BLOCKS * BLOCK_BYTES >> 20}MiB"


class Engine(FakeEngine):
    """Asks, loads and stores as the connector does, says how many tokens a block has, and counts for itself."""

    def __init__(self, daemon: DaemonProcess, model: str = "llama", tokens: int = TOKENS, **facts: object) -> None:
        alone = {"world_size": 1, "tensor_parallel": 1, "blocks_per_chunk": 1, "tokens_per_hash": tokens}
        group = {**GROUP, "tokens_per_block": tokens}
        factors = {**FACTS, **alone, "model": model, "groups": [group], **facts}
        super().__init__(daemon.directory, namespace_of(factors, model), 1, LAYERS, 128, PAGE_BYTES)
        self.asked = self.loaded = self.stored = 0

    def serve(self, keys: Sequence[bytes]) -> int:
        """One request. Returns how many of its blocks were loaded."""
        ready = self.lookup(keys)
        assert self.load(keys[:ready], range(ready)).ok
        assert self.store(keys[ready:], range(ready, len(keys))).ok
        self.asked += len(keys)
        self.loaded += ready
        self.stored += len(keys) - ready
        return ready


class Lru:
    """An LRU of whole chains, as a paper would write it: what the daemon's should do."""

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._kept: OrderedDict[bytes, None] = OrderedDict()
        self.found = 0

    def serve(self, keys: Sequence[bytes]) -> int:
        run = next((at for at, key in enumerate(keys) if key not in self._kept), len(keys))
        for part in (keys[:run], keys[run:]):
            for key in reversed(part):
                self._kept[key] = None
                self._kept.move_to_end(key)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        self.found += run
        return run


def chain(name: object, length: int) -> list[bytes]:
    return [sha256(f"{name} {at}".encode()).digest() for at in range(length)]


def conversations(requests: int) -> Iterator[list[bytes]]:
    """Requests of people who write, read, and write again, or go."""
    random = Random(7)
    lengths: list[int] = []
    for _ in range(requests):
        if not lengths or random.random() < 0.3:
            lengths.append(0)
        who = max(0, len(lengths) - 1 - int(random.expovariate(1 / 60)))
        lengths[who] = min(60, lengths[who] + random.randint(2, 9))
        yield chain(who, lengths[who])


def advised(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    capsys.readouterr()
    assert main(["advise", "--json", "--directory", str(daemon.directory)]) == 0
    return {one["topic"]: one["text"] for one in json.loads(capsys.readouterr().out)["advice"]}


def percents(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"([0-9.]+) %", text)]


def test_what_was_saved_and_what_other_sizes_would_bring(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {part: Lru(int(part * POOL_BLOCKS)) for part in (0.5, 1, 2, 10)}
    with DaemonProcess(POOL, eviction_policy="lru") as daemon, Engine(daemon) as engine:
        requests = list(conversations(1500))
        for number, keys in enumerate(requests):
            if number == 99:
                few = advised(daemon, capsys)
                assert few == {
                    "too_little_traffic": "Only 99 requests so far: too few to tell; ask again after 100 of them."
                }
            found = {part: lru.serve(keys) for part, lru in sizes.items()}
            assert engine.serve(keys) == found[1]
        told = advised(daemon, capsys)
        loaded, asked = engine.loaded * TOKENS, engine.asked * TOKENS
        assert (
            f"engines loaded {loaded:,} tokens instead of computing them, {100 * loaded / asked:.1f} %" in told["saved"]
        )
        assert "How fast they compute prompts no engine has told" in told["saved"]
        assert told["stores"].startswith(f"Engines stored {engine.stored / engine.loaded:.1f} bytes for each byte")
        own, twice, ten, half = percents(told["size"])
        assert own == pytest.approx(100 * engine.loaded / engine.asked, abs=0.051)
        print(told["size"], {part: 100 * lru.found / engine.asked for part, lru in sizes.items()})
        for part, said in ((0.5, half), (2, twice), (10, ten)):
            assert said == pytest.approx(100 * sizes[part].found / engine.asked, abs=1.5)
        engine.scheduler.report(2000.0, 500_000.0, 0, 0)
        wait_until(lambda: "of prefill" in advised(daemon, capsys)["saved"])


def test_what_came_from_disk_and_what_its_wear_brought(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chains = [chain(name, 30) for name in range(100)]
    flags = {"disk": f"{tmp_path}=256MiB", "disk_write": "always", "disk_deadline": "60s", "eviction_policy": "lru"}
    with DaemonProcess(POOL, **flags) as daemon, Engine(daemon) as engine, AdminClient(daemon.directory) as admin:
        wait_until(lambda: [disk.state for disk in admin.stats().disks] == ["serving"])
        for keys in chains:
            assert engine.serve(keys) == 0
            wait_until(lambda: admin.stats().tiers.demotions_waiting == 0)  # type: ignore[union-attr]
        written = sum(map(len, chains))
        wait_until(lambda: admin.stats().disks[0].written_blocks == written)
        for keys in chains[:20]:  # the pool has the last 68 of the hundred
            assert engine.serve(keys) == 30
        for keys in [*chains[-20:], *chains[-20:]]:
            assert engine.serve(keys) == 30
        told = advised(daemon, capsys)
        assert f"engines loaded {60 * 30 * TOKENS:,} tokens instead of computing them, 37.5 %" in told["saved"]
        assert "Of these 33.3 % came from disks." in told["saved"]
        assert told["disk_writes"].startswith(f"The disks wrote {written / 600:.1f} bytes for each byte that was read")


def test_who_starves_and_who_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        DaemonProcess(POOL, eviction_policy="lru") as daemon,
        Engine(daemon, "greedy") as greedy,
        Engine(daemon, "polite") as polite,
        AdminClient(daemon.directory) as admin,
    ):
        pool_bytes = admin.stats().pool.size_bytes
        admin.set_quota(polite.namespace.fingerprint, pool_bytes // 4)
        for number in range(600):
            polite.serve(chain(f"polite {number % (120 if number % 2 else 20)}", 10))
            if number % 3:
                greedy.serve(chain(f"greedy {number}", 10))
        told = advised(daemon, capsys)
        stats = {one.model: one for one in admin.stats().namespaces}
        held = stats["polite"].ready_blocks / sum(one.ready_blocks for one in stats.values())
        asks, has, finds, could = percents(told["starving"])
        assert told["starving"].startswith("polite (")
        assert (asks, has) == (60.0, pytest.approx(100 * held, abs=0.051))
        assert finds == pytest.approx(100 * polite.loaded / polite.asked, abs=0.051)
        assert could == pytest.approx(100 * 530 / 600, abs=1.5), "70 of 600 requests were the first of their text"
        assert told["no_hits"].startswith("greedy (")
        assert "in 400 requests; of 100 % of its keys the reason is: never stored." in told["no_hits"]


def test_engines_that_do_not_share_are_told_why(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        DaemonProcess(POOL) as daemon,
        Engine(daemon) as usual,
        Engine(daemon, hash_probe="ab" * 32) as seeded,
        Engine(daemon, "qwen"),
        Engine(daemon, "other") as smaller,
        Engine(daemon, "other", 128) as larger,
    ):
        capsys.readouterr()
        assert main(["advise", "--json", "--directory", str(daemon.directory)]) == 0
        apart = [one for one in json.loads(capsys.readouterr().out)["advice"] if one["topic"] == "apart"]
        assert len(apart) == 2
        for found, (first, second) in zip(apart, ((usual, seeded), (smaller, larger)), strict=True):
            assert all(space.namespace.fingerprint.hex()[:8] in found["text"] for space in (first, second))
        assert apart[0]["fields"] == ["hash_probe"]
        assert "give both engines the same PYTHONHASHSEED" in apart[0]["text"]
        assert sorted(apart[1]["fields"]) == ["groups", "tokens_per_hash"]
        assert "tokens_per_hash (64 and 128)" in apart[1]["text"]
        assert "give both the same --block-size" in apart[1]["text"]


def test_what_else_is_said_of_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        DaemonProcess(POOL, eviction_policy="lru") as daemon,
        Engine(daemon, "short") as short,
        AdminClient(daemon.directory) as admin,
    ):
        for number in range(150):
            short.serve(chain(number // 2, 1 + number % 2))
        short.scheduler.report(3000.0, 400.0, 7, 3)
        wait_until(lambda: admin.stats().namespaces[0].skipped_loads == 7)
        told = advised(daemon, capsys)
        assert "its requests have 1.5 whole blocks of 64 tokens on average" in told["block_size"]
        assert "left out 7 loads" in told["slow_copies"]
        assert "and 3 stores" in told["slow_copies"]
        assert "compute 3,000 tokens a second and load 400." in told["slow_copies"]
        loaded = short.loaded * TOKENS
        assert told["saved"].endswith(f"that is {loaded / 3000:.2f} s of prefill.")
        fits = "fit into it: more memory brings nothing yet"
        assert fits in told["size"]
