"""Requests that are aborted while they are loaded leave no block of the KV cache, no lease, no pin and no error."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.kit.amount import TIMES
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import EngineProcess, cached, prompt, tokens, wait_books, wait_connected, wait_stored
from tests.kit.waiting import wait_until
from tests.kit.wire import Books, books
from tests.vllm.engine_home import EngineHome
from tests.vllm.engine_server import MODEL, EngineServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ABORTS = 200 * TIMES
AT_ONCE = 10
LOAD_S = 0.02
"""Time of a copy, within which a request may be aborted."""
PROMPTS = [prompt(seed, 330) for seed in range(40)]
CACHE_BLOCKS = 60
"""Of five prompts, so that most of the others are loaded again."""
HELD_AT_REST = {"sessions", "registrations"}
REST_DEADLINE_S = 60.0


def at_rest(found: Books) -> bool:
    """Whether the daemon holds nothing for its engines but their connections."""
    return found.held.keys() <= HELD_AT_REST


@pytest.fixture
def slow_daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess("256MiB", faults=True) as daemon:
        yield daemon


@pytest.mark.nightly
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_aborts_while_loading_leave_nothing(model: Path, slow_daemon: DaemonProcess, v2: bool) -> None:
    directory = slow_daemon.directory
    with EngineProcess(model, directory, v2=v2, patient=True, num_blocks=CACHE_BLOCKS, max_model_len=1024) as engine:
        wait_connected(directory)
        cold = [engine.generate([each])[0] for each in PROMPTS]
        stored = wait_stored(directory)
        begun = stored.load.jobs
        order = Random(1).choices(PROMPTS, k=ABORTS)
        with slow_daemon.fault(f"load slow {LOAD_S}"):
            for first in range(0, ABORTS, 200):
                engine.call("abort_each", prompts=order[first : first + 200], at_once=AT_ONCE, most_s=0.06)
        wait_books(directory, at_rest, REST_DEADLINE_S)
        engine.forget()  # vLLM refuses while a request has a block
        assert books(directory).load.jobs - begun > ABORTS // 10
        warm = [engine.generate([each])[0] for each in PROMPTS]
        assert tokens(warm) == tokens(cold)
        assert min(cached(warm)) > 0
        wait_books(directory, at_rest, REST_DEADLINE_S)
        engine.forget()
        assert engine.metrics()["vllm:kv_cache_usage_perc"] == 0.0


STREAMS = 64
STREAM_TOKENS = 300
STREAMED = [prompt(100 + seed, 1500) for seed in range(16)]
"""Eight of them fit into the server's KV cache, and their answers do not."""


def begin_stream(server: EngineServer, asked: list[int]) -> socket.socket:
    """Send a request for a stream; nothing of it is read."""
    body = {"model": MODEL, "prompt": asked, "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(text)}\r\n"
    stream = socket.create_connection(("127.0.0.1", server.port), timeout=30.0)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as when its process is killed
    stream.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + text)
    return stream


def counter(server: EngineServer, name: str) -> float:
    """The value of one of the server's metrics."""
    lines = server.ask("GET", "/metrics")[1].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@pytest.mark.nightly
def test_streams_whose_client_dies_while_they_are_loaded_leave_nothing(home: EngineHome, server: EngineServer) -> None:
    home.ensure_no_daemon()
    home.ensure_daemon(server)
    directory = home.directory
    expected = server.generate(STREAMED)
    wait_stored(directory)
    server.forget()
    preempted = counter(server, "vllm:num_preemptions_total")
    streams = [begin_stream(server, each) for each in STREAMED * (STREAMS // len(STREAMED))]
    wait_until(lambda: counter(server, "vllm:num_preemptions_total") > preempted, 100.0)
    with home.daemon.fault("load slow 0.2"):
        wait_books(directory, lambda found: found.load.running_jobs + found.load.queued_jobs > 0, 100.0)
        for stream in streams:
            stream.close()
    wait_books(directory, at_rest, REST_DEADLINE_S)
    wait_until(lambda: not counter(server, "vllm:num_requests_running"), REST_DEADLINE_S)
    server.forget()  # vLLM refuses while a request has a block
    again = server.generate(STREAMED[:8])
    assert tokens(again) == tokens(expected[:8])
    assert min(cached(again)) > 0
    wait_books(directory, at_rest, REST_DEADLINE_S)
    server.forget()
    assert counter(server, "vllm:kv_cache_usage_perc") == 0.0
