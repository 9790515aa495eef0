"""Real engines with NIXL beside kvoffd in vLLM's MultiConnector, in both orders: a prefill and a decode engine.

The prefill engine names kvoffd first, the decode engine NIXL first, so a decode takes its prompt from the prefill
engine where it can, and from kvoffd otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvoffd_client import AdminClient
from tests.kit.amount import TIMES
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import (
    BLOCK_TOKENS,
    PATIENCE,
    Completion,
    EngineProcess,
    cached,
    completions,
    connector_config,
    full_blocks,
    prompt,
    tokens,
    wait_books,
    wait_connected,
)
from tests.kit.ports import free_port
from tests.kit.wire import Books, books

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

LENGTHS = [700, 400, 550]
PROMPTS = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
STORED = sum(length // BLOCK_TOKENS for length in LENGTHS)
POLL_WATCH_S = 0.5
FULL = [full_blocks(length) for length in LENGTHS]


def nixl(role: str) -> dict[str, Any]:
    """NIXL, whose leases last on a busy machine: a thread of each engine polls, which leaves two cores little."""
    options = {"kv_lease_duration": 300}
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": options}


class Pair:
    """A daemon, a prefill and a decode engine."""

    def __init__(self, model: Path) -> None:
        self.daemon = DaemonProcess("256MiB", faults=True)
        kvoffd = connector_config(self.daemon.directory, PATIENCE)
        self.prefill = self._engine(model, [kvoffd, nixl("kv_producer")])
        self.decode = self._engine(model, [nixl("kv_consumer"), kvoffd])

    def _engine(self, model: Path, connectors: list[dict[str, Any]]) -> EngineProcess:
        return EngineProcess(
            model,
            self.daemon.directory,
            transfer={
                "kv_connector": "MultiConnector",
                "kv_buffer_device": "cpu",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": [{"kv_buffer_device": "cpu", **c} for c in connectors]},
            },
            environ={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "UCX_TLS": "tcp,posix,sysv,self"},
        )

    def start(self) -> None:
        self.daemon.start()
        with ThreadPoolExecutor() as pool:
            list(pool.map(EngineProcess.start, [self.prefill, self.decode]))
        wait_connected(self.daemon.directory, 2)

    def forget_all(self) -> None:
        """Nobody has any block."""
        self.forget_engines()
        with AdminClient(self.daemon.directory) as admin:
            admin.clear()

    def forget_engines(self) -> None:
        for engine in (self.prefill, self.decode):
            if engine.running:
                engine.forget()

    def until_stored(self) -> Books:
        return wait_books(self.daemon.directory, lambda found: found.ready_blocks == STORED)

    def prefill_and_decode(self) -> tuple[list[Completion], list[Completion]]:
        """As a router does it: one token of the prefill engine, the rest of the decode engine."""
        wanted = {"do_remote_decode": True, "do_remote_prefill": False}
        first = self.prefill.generate(PROMPTS, max_tokens=1, transfer=[wanted] * len(PROMPTS))
        answers = self.decode.generate(PROMPTS, transfer=[answer.transfer for answer in first])
        return first, answers

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
        self.daemon.close()


def yield_polling_threads(pids: Iterable[int]) -> None:
    """Have the threads of idle processes that poll run only where nothing else wants to.

    NIXL's does. On the CPU that it had, Linux 6.18 let nothing else run for seconds or minutes, several times
    ("workqueue lockup" in the kernel's log): a daemon did not answer, or was killed and not gone. Not for engines that
    take blocks over NIXL: on a busy machine those would wait long.
    """
    before = cpu_ticks(pids)
    time.sleep(POLL_WATCH_S)
    most = POLL_WATCH_S * os.sysconf("SC_CLK_TCK")
    for thread, ticks in cpu_ticks(pids).items():
        if ticks - before.get(thread, ticks) > most / 4:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def cpu_ticks(pids: Iterable[int]) -> dict[int, int]:
    """What all threads of some processes have used, by thread."""
    found = {}
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError):
                fields = (thread / "stat").read_text().rpartition(")")[2].split()
                found[int(thread.name)] = int(fields[11]) + int(fields[12])
    return found


@pytest.fixture
def prefill(model: Path) -> Iterator[Pair]:
    """The prefill engine alone."""
    made = Pair(model)
    try:
        made.daemon.start()
        made.prefill.start()
        wait_connected(made.daemon.directory)
        yield_polling_threads(made.prefill.pids)
        yield made
    finally:
        made.close()


@pytest.mark.usefixtures("early_server")
def test_multi_loads_and_recomputes_a_load_that_fails(prefill: Pair) -> None:
    """vLLM's MultiConnector hides a child's failed loads from a policy that is not ``recompute``."""
    engine, daemon = prefill.prefill, prefill.daemon
    assert "kv_load_failure_policy was 'fail' and is now 'recompute'" in engine.log
    cold = engine.generate(PROMPTS)
    prefill.until_stored()
    engine.forget()
    warm = engine.generate(PROMPTS)
    assert (cached(cold), cached(warm)) == ([0, 0, 0], FULL)
    assert tokens(warm) == tokens(cold)
    assert engine.metrics()["vllm:kv_offload_load_bytes"] == prefill.until_stored().load.bytes, (
        "as doctor compares them"
    )
    engine.forget()
    with daemon.fault("load slow 30"):
        engine.begin("generate", prompts=PROMPTS, max_tokens=8)
        wait_books(daemon.directory, lambda found: found.load.running_jobs + found.load.queued_jobs >= len(LENGTHS))
        daemon.kill()
        answers = completions(engine.finish())
    assert [answer.finish for answer in answers] == ["length"] * len(LENGTHS)
    assert tokens(answers) == tokens(cold)


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Pair]:
    made = Pair(model)
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[list[int]]:
    """What one engine computes that loads nothing."""
    pair.forget_all()
    cold = pair.prefill.generate(PROMPTS)
    assert cached(cold) == [0, 0, 0]
    pair.until_stored()
    return tokens(cold)


@pytest.mark.nightly
def test_multi_decode_takes_the_prompt_over_nixl_then_from_kvoffd(pair: Pair, expected: list[list[int]]) -> None:
    pair.forget_all()
    first, answers = pair.prefill_and_decode()
    assert cached(first) == [0, 0, 0]
    assert tokens(answers) == expected
    loaded = pair.until_stored().load.bytes
    # A transfer over NIXL may fail on a busy machine; its request is recomputed.
    assert pair.decode.call("tokens_by_source", cached=True)["p2p"] > 0
    pair.forget_engines()
    again = pair.decode.generate(PROMPTS)
    assert tokens(again) == expected
    assert cached(again) == FULL
    assert pair.until_stored().load.bytes > loaded
    # What doctor compares. vLLM's external hits are of NIXL too.
    counted = [engine.metrics() for engine in (pair.prefill, pair.decode)]
    assert sum(one.get("vllm:kv_offload_load_bytes", 0) for one in counted) == pair.until_stored().load.bytes


ABORTS = 100 * TIMES
ABORTED_LENGTH = 100
AT_ONCE = 10


@pytest.mark.nightly
def test_multi_survives_aborts_while_either_connector_receives_or_sends(pair: Pair) -> None:
    """vLLM asserts that it knows each request whose transfer has ended (``_update_from_kv_xfer_finished``).

    The prefill engine loads from kvoffd, to send over NIXL. The decode engine receives over NIXL what kvoffd has too.
    """
    pair.forget_all()
    asked = [prompt(1000 + seed, ABORTED_LENGTH) for seed in range(AT_ONCE)]
    cold = pair.prefill.generate(asked, max_tokens=1)
    stored = len(asked) * (ABORTED_LENGTH // BLOCK_TOKENS)
    wait_books(pair.daemon.directory, lambda found: found.ready_blocks == stored)
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    loads, received = (
        books(pair.daemon.directory).load.jobs,
        pair.decode.call("tokens_by_source", cached=True).get("p2p", 0),
    )
    with pair.daemon.fault("load slow 0.02"):
        for _ in range(0, ABORTS, AT_ONCE):
            pair.forget_engines()
            pair.prefill.call("abort_each", prompts=asked, at_once=AT_ONCE, most_s=0.01, transfer=[wanted] * AT_ONCE)
        assert books(pair.daemon.directory).load.jobs - loads > ABORTS // 10
        for _ in range(0, ABORTS, AT_ONCE):
            first = pair.prefill.generate(asked, max_tokens=1, transfer=[wanted] * AT_ONCE)
            sent = [answer.transfer for answer in first]
            pair.decode.forget()
            pair.decode.call("abort_each", prompts=asked, at_once=AT_ONCE, most_s=0.02, transfer=sent)
    pair.decode.forget()  # vLLM refuses while a request has a block
    assert tokens(pair.decode.generate(asked, max_tokens=1)) == tokens(cold)
    assert pair.decode.call("tokens_by_source", cached=True)["p2p"] > received
    assert tokens(pair.prefill.generate(asked, max_tokens=1)) == tokens(cold)
    wait_books(pair.daemon.directory, lambda found: not found.leases and not found.pinned_blocks)
