"""Two real engines of one checkpoint share blocks only while the weights in their memory are the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.kit.engine import BLOCK_TOKENS, EngineProcess, full_blocks, prompt, wait_books
from tests.kit.models import make_tiny_llama, write_lora_adapter
from tests.kit.wire import Books
from tests.vllm.engine_home import EngineHome
from tests.vllm.engine_server import EngineServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

LENGTH = 777
PROMPT = prompt(1, LENGTH)
OTHER_PROMPT = prompt(2, LENGTH)
ALL = full_blocks(LENGTH)
BLOCKS = LENGTH // BLOCK_TOKENS


@pytest.fixture
def pair(home: EngineHome, server: EngineServer) -> tuple[EngineProcess, EngineServer]:
    """An engine and a server that began with the same weights, and a new daemon between them."""
    home.ensure_no_daemon()
    home.ensure_daemon(home.engine, server)
    for one in (home.engine, server):
        one.forget()
    return home.engine, server


@pytest.fixture
def other_checkpoint(home: EngineHome, tmp_path: Path) -> Path:
    """Other matrices inside the layers, which are what training adapts, and the same embeddings.

    Those matrices are what vLLM's CPU kernels keep where no parameter shows them.
    """
    other = make_tiny_llama(tmp_path / "other", seed=7)
    base, changed = (load_file(path / "model.safetensors") for path in (home.model, other))
    save_file(base | {name: weight for name, weight in changed.items() if "_proj" in name}, other / "model.safetensors")
    return other


def once(engine: EngineProcess | EngineServer, tokens: list[int] = PROMPT) -> tuple[list[int], int]:
    """The tokens of one prompt, and how many of the prompt's own were not computed."""
    (completion,) = engine.generate([tokens])
    return completion.tokens, completion.cached


@pytest.fixture
def wait_blocks(home: EngineHome) -> Callable[[list[int]], None]:
    """Waits until the namespaces that have blocks have so many."""

    def wait(wanted: list[int]) -> None:
        def stored(found: Books) -> bool:
            return sorted(one.ready_blocks for one in found.namespaces.values() if one.ready_blocks) == wanted

        wait_books(home.directory, stored)

    return wait


def test_blocks_follow_the_weights_in_memory(
    pair: tuple[EngineProcess, EngineServer], wait_blocks: Callable[[list[int]], None]
) -> None:
    trained, base = pair
    cold, _ = once(trained)
    wait_blocks([BLOCKS])
    assert once(base) == (cold, ALL), "equal weights share"

    # A reset alone, as of an engine that is paused, takes nothing from anybody.
    trained.forget(connector=True)
    assert once(trained) == (cold, ALL)
    wait_blocks([BLOCKS])

    # Weights are changed in place by a method that kvoffd cannot know, and vLLM gets a call, as its documentation says.
    trained.call("flip_weights")
    trained.forget(connector=True)
    changed, cached = once(trained)
    assert cached == 0
    assert changed != cold
    wait_blocks([BLOCKS, BLOCKS])
    trained.forget(connector=True)
    assert once(trained) == (changed, ALL), "an engine finds its own blocks of these weights again"
    base.forget()
    assert once(base) == (cold, ALL), "the other engine keeps its own"

    # The weights of before come back, and with them their blocks.
    trained.call("flip_weights")
    trained.forget(connector=True)
    assert once(trained) == (cold, ALL)


def test_weights_that_change_without_a_reset(
    home: EngineHome,
    pair: tuple[EngineProcess, EngineServer],
    other_checkpoint: Path,
    wait_blocks: Callable[[list[int]], None],
) -> None:
    """Nothing is stored under a wrong name, and nothing at all until the reset."""
    base, trained = pair
    once(trained)
    wait_blocks([BLOCKS])
    trained.reload_weights(other_checkpoint)
    try:
        changed, _ = once(trained, OTHER_PROMPT)
        once(trained, OTHER_PROMPT)
        assert "Nothing is stored until" in trained.log
        computed, cached = once(base, OTHER_PROMPT)
        assert cached == 0
        assert computed != changed
        wait_blocks([2 * BLOCKS])  # what the other engine stored
        trained.forget(connector=True)
        assert once(trained, OTHER_PROMPT) == (changed, 0)
        wait_blocks([BLOCKS, 2 * BLOCKS])
        trained.forget()
        assert once(trained, OTHER_PROMPT) == (changed, ALL)
    finally:
        trained.reload_weights(home.model)
        trained.forget(connector=True)
    assert once(trained, OTHER_PROMPT) == (computed, ALL), "and so do these weights' blocks"


def test_blocks_follow_an_adapter_that_vllm_reads_anew(home: EngineHome, tmp_path: Path) -> None:
    """In place, where no request says so, or since it had dropped it for another one: it holds one at a time."""
    home.ensure_no_daemon()
    home.ensure_daemon()
    engine = home.engine
    engine.forget(connector=True)
    name, number, stored = "in place", 11, 0
    adapter, moved = (write_lora_adapter(tmp_path / each, seed=1) for each in ("adapter", "moved"))

    def load(path: Path) -> None:
        engine.call("load_adapter", adapter=(name, number, str(path)))

    def ask(path: Path, name: str = name, number: int = number) -> tuple[list[int], int]:
        (completion,) = engine.generate([PROMPT], adapter=(name, number, str(path)))
        return completion.tokens, completion.cached

    def ask_first(path: Path, *other: Any) -> list[int]:
        """The tokens where nothing of the prompt is there; waits until its blocks are."""
        nonlocal stored
        tokens, cached = ask(path, *other)
        assert cached == 0
        stored += BLOCKS
        wait_books(home.directory, lambda found: found.ready_blocks == stored)
        return tokens

    load(adapter)
    first = ask_first(adapter)
    write_lora_adapter(adapter, seed=2)
    load(adapter)
    engine.forget(connector=True)
    second = ask_first(adapter)
    assert second != first
    engine.forget()
    assert ask(adapter) == (second, ALL)
    # From a new path, as vLLM advises, nothing needs to be reset.
    load(moved)
    assert ask_first(moved) == first
    engine.forget()
    assert ask(moved) == (first, ALL)

    # vLLM drops it, and reads what has taken its place.
    ask_first(write_lora_adapter(tmp_path / "other", seed=3), "other", 12)
    write_lora_adapter(moved, seed=2)
    engine.forget()
    assert ask(moved) == (second, 0)
    engine.forget(connector=True)
    assert ask_first(moved) == second
    # What is in memory needs no files.
    shutil.rmtree(moved)
    engine.forget()
    assert ask(moved) == (second, ALL)
