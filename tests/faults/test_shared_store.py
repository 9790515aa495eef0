"""A Redis that nodes share becomes full, asks for a password or turns into a replica: reads go on, or are misses.

One that is killed, comes back empty or stands still, and resets of a fleet: ``tests/daemon/test_shared.py``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

import pytest

from tests.faults.checked import CheckedEngine, Truth
from tests.faults.daemons import Command
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_ports
from tests.kit.redis_server import RedisServer
from tests.kit.waiting import wait_until
from tests.kit.wire import SharedStats, books

BLOCKS = 16
ALL = range(BLOCKS)
BACK_S = 60.0
"""A store that fails is tried again at growing intervals."""


@pytest.fixture(scope="module")
def module_redis() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture(scope="module")
def module_node(module_redis: RedisServer) -> Iterator[DaemonProcess]:
    with DaemonProcess("8MiB", shared=module_redis.url, shared_write="always") as running:
        yield running


def shared(node: DaemonProcess) -> SharedStats:
    return books(node.directory).shared[0]


Fault = Callable[[RedisServer], None]


def full(redis: RedisServer) -> None:
    assert redis.command("CONFIG", "SET", "maxmemory", "1mb") == b"+OK\r\n"


def room(redis: RedisServer) -> None:
    assert redis.command("CONFIG", "SET", "maxmemory", "0") == b"+OK\r\n"


def replica(redis: RedisServer) -> None:
    (port,) = free_ports(1)
    assert redis.command("REPLICAOF", "127.0.0.1", str(port)) == b"+OK\r\n"


def master(redis: RedisServer) -> None:
    assert redis.command("REPLICAOF", "NO", "ONE") == b"+OK\r\n"


@pytest.mark.parametrize(("fault", "mend", "cause"), [(full, room, "maxmemory"), (replica, master, "replica")])
def test_a_store_that_takes_no_writes(
    module_redis: RedisServer, module_node: DaemonProcess, command: Command, fault: Fault, mend: Fault, cause: str
) -> None:
    """What is there is read, the cause is a reason in health, and writes go on when it is mended."""
    node, truth = module_node, Truth()
    with CheckedEngine(node, truth, cause) as engine:
        wait_until(lambda: shared(node).up, BACK_S, explain=lambda: shared(node))
        at = 2 * BLOCKS

        def written_again() -> bool:
            nonlocal at
            """All of them: of a batch that was on its way when the fault was mended some are refused, some not."""
            before = shared(node).written_blocks
            engine.put(range(at, at + BLOCKS))
            at += BLOCKS
            wait_until(lambda: shared(node).queued_writes == 0, explain=lambda: shared(node))
            return shared(node).written_blocks == before + BLOCKS

        # The fault of the test before may have writes put off for a while yet.
        wait_until(written_again, BACK_S, explain=lambda: shared(node), interval_s=0.2)
        written = shared(node).written_blocks
        engine.put(ALL)
        wait_until(lambda: shared(node).written_blocks == written + BLOCKS, explain=lambda: shared(node))
        fault(module_redis)
        try:
            engine.put(range(BLOCKS, 2 * BLOCKS))
            wait_until(lambda: books(node.directory).problems, explain=lambda: shared(node))
            text = wait_until(lambda: cause in command(node, "health")[1].lower() and command(node, "health")[1])
            assert module_redis.name.rpartition(":")[2] in text, text
            assert engine.get(range(2 * BLOCKS)) == list(range(2 * BLOCKS))
        finally:
            mend(module_redis)
        wait_until(written_again, BACK_S, explain=lambda: shared(node), interval_s=0.2)


def authorized(redis: RedisServer, word: str, command: str) -> None:
    with socket.create_connection(("127.0.0.1", redis.port), 5.0) as connected:
        connected.sendall(f"AUTH {word}\r\n{command}\r\nPING\r\n".encode())
        said = b""
        while b"+PONG" not in said:
            said += connected.recv(4096) or pytest.fail(f"Redis closed: {said!r}")
        assert b"-" not in said, said


def test_a_store_that_asks_for_a_password(
    module_redis: RedisServer, module_node: DaemonProcess, command: Command
) -> None:
    """It was set while nodes were connected: their blocks are misses, health says so, and it is well without."""
    node, truth, word = module_node, Truth(), os.urandom(8).hex()
    with CheckedEngine(node, truth, "password") as engine:
        wait_until(lambda: shared(node).up, BACK_S, explain=lambda: shared(node))
        engine.put(ALL)
        assert module_redis.command("CONFIG", "SET", "requirepass", word) == b"+OK\r\n"
        try:
            authorized(module_redis, word, "CLIENT KILL TYPE normal SKIPME yes")
            wait_until(lambda: not shared(node).up, BACK_S, explain=lambda: shared(node))
            assert engine.get(ALL) == list(ALL)
            assert "password" in command(node, "health")[1].lower()
        finally:
            authorized(module_redis, word, 'CONFIG SET requirepass ""')
        wait_until(lambda: shared(node).up, BACK_S, explain=lambda: shared(node))
        assert engine.get(ALL) == list(ALL)
