"""Blocks that are read in the pool itself, and a process that was stopped: the reader, or the daemon."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from kvoffd_client import AdminClient, BlockClient, BlockUnavailable, ClientOptions, RequestTimeout
from kvoffd_client.blocks.block_session import BlockSession
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until

KEY, OTHERS = bytes(32), [bytes([number]) * 32 for number in range(1, 17)]


def test_a_process_that_was_stopped_reads_no_other_blocks_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It renews nothing meanwhile, and has not been told yet that its lease is over and its slots given away."""
    with (
        DaemonProcess(
            "1MiB", block_access="read", lease_ttl="1s", heartbeat_interval="200ms", eviction_policy="lru"
        ) as daemon,
        FakeEngine(daemon.directory, page_bytes=16384, blocks=len(OTHERS)) as engine,
        AdminClient(daemon.directory) as admin,
        BlockClient(daemon.directory) as client,
    ):
        engine.fill([0], seed=1)
        assert engine.store([KEY], [0]).ok
        monkeypatch.setattr(BlockSession, "_renewals", lambda *_: [])
        block = client.get_block(admin.namespaces().namespaces[0].namespace, KEY)
        view = block.shards[0].data
        before = view.copy()
        wait_until(lambda: not admin.stats().pool.pinned_bytes)
        engine.fill(range(len(OTHERS)), seed=2)
        assert engine.store(OTHERS, range(len(OTHERS))).ok
        assert not np.array_equal(view, before), "the slot is another block's by now"
        for read in (lambda: block.shards[0].data, block.copy, block.verify):
            with pytest.raises(BlockUnavailable, match="not held any more"):
                read()


def test_a_daemon_that_was_stopped_is_not_waited_for_to_give_a_block_back() -> None:
    options = ClientOptions(request_timeout_s=1.0, unresponsive_after_s=0.2)
    with (
        DaemonProcess("1MiB", block_access="read") as daemon,
        FakeEngine(daemon.directory, page_bytes=16384, blocks=1) as engine,
        BlockClient(daemon.directory, options) as client,
    ):
        assert engine.store([KEY], [0]).ok
        block = client.get_block(engine.namespace.fingerprint, KEY)
        os.kill(daemon.pid, signal.SIGSTOP)
        with pytest.raises(RequestTimeout):
            client.stats()
        client.timeout_s, began = 30.0, time.monotonic()
        block.close()
        assert time.monotonic() - began < 15
