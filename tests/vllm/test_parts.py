"""vLLM's scheduler, both halves of the connector and a real daemon, with a model that is a double: no engine starts."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvoffd_client import AdminClient, NamespaceSpec
from kvoffd_client.vllm import engine_namespace
from kvoffd_client.vllm.connector import KvoffdConnector
from kvoffd_client.vllm.kv_memory import NotShareable
from kvoffd_client.vllm.spec import KvoffdSpec
from kvoffd_proto.admin import ListPrompts
from tests.kit.command import run_cli
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import BLOCK_TOKENS, full_blocks, prompt, wait_books
from tests.kit.filled_tiers import fill_tiers
from tests.kit.model_worker import ModelRunner
from tests.kit.redis_server import RedisServer
from tests.kit.slow_link import SlowLink
from tests.kit.waiting import wait_until
from tests.vllm.vllm_config import full_attention, kv_cache_configs, make_config, make_scheduler

LAYERS = 4
EMPTY_STEP_S = 0.001
"""What vLLM sleeps after a step in which nothing was computed."""
MAX_S = 100.0


class EngineOfParts:
    """An engine whose connector has its defaults but for ``options``; one at a time in a process.

    Args:
        model: a model's directory, of which only the configuration is read.
        directory: the daemon's; None to have the environment name it.
        blocks: of its KV cache.
        rate: tokens that it computes in a second.
    """

    def __init__(self, model: Path, directory: Path | None, blocks: int, rate: float, **options: object) -> None:
        config = make_config(model, {**({"directory": str(directory)} if directory else {}), **options})
        config.cache_config.num_gpu_blocks_override = config.cache_config.num_gpu_blocks = blocks
        specs = {f"layer.{number}": full_attention() for number in range(LAYERS)}
        (cache,) = kv_cache_configs(config, [specs], [1 << 40])
        cache.kv_cache_layout = config.cache_config.kv_cache_layout
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._worker = KvoffdConnector(config, KVConnectorRole.WORKER, cache)
        kv_transfer_state._KV_CONNECTOR_AGENT = self._worker
        self._runner = ModelRunner(config, rate)
        self._runner.initialize_kv_cache(cache)
        self._scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK_TOKENS, BLOCK_TOKENS)
        self.in_workers: Callable[[], AbstractContextManager[object]] = nullcontext
        """What the worker's half finds in its surroundings."""
        self._number = 0
        self._cached: dict[str, int] = {}
        """By request, how many of its tokens were not computed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        self._scheduler.shutdown()
        self._worker.shutdown()

    def wait_connected(self, directory: Path) -> None:
        """Make steps until both halves of the connector are connected and the memory is registered."""

        def connected() -> bool:
            self.step()
            with AdminClient(directory) as admin:
                sessions = admin.sessions().sessions
            return any(one.registrations for one in sessions) and any(one.role == "scheduler" for one in sessions)

        wait_until(connected)

    def generate(self, prompts: Sequence[list[int]], max_tokens: int = 1) -> list[int]:
        """Serve these prompts at once; return how many tokens of each were not computed."""
        requests = [self._request(prompt, max_tokens) for prompt in prompts]
        for request in requests:
            self._scheduler.add_request(request)
        deadline = time.monotonic() + MAX_S
        while self._scheduler.has_requests():
            assert time.monotonic() < deadline, [request.status for request in requests]
            self.step()
        return [self._cached.pop(request.request_id) for request in requests]

    def step(self) -> None:
        """Make one step, as vLLM's engine core does."""
        output = self._scheduler.schedule()
        with self.in_workers():
            result: Any = self._runner.execute_model(output) or self._runner.sample_tokens()
        for outputs in self._scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                if one.prefill_stats is not None:
                    self._cached[one.request_id] = one.prefill_stats.num_cached_tokens
        if not output.total_num_scheduled_tokens:
            time.sleep(EMPTY_STEP_S)

    def forget(self) -> None:
        """Clear the engine's own prefix cache, when stores have ended that read its blocks."""

        def forgotten() -> bool:
            self.step()
            return bool(self._scheduler.reset_prefix_cache())

        wait_until(forgotten)

    def _request(self, prompt: list[int], max_tokens: int) -> Request:
        self._number += 1
        sampling = SamplingParams(max_tokens=max_tokens)
        return Request(f"r{self._number}", prompt, sampling, None, block_hasher=self._hasher)


