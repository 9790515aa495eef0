"""What prompts that wait cost vLLM's scheduler: many that queue, that wait for a disk, or behind a load; a long one
without space.

vLLM's own scheduler with the connector's half in it; a model and workers that do nothing. The long queue has a real
daemon, the others one that answers as they need it. "Ours" is the time in the connector's calls, vLLM's search for hits
included, whole is that of the scheduler's call.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from random import Random
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheGroupSpec, SlidingWindowSpec

from kvoffd_client import AdminClient, NamespaceSpec
from kvoffd_client.testing import running_daemon
from kvoffd_client.vllm.engine_namespace import MemoryState
from tests.kit.models import make_tiny_llama
from tests.kit.waiting import wait_until
from tests.vllm.scheduler_harness import SchedulerHarness
from tests.vllm.vllm_config import HEADS, full_attention, make_config, make_scheduler

BLOCK_TOKENS = 32
OURS = ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta")


class Stopwatch:
    """Adds up the time in the connector's calls."""

    def __init__(self, connector: Any) -> None:
        self.seconds = 0.0
        for name in OURS:
            setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.seconds += time.perf_counter() - began

        return timed

    def take_ms(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return 1000 * seconds


def row(what: str, times_ms: list[float]) -> str:
    return f"| {what} | {statistics.median(times_ms):.3f} | {max(times_ms):.3f} |"


def tokens_of(seed: int, count: int) -> list[int]:
    return Random(seed).choices(range(1000), k=count)


def long_queue(model: Path, prompts: int) -> list[str]:
    """Prompts of 640 tokens, one of which runs at a time."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    rows = []
    with running_daemon("256MiB") as directory, AdminClient(directory) as admin:
        config = make_config(model, {"directory": str(directory)}, max_model_len=1024, max_num_seqs=1)
        scheduler, hasher = make_scheduler(config, 60)
        manager = scheduler.connector._manager
        namespace = manager.namespace
        namespace.join(NamespaceSpec.named("queue"))
        wait_until(lambda: namespace.client.ready)
        fingerprint = namespace.current.fingerprint
        namespace.update({0: MemoryState(namespace.current, "weights", namespace.generation, registered=fingerprint)})
        watch, arrivals = Stopwatch(scheduler.connector), []
        sampling = SamplingParams(max_tokens=1)
        for number in range(prompts):
            request = Request(f"r{number}", tokens_of(number % 20, 641), sampling, None, block_hasher=hasher)
            scheduler.add_request(request)
            arrivals.append(watch.take_ms())
        rows.append(row(f"{prompts:,} prompts that arrive, each, ours", arrivals))
        steps = []
        for _ in range(200):
            scheduler.schedule()
            steps.append(watch.take_ms())
        rows.append(row("a step while one of them runs, ours", steps))
        (session,) = [one for one in admin.sessions().sessions if one.role == "scheduler"]
        rows.append(f"\nLookups sent: {manager._counters['vllm:kvoffd_lookups']}; leases held: {session.leases}.")
        scheduler.shutdown()
    return rows


def disk_waiters(model: Path, prompts: int) -> list[str]:
    """Prompts whose blocks come up from a disk for a minute, beside one that runs. What vLLM does for each of them
    before it asks the connector is measured with a connector that answers at once, and subtracted."""
    with tempfile.TemporaryDirectory() as directory:
        options = {"directory": directory, "do_no_harm": False}
        config = make_config(model, options, max_model_len=4096, max_num_seqs=256)
        engine = SchedulerHarness(config, 200)
        engine.add("running", tokens_of(prompts, 100), max_tokens=4000)
        engine.step()
        engine.answers = False
        for number in range(prompts):
            engine.add(f"r{number}", tokens_of(number, 641))
        for _ in range(prompts // 2):
            engine.answer_coming(60.0)
            engine.step()
        engine.manager.waits._sleep = lambda _: None  # an idle engine pauses; these steps get no output
        times: dict[bool, list[float]] = {False: [], True: []}
        ours = engine.connector.get_num_new_matched_tokens
        for at in range(400):
            engine.answer_coming(60.0)
            is_ours = at % 2 == 0
            engine.connector.get_num_new_matched_tokens = ours if is_ours else lambda *_: (None, False)
            began = time.perf_counter()
            engine.scheduler.schedule()
            times[is_ours].append(1000 * (time.perf_counter() - began))
            engine.clock.now += 0.01
        engine.close()
    without = statistics.median(times[False])
    what = f"a step with {prompts:,} prompts that wait for a disk"
    return [row(f"{what}, ours", [one - without for one in times[True]]), row(f"{what}, vLLM's", times[False])]


def without_space(model: Path, tokens: int) -> list[str]:
    """One prompt, all of which the daemon has, and that waits for KV blocks."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = {"max_model_len": tokens + 1024, "max_num_batched_tokens": 8192, "max_num_seqs": 8}
        config = make_config(model, {"directory": directory, "do_no_harm": False}, **arguments)
        blocks = tokens // BLOCK_TOKENS
        engine = SchedulerHarness(config, blocks + 10)
        running = engine.add("running", tokens_of(1, 1000), max_tokens=500)
        engine.step()
        request = engine.add("long", tokens_of(2, tokens))
        engine.there |= {bytes(one) for one in request.block_hashes}
        engine.answer()
        watch, steps, whole = Stopwatch(engine.connector), [], []
        for _ in range(200):
            watch.take_ms()
            began = time.perf_counter()
            engine.step()
            whole.append(1000 * (time.perf_counter() - began))
            steps.append(watch.take_ms())
        assert not engine.loaded
        assert not running.is_finished()
        engine.close()
    first = f"| its first, ours | {steps[0]:.3f} | |"
    return [row(f"a step with a prompt of {tokens:,} tokens that has no space, ours", steps[1:]), first]


def behind_a_load(model: Path, prompts: int, tokens: int) -> list[str]:
    """New prompts, all of which the daemon has, behind a load that waits until another one has ended."""
    full = KVCacheGroupSpec(["full"], full_attention())
    window = KVCacheGroupSpec(["window"], SlidingWindowSpec(block_size=BLOCK_TOKENS, sliding_window=64, **HEADS))
    with tempfile.TemporaryDirectory() as directory:
        arguments = {"max_model_len": tokens + 1024, "max_num_batched_tokens": 8192, "max_num_seqs": 256}
        config = make_config(model, {"directory": directory, "do_no_harm": False}, **arguments)
        engine = SchedulerHarness(config, tokens * 3 // 2 // BLOCK_TOKENS, full, window)
        engine.held = {"first"}
        first = engine.add("first", tokens_of(0, tokens + 1))
        engine.there |= {bytes(one) for one in first.block_hashes}
        for _ in range(3):
            engine.step()
        assert engine.loading
        for number in range(1, prompts + 1):
            request = engine.add(f"r{number}", tokens_of(number, tokens + 1))
            engine.there |= {bytes(one) for one in request.block_hashes}
        watch, steps = Stopwatch(engine.connector), []
        for _ in range(200):
            asked = len(engine.client.asked)
            watch.take_ms()
            engine.step()
            steps.append((len(engine.client.asked) > asked, watch.take_ms()))
        assert not engine.loaded
        engine.close()
    what = f"{prompts:,} prompts of {tokens:,} tokens behind a load that waits"
    asking = [ms for asks, ms in steps[1:] if asks]
    return [
        row(f"a step with {what}, ours", [ms for asks, ms in steps[1:] if not asks]),
        row("the same, in which some of them are looked up", asking),
        f"| its first, in which that load is found, ours | {steps[0][1]:.3f} | |",
    ]


def main() -> None:
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=20_000, help="length of the queue")
    parser.add_argument("--waiting", type=int, default=1000, help="prompts that wait for a disk")
    parser.add_argument("--tokens", type=int, default=524_288, help="tokens of the long prompt")
    parser.add_argument("--behind", type=int, default=100, help="prompts of 32,000 tokens behind a load that waits")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_llama(Path(directory, "model"))
        rows = long_queue(model, chosen.prompts) + disk_waiters(model, chosen.waiting)
        rows += without_space(model, chosen.tokens) + behind_a_load(model, chosen.behind, 32_000)
    print("\n| | median ms | longest ms |\n|---|---|---|")
    print("\n".join(sorted(rows, key=lambda one: not one.startswith("|"))))


if __name__ == "__main__":
    main()
