"""Hints as vLLM's Python API takes them, ``kv_hints``, in a real engine: the daemon does what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.kit.checked import over_disk, wait_disk, wait_written
from tests.kit.command import command
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import BLOCK_TOKENS, Completion, prompt, wait_connected, wait_stored
from tests.kit.waiting import wait_until
from tests.kit.wire import NamespaceStats, books
from tests.vllm.engine_home import EngineHome

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

BLOCKS = 10
PROMPT = prompt(11, BLOCKS * BLOCK_TOKENS + 5)


def test_each_action_reaches_the_daemon(home: EngineHome, tmp_path: Path) -> None:
    """``kv.retain``, ``kv.release``, and ``kv.prefetch`` of what only the disk has, by a request that does not wait."""

    def ask(action: str = "", params: dict[str, Any] | None = None, **payload: object) -> Completion:
        payload["owner"] = "me"
        given = {"action_id": "1", "action_type": action, "action_version": "1.0", "payload": payload}
        hints = {"protocol_version": "0.1", "message_id": "1", "actions": [given]} if action else None
        engine.forget()
        (answer,) = engine.generate([PROMPT], hints=hints, transfer=[params])
        return answer

    def space() -> NamespaceStats:
        (namespace,) = [one for one in books(home.directory).namespaces.values() if one.ready_blocks]
        return namespace

    def wait_retained(blocks: int) -> None:
        block_bytes = space().ready_bytes / space().ready_blocks
        wait_until(lambda: books(home.directory).pool.retained_bytes == blocks * block_bytes)

    engine = home.engine
    home.ensure_no_daemon()
    with over_disk(tmp_path, "64MiB", "64MiB", directory=home.directory) as daemon:
        wait_disk(daemon)
        wait_connected(home.directory, pids=lambda: engine.pids)
        computed = ask("kv.retain", ttl_s=600, priority=90)
        wait_stored(home.directory)
        wait_retained(BLOCKS)
        assert ask("kv.release").tokens == computed.tokens
        wait_retained(0)
        assert (space().retained_blocks, space().released_blocks) == (BLOCKS, BLOCKS)
        wait_written(daemon, BLOCKS)
        daemon.stop()
        daemon.start()
        wait_disk(daemon)
        wait_connected(home.directory, pids=lambda: engine.pids)
        assert ask("kv.prefetch", {"kv_load_tiers": []}).tokens == computed.tokens
        wait_until(lambda: space().prefetched_keys == BLOCKS, explain=space)
        loaded = ask()
        assert (loaded.cached, loaded.tokens) == (BLOCKS * BLOCK_TOKENS, computed.tokens)


def test_the_page_s_example_retains(home: EngineHome) -> None:
    """And the request's line says so."""
    page = (Path(__file__).parents[2] / "client" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page.partition("\n## Hints")[2].partition("\n## ")[0], re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - the page is ours
    params = names["retaining"](600, max_tokens=1).extra_args["kv_transfer_params"]
    home.ensure_no_daemon()
    with DaemonProcess("64MiB", home.directory) as daemon:
        wait_connected(home.directory, pids=lambda: home.engine.pids)
        home.engine.forget()
        home.engine.generate([PROMPT], transfer=[params])
        wait_stored(home.directory)
        wait_until(lambda: books(home.directory).pool.retained_bytes > 0)
        line = f"Hints: kv.retain of {BLOCKS} keys."
        wait_until(lambda: line in " ".join(command(daemon, "clients", "--requests")[1].split()))