PROMPTS = [prompt(seed, 1001) for seed in range(1, 9)]
PATIENCE_MS = 5000
"""How soon a daemon without a CPU answers is no matter of this test."""
FULL = [full_blocks(len(each)) for each in PROMPTS]
WARM_UP = [prompt(seed, 257) for seed in (11, 12)]
BLOCKS = 320
RATE = 125
BYTES_PER_SECOND = 8e6


@pytest.fixture
def store(model: Path) -> Iterator[RedisServer]:
    """One that has PROMPTS."""
    with RedisServer() as server:
        with DaemonProcess("128MiB", shared=server.url, shared_write="always") as daemon:
            with EngineOfParts(model, daemon.directory, BLOCKS, 1e9) as engine:
                engine.wait_connected(daemon.directory)
                fill_tiers(daemon.directory, engine, PROMPTS, sum(FULL) // BLOCK_TOKENS)
        yield server


def test_eight_prompts_at_once_come_whole_from_a_slow_store(model: Path, store: RedisServer) -> None:
    """Loading takes 4 s and computing 64 s, so that nothing is computed.

    The machine may give the line, the daemon and the engine no CPU now and then.
    """
    with (
        SlowLink(store.port, BYTES_PER_SECOND) as link,
        DaemonProcess("128MiB", shared=link.url, shared_ask_deadline="5s") as daemon,
    ):
        with EngineOfParts(model, daemon.directory, BLOCKS, RATE, lookup_deadline_ms=PATIENCE_MS) as engine:
            engine.wait_connected(daemon.directory)
            for each in WARM_UP:
                engine.generate([each])
            loaded = engine.generate(PROMPTS)
            assert loaded == FULL, why_computed(engine, daemon.directory, len(WARM_UP) + len(PROMPTS))


def why_computed(engine: EngineOfParts, directory: Path, prompts: int) -> str:
    """What the engine reported of so many prompts, and the daemon of its tiers."""
    with AdminClient(directory) as admin:

        def reported() -> bool:
            engine.step()  # reports are sent once a second
            return len(admin.ask(ListPrompts).prompts) >= prompts

        wait_until(reported)
        computed = [one for one in admin.ask(ListPrompts).prompts if not one.report.loaded_tokens]
        return f"{computed}; {admin.stats().tiers}"


WHY = "The driver cannot export the memory at 0x7f0000000000."


def test_doctor_says_why_and_prompts_are_computed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise NotShareable(WHY)

    monkeypatch.setattr(KvoffdSpec, "_connect_worker", refuse)
    monkeypatch.setattr("kvoffd_client.vllm.engine_reports.REPORT_EVERY_S", 0.0)
    with DaemonProcess("64MiB") as daemon, EngineOfParts(model, daemon.directory, BLOCKS, 1e9) as engine:

        def said() -> list[str]:
            assert engine.generate([prompt(1, 900)]) in ([0], [896]), "computed, or in vLLM's own cache"
            report = json.loads(run_cli("doctor", "--json", "--directory", str(daemon.directory)).stdout)
            return [one["evidence"] for one in report["findings"] if one["check"] == "engine_refused"]

        (evidence,) = wait_until(said, interval_s=0.2)
    assert evidence.endswith(f"is not registered: worker 0: {WHY}")


def without_directory() -> AbstractContextManager[object]:
    """The environment of a worker that Ray started, which copies only some variables."""
    here = {name: value for name, value in os.environ.items() if not name.startswith("KVOFFD_")}
    return patch.dict(os.environ, here, clear=True)


@pytest.mark.parametrize("relative", [False, True])
def test_workers_find_the_daemon_of_the_scheduler(
    relative: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their own environment and working directory do not matter."""

    @contextmanager
    def in_workers() -> Iterator[None]:
        with without_directory(), chdir(tmp_path):
            yield

    with DaemonProcess("64MiB") as daemon:
        monkeypatch.chdir(daemon.directory.parent)
        monkeypatch.setenv("KVOFFD_DIRECTORY", daemon.directory.name if relative else str(daemon.directory))
        with EngineOfParts(model, None, BLOCKS, 1e9) as engine:
            engine.in_workers = in_workers
            engine.generate([PROMPTS[0]])
            engine.wait_connected(daemon.directory)
            engine.generate([PROMPTS[0]])
            engine.generate([PROMPTS[1]])
            wait_books(daemon.directory, lambda found: found.ready_blocks > 0)
            engine.forget()
            assert engine.generate([PROMPTS[1]]) == [FULL[1]]


def test_halves_that_reach_different_daemons_are_said(
    model: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """As where containers of workers have another one mounted at the same place."""
    monkeypatch.setattr(engine_namespace, "APART_S", 0.2)
    monkeypatch.setattr("kvoffd_client.vllm.engine_reports.REPORT_EVERY_S", 0.0)
    with DaemonProcess("64MiB") as daemon, DaemonProcess("64MiB") as other:
        with EngineOfParts(model, daemon.directory, BLOCKS, 1e9) as engine:
            connect = KvoffdSpec._connect_worker

            def elsewhere(spec: KvoffdSpec, *arguments: Any) -> Any:
                assert spec.directory == str(daemon.directory)
                spec.directory = str(other.directory)
                return connect(spec, *arguments)

            monkeypatch.setattr(KvoffdSpec, "_connect_worker", elsewhere)

            def refused() -> list[str]:
                engine.generate([PROMPTS[0]])
                report = json.loads(run_cli("doctor", "--json", "--directory", str(daemon.directory)).stdout)
                return [one["evidence"] for one in report["findings"] if one["check"] == "engine_refused"]

            (evidence,) = wait_until(refused, interval_s=0.2)
    why = f"The scheduler is connected to the daemon in {daemon.directory}, but these workers have not registered"
    assert why in evidence
    lines = [line for line in said if "stores and loads nothing" in line]
    assert [line.count(why) for line in lines] == [1, 0]
    assert lines[1].endswith(f"another daemon than the scheduler, which it finds in {other.directory}.")


DEADLINE_S = 15.0
"""What the scheduler must not wait for: many times the 20 ms of a short prompt while the rate is not known."""


def test_new_prompts_do_not_wait_out_the_deadline(model: Path) -> None:
    """Each of two prompts would wait for 15 s. The daemon learns that their lookups were late."""
    with DaemonProcess() as daemon, AdminClient(daemon.directory) as admin:
        options = {"directory": str(daemon.directory), "lookup_deadline_ms": 1000 * DEADLINE_S}
        scheduler, hasher = make_scheduler(make_config(model, options, max_model_len=1024), 30)
        manager = scheduler.connector._manager
        manager.namespace.join(NamespaceSpec.named("waits"))  # there are no workers to report it
        wait_until(lambda: manager.namespace.client.ready)
        serial = itertools.count(3)

        def prompt_s() -> float:
            """Seconds from a new prompt's arrival until it is computed."""
            number = next(serial)
            request = Request(f"r{number}", [number] * 64, SamplingParams(max_tokens=1), None, block_hasher=hasher)
            began = time.perf_counter()
            scheduler.add_request(request)
            while request.request_id not in scheduler.schedule().num_scheduled_tokens:
                time.sleep(0.001)  # as vLLM's engine after a step in which no model ran
            took = time.perf_counter() - began
            scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
            return took

        os.kill(daemon.pid, signal.SIGSTOP)
        seconds = [prompt_s() for _ in range(2)]
        os.kill(daemon.pid, signal.SIGCONT)
        assert max(seconds) < DEADLINE_S / 5

        def reported_late() -> int:
            manager._report_at = 0.0
            prompt_s()
            (found,) = admin.stats().namespaces
            return found.late_lookups

        wait_until(lambda: reported_late() >= 2)
        scheduler.shutdown()
