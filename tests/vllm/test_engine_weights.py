"""Two real engines of one checkpoint share blocks only while the weights in their memory are the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvoffd_client import AdminClient
from kvoffd_proto.messages import StatsReply
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import EngineProcess, full_blocks, prompt, wait_connected, wait_stats
from tests.kit.models import make_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

LENGTH = 777
PROMPT = [prompt(1, LENGTH)]
OTHER_PROMPT = [prompt(2, LENGTH)]
ALL = full_blocks(LENGTH)
BLOCKS = LENGTH // 32


@dataclass
class Pair:
    """Two engines that began with the same weights, and the daemon between them."""

    trained: EngineProcess
    base: EngineProcess
    admin: AdminClient
    other_checkpoint: Path

    def blocks(self) -> list[int]:
        """Blocks of each namespace."""
        return sorted(item.ready_blocks for item in self.admin.namespaces().namespaces)

    def wait_blocks(self, count: int) -> None:
        """Until so many blocks are stored in all namespaces."""

        def stored(stats: StatsReply) -> bool:
            return sum(item.ready_blocks for item in stats.namespaces) == count

        wait_stats(self.admin, stored)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    models = tmp_path_factory.mktemp("models")
    model, other = make_tiny_llama(models / "model"), make_tiny_llama(models / "other", seed=7)
    keep_embeddings(model, other)
    with DaemonProcess("256MiB") as daemon, AdminClient(daemon.directory) as admin:
        # vLLM sends functions to workers only where this is allowed.
        environ = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        engines = [EngineProcess(model, daemon.directory, environ=environ) for _ in range(2)]
        try:
            with ThreadPoolExecutor() as pool:
                list(pool.map(EngineProcess.start, engines))
            wait_connected(admin, 2)
            yield Pair(*engines, admin, other)
        finally:
            for engine in engines:
                engine.close()


def keep_embeddings(model: Path, other: Path) -> None:
    """Give ``other`` the weights of ``model`` but for its matrices inside the layers, which are what training adapts.

    Those are what vLLM's CPU kernels keep where no parameter shows them.
    """
    base, changed = (load_file(path / "model.safetensors") for path in (model, other))
    save_file(base | {name: weight for name, weight in changed.items() if "_proj" in name}, other / "model.safetensors")


def once(engine: EngineProcess, prompts: list[list[int]] = PROMPT) -> tuple[list[int], int]:
    """The tokens of one prompt, and how many of the prompt's own were not computed."""
    (completion,) = engine.generate(prompts)
    return completion.tokens, completion.cached


def test_blocks_follow_the_weights_in_memory(pair: Pair) -> None:
    trained, base = pair.trained, pair.base
    cold, _ = once(trained)
    pair.wait_blocks(BLOCKS)
    assert once(base) == (cold, ALL), "equal weights share"

    # A reset alone, as of an engine that is paused, takes nothing from anybody.
    trained.forget(connector=True)
    assert once(trained) == (cold, ALL)
    assert pair.blocks() == [BLOCKS]

    # Weights are changed in place by a method that kvoffd cannot know, and vLLM is told, as its documentation says.
    trained.call("flip_weights")
    trained.forget(connector=True)
    changed, cached = once(trained)
    assert cached == 0
    assert changed != cold
    pair.wait_blocks(2 * BLOCKS)
    assert pair.blocks() == [BLOCKS, BLOCKS]
    trained.forget(connector=True)
    assert once(trained) == (changed, ALL), "an engine finds its own blocks of these weights again"
    base.forget()
    assert once(base) == (cold, ALL), "the other engine keeps its own"

    # The weights of before come back, and with them their blocks.
    trained.call("flip_weights")
    trained.forget(connector=True)
    assert once(trained) == (cold, ALL)


def test_weights_that_change_without_a_reset_store_nothing_under_a_wrong_name(pair: Pair) -> None:
    trained, base = pair.trained, pair.base
    once(trained)
    before = pair.blocks()
    trained.call("reload_weights", path=str(pair.other_checkpoint))
    changed, _ = once(trained, OTHER_PROMPT)
    once(trained, OTHER_PROMPT)
    assert "Nothing is stored until" in trained.log
    computed, cached = once(base, OTHER_PROMPT)
    assert cached == 0
    assert computed != changed
    pair.wait_blocks(sum(before) + BLOCKS)  # what the other engine stored
    trained.forget(connector=True)
    assert once(trained, OTHER_PROMPT) == (changed, 0)
    pair.wait_blocks(sum(before) + 2 * BLOCKS)
    trained.forget()
    assert once(trained, OTHER_PROMPT) == (changed, ALL)
