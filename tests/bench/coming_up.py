"""What lookups take while a prompt's blocks come up from a store or a disk, and how fast these come.

``python -m tests.bench.coming_up``.

A daemon, its store and an engine's scheduler share two CPUs. The scheduler asks for a prompt until all of it is up:
every 20 ms, every 3 ms, or as an idle engine does, whose steps are empty and follow one another without a pause.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np

from kvoffd.pool.checksums import digest
from kvoffd.system.files import aligned_buffer
from kvoffd.tiers.disk import DiskTier
from kvoffd.tiers.header import Block, encode_header, make_block_group
from kvoffd.tiers.store import Credentials, object_key, open_store
from kvoffd.tiers.tier import Result, TierListener
from kvoffd_client import SchedulerClient
from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.messages import READY, GroupKeys, GroupSpec
from tests.bench.report_file import markdown_table, print_report, run_facts
from tests.kit.daemon import DaemonProcess
from tests.kit.redis_server import RedisServer
from tests.kit.waiting import deliver_until

PROMPT_BLOCKS, BLOCK_BYTES = 187, 1 << 19
"""6,000 tokens of Qwen3-0.6B, as the demo has them."""
PAUSES_S = {"every 20 ms": 0.02, "every 3 ms": 0.003, "without a pause": 0.0}
STEP_S = 200e-6
"""What an engine computes in an empty step."""
DEADLINE_S = 60.0


class Round(NamedTuple):
    """A prompt that came up: how long that took, and each answer to a lookup meanwhile."""

    seconds: float
    answers_s: list[float]


def keys_of(prompt: int, blocks: int) -> list[bytes]:
    return [np.random.default_rng((prompt, number)).bytes(32) for number in range(blocks)]


def bring_up(client: SchedulerClient, keys: Sequence[bytes], pause_s: float) -> Round:
    began, answers, groups = time.perf_counter(), list[float](), [GroupKeys(0, b"".join(keys))]
    again = False
    while True:
        sent = time.perf_counter()
        found = client.lookup(groups, again)
        while not found.done:
            if pause_s:
                found.wait(DEADLINE_S)
            else:
                compute()
        answers.append(time.perf_counter() - sent)
        assert not found.failed
        if found.states[0].count(READY) == len(keys):
            client.release(found.lease_id)
            return Round(time.perf_counter() - began, answers)
        assert time.perf_counter() - began < DEADLINE_S, found.states
        client.release(found.lease_id)
        again = True
        if pause_s:
            time.sleep(pause_s)
        else:
            compute()


def compute() -> None:
    until = time.perf_counter() + STEP_S
    while time.perf_counter() < until:
        pass


@contextmanager
def store_of(blocks: Sequence[Block], data: memoryview) -> Iterator[dict[str, str]]:
    """A Redis server that has these blocks, all with the same bytes; the flags of a daemon over it."""
    with RedisServer() as server:
        store = open_store(server.url, Credentials())()
        store.connect()
        for block in blocks:
            store.put([(object_key(block.group, block.key), [encode_header(block), data])], time.monotonic() + 10.0)
        store.close()
        yield {"shared": server.url, "shared_write": "never"}


@contextmanager
def disk_of(blocks: Sequence[Block], data: memoryview, place: str) -> Iterator[dict[str, str]]:
    """As ``store_of``, of a disk in a directory."""
    size_bytes = 2 * len(blocks) * len(data) + (64 << 20)
    with tempfile.TemporaryDirectory(dir=place) as directory:
        posted, ends = deque[Callable[[], None]](), list[Result]()
        pool = aligned_buffer(len(data))
        pool[:] = data
        tier = DiskTier(
            *(Path(directory), size_bytes),
            pool=pool,
            clock=time.monotonic,
            post=posted.append,
            listener=Mock(TierListener),
            generation=lambda fingerprint: 0,
        )
        for number, block in enumerate(blocks):
            assert tier.write(block, [0], ends.append)
            deliver_until(posted, lambda number=number: len(ends) > number)
        assert set(ends) == {Result.DONE}
        assert tier.close(DEADLINE_S)
        yield {"disk": f"{directory}={size_bytes}", "disk_write": "never"}


def measure(kind: str, rounds: int, prompt_blocks: int, block_bytes: int, place: str) -> dict[str, list[Round]]:
    spec = NamespaceSpec.named("coming up", groups=[GroupSpec("full_attention", 32)])
    block_group = make_block_group(spec.fingerprint, 0, 0, [block_bytes])
    data = memoryview(os.urandom(block_bytes))
    checksum = digest(data)
    prompts = [keys_of(number, prompt_blocks) for number in range(rounds * len(PAUSES_S))]
    blocks = [Block(block_group, key, (0,), (checksum,)) for keys in prompts for key in keys]
    pool_bytes = (len(blocks) + 64) * block_bytes + (64 << 20)
    found: dict[str, list[Round]] = {name: [] for name in PAUSES_S}
    with ExitStack() as stack:
        made = store_of(blocks, data) if kind == "redis" else disk_of(blocks, data, place)
        flags = stack.enter_context(made)
        daemon = stack.enter_context(DaemonProcess(str(pool_bytes), **flags))
        engine = stack.enter_context(FakeEngine(daemon.directory, spec, layers=1, blocks=1, page_bytes=block_bytes))
        time.sleep(1.0)  # the daemon reaches its store, or opens its disk
        for number, keys in enumerate(prompts):
            name = list(PAUSES_S)[number % len(PAUSES_S)]
            found[name].append(bring_up(engine.scheduler, keys, PAUSES_S[name]))
            time.sleep(0.2)
    return found


def page(found: dict[str, dict[str, list[Round]]], prompt_bytes: int) -> str:
    rows = [["blocks from", "asked", "answers", "p50 ms", "p99 ms", "longest ms", "MB/s, median", "slowest"]]
    for kind, by_name in found.items():
        for name, rounds in by_name.items():
            answers = 1e3 * np.array([one for some in rounds for one in some.answers_s])
            speeds = [prompt_bytes / some.seconds / 1e6 for some in rounds]
            figures = [*np.percentile(answers, [50, 99]), answers.max(), np.median(speeds), min(speeds)]
            rows.append([kind, name, str(len(answers)), *(f"{one:.1f}" for one in figures)])
    return markdown_table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.coming_up", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="prompts of each kind")
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--from", nargs="+", default=["redis", "disk"], dest="kinds")
    parser.add_argument("--place", default="/var/tmp", help="where the disk's files are")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cpus])
    facts = run_facts("python -m tests.bench.coming_up")
    found = {kind: measure(kind, options.rounds, PROMPT_BLOCKS, BLOCK_BYTES, options.place) for kind in options.kinds}
    print_report("Blocks that come up, and lookups meanwhile", facts, page(found, PROMPT_BLOCKS * BLOCK_BYTES))


if __name__ == "__main__":
    main()
