"""A LoRA adapter that is replaced at its path: a real engine reads no blocks of the adapter that was there before."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffd_client import AdminClient
from tests.support.daemon import DaemonProcess
from tests.support.engine import EngineProcess, full_blocks, prompt, wait_connected, wait_stats
from tests.support.models import make_tiny_llama, write_lora_adapter

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LENGTH = 500
PROMPT = [prompt(1, LENGTH)]
ALL = full_blocks(LENGTH)
BLOCKS = LENGTH // 32


def once(engine: EngineProcess, path: Path | None) -> tuple[list[int], int]:
    """The tokens of the prompt with the adapter of this path, and how many of the prompt's were not computed."""
    adapter = ("an adapter", 1, str(path)) if path else None
    (completion,) = engine.generate(PROMPT, adapter=adapter)
    return completion.tokens, completion.cached


def wait_blocks(admin: AdminClient, count: int) -> None:
    wait_stats(admin, lambda stats: sum(item.ready_blocks for item in stats.namespaces) == count)


def test_blocks_follow_the_content_of_an_adapter(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model")
    adapter = write_lora_adapter(tmp_path / "adapter", seed=1)
    with DaemonProcess("256MiB") as daemon, AdminClient(daemon.directory) as admin:
        engine = EngineProcess(model, daemon.directory, enable_lora=True, max_lora_rank=8)
        try:
            engine.start()
            wait_connected(admin)
            first, cached = once(engine, adapter)
            assert cached == 0
            wait_blocks(admin, BLOCKS)
            engine.forget()
            assert once(engine, adapter) == (first, ALL)
            plain, cached = once(engine, None)
            assert cached == 0
            assert plain != first
            wait_blocks(admin, 2 * BLOCKS)

            # Its files are replaced while it is loaded: what is in memory is still the first.
            write_lora_adapter(adapter, seed=2)
            engine.forget()
            assert once(engine, adapter) == (first, 0)
            assert "the files of the LoRA adapter an adapter changed" in engine.log

            engine.kill()
            engine.start()
            wait_connected(admin)
            second, cached = once(engine, adapter)
            assert cached == 0
            assert second != first
            wait_blocks(admin, 3 * BLOCKS)
            engine.forget()
            assert once(engine, adapter) == (second, ALL)
            assert once(engine, None) == (plain, ALL)
            # The control: the same content at another path, which no block has.
            other = write_lora_adapter(tmp_path / "other", seed=2)
            (control,) = engine.generate(PROMPT, adapter=("another", 2, str(other)))
            assert (control.tokens, control.cached) == (second, 0)
        finally:
            engine.close()
