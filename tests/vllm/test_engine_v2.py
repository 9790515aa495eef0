"""vLLM's second model runner with async scheduling, over an emulated GPU stream that lags behind the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.kit.daemon import DaemonProcess
from tests.kit.engine import (
    EngineProcess,
    cached,
    completions,
    full_blocks,
    prompt,
    tokens,
    wait_books,
    wait_connected,
    wait_stored,
)
from tests.kit.models import make_tiny_llama
from tests.kit.shapes import add_tokenizer
from tests.vllm.test_engine_requests import REQUESTS, ask_each_kind, loaded_tokens

pytestmark = [pytest.mark.engine, pytest.mark.concurrent, pytest.mark.timeout(400)]

FEW_BLOCKS = 70
"""Of the about 90 that eight prompts fill with their answers."""
MORE_ROUNDS = 8
MAX_TOKENS = 40
STEP_TOKENS = 256
LONG_STEP_S = 0.1
LONGEST_WAIT_S = 5.0
LAG_S = 0.2
"""In which a store of some blocks ends by far."""


class Engines:
    """An engine of the second runner with its daemon, and one of the first runner without any."""

    def __init__(self, model: Path) -> None:
        settings = {"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 8, "max_model_len": 1024}
        self.model = model
        self.daemon = DaemonProcess("256MiB", faults=True)
        self.engine = EngineProcess(
            model,
            self.daemon.directory,
            v2=True,
            patient=True,
            num_blocks=FEW_BLOCKS,
            extra_config={"offload_prompt_only": False},
            skip_tokenizer_init=False,
            enable_prompt_embeds=True,
            scheduling_policy="priority",
            **settings,
        )
        self.plain = EngineProcess(model, None, v2=False, **settings)

    def start(self) -> None:
        self.daemon.start()
        for each in (self.engine, self.plain):
            each.launch()
        for each in (self.engine, self.plain):
            each.wait_ready()
        wait_connected(self.daemon.directory)

    def close(self) -> None:
        for each in (self.engine, self.plain, self.daemon):
            each.close()

    def settle(self) -> None:
        """The daemon runs and all stores have ended, and the engine's own cache is empty."""
        wait_connected(self.daemon.directory)
        self.engine.forget()  # which is refused while blocks are stored


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(add_tokenizer(make_tiny_llama(tmp_path_factory.mktemp("v2") / "model")))
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_requests_of_every_kind_get_back_what_was_stored(engines: Engines) -> None:
    engine = engines.engine
    engine.control_stream(lag_s=0.005)
    cold = ask_each_kind(engine)
    wait_stored(engines.daemon.directory)
    engines.settle()
    warm = ask_each_kind(engine)
    assert engine.control_stream()["ahead"] > 2 * len(REQUESTS), "the host did not run ahead of the stream"
    assert "Using V2 Model Runner" in engine.log
    for name in REQUESTS:
        assert warm[name].tokens == cold[name].tokens, name
        assert warm[name].cached == loaded_tokens(name), name


def under_pressure(engines: Engines, seed: int, lags_s: list[float]) -> None:
    """Rounds of prompts that share beginnings, each with another lag; in one of four the daemon is killed. How often
    vLLM preempts is a matter of the machine: further rounds follow until it has."""
    engine, daemon, random = engines.engine, engines.daemon, Random(seed)
    bases = [prompt(random.randrange(10**6), 320) for _ in range(4)]
    before = engine.metrics()
    wanted = ["vllm:num_preemptions", "vllm:kv_offload_load_bytes", "vllm:kv_offload_store_bytes"]
    for number, lag_s in enumerate([*lags_s, *[0.0] * MORE_ROUNDS]):
        if number >= len(lags_s) and not lacking(engine, before, wanted):
            break
        cuts = [random.choice([0, 64, 128, 200, 256]) for _ in range(8)]
        prompts = [random.choice(bases)[:cut] + prompt(random.randrange(12), 290 - cut) for cut in cuts]
        engine.control_stream(lag_s=lag_s)
        kills = number % 4 == 2
        engines.plain.begin("generate", prompts=prompts, max_tokens=MAX_TOKENS)
        with daemon.fault("store slow 0.2" if kills else ""):
            engine.begin("generate", prompts=prompts, max_tokens=MAX_TOKENS)
            if kills:
                wait_books(daemon.directory, lambda found: found.store.running_jobs > 0)
                daemon.kill()
                daemon.start()
            found = completions(engine.finish())
        expected = completions(engines.plain.finish())
        assert tokens(found) == tokens(expected), f"round {number}, cached {cached(found)}"
        assert {answer.finish for answer in found} == {"length"}
        engines.settle()
    assert not lacking(engine, before, wanted)


def lacking(engine: EngineProcess, before: dict[str, float], wanted: list[str]) -> list[str]:
    """The counters that have not risen."""
    after = engine.metrics()
    return [name for name in wanted if after.get(name, 0) <= before.get(name, 0)]


def test_pressure_changes_no_token(engines: Engines) -> None:
    under_pressure(engines, 1, [0.0, 0.03, 0.005, 0.0])


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2, 6))
def test_long_pressure_changes_no_token(engines: Engines, seed: int) -> None:
    under_pressure(engines, seed, [0.0, 0.005, 0.03, 0.1, 0.4] * 4)


def loaded_as_computed(engines: Engines, prompts: list[list[int]], *, events_at_once: bool) -> list[bool]:
    """Whether each prompt has the same answer once its blocks were stored by a stream that lags, and loaded."""
    engines.engine.control_stream(lag_s=LAG_S, events_at_once=events_at_once)
    computed = [engines.engine.generate([each])[0] for each in prompts]
    wait_stored(engines.daemon.directory)
    engines.settle()
    engines.engine.control_stream()
    loaded = engines.engine.generate(prompts)
    assert cached(loaded) == [full_blocks(len(each)) for each in prompts]
    return [one.tokens == other.tokens for one, other in zip(computed, loaded, strict=True)]


def test_stores_that_do_not_wait_for_the_stream_are_found(engines: Engines) -> None:
    """Else the tests above would prove nothing: what a step still computes is stored as it was before."""
    # Two steps each: what the first one computes is stored when it has ended in any case.
    prompts = [prompt(seed, STEP_TOKENS + 150) for seed in (70, 71)]
    assert loaded_as_computed(engines, prompts, events_at_once=True) == [False, False]
    prompts = [prompt(seed, STEP_TOKENS + 150) for seed in (72, 73)]
    assert loaded_as_computed(engines, prompts, events_at_once=False) == [True, True]


def test_no_store_is_lost_to_long_steps(engines: Engines) -> None:
    """Six requests leave space for one more: each gets the last one's blocks at once, while a step of the six runs."""
    engine, before = engines.engine, engines.engine.metrics()
    prompts = [prompt(seed, 290) for seed in range(80, 86)] + [prompt(seed, 200) for seed in range(86, 90)]
    limits = [16] * 6 + [1] * 4
    expected = engines.plain.call("generate", prompts=prompts, max_tokens=limits)
    engine.control_stream(lag_s=LONG_STEP_S)
    found = engine.call("generate", prompts=prompts, max_tokens=limits)
    waits = engine.control_stream()["host_s"]
    assert max(waits) > LONG_STEP_S / 2, "no fence came while a step ran"
    assert tokens(completions(found)) == tokens(completions(expected))
    engines.settle()
    after = engine.metrics()
    assert after.get("vllm:kvoffd_failed_stores", 0) == before.get("vllm:kvoffd_failed_stores", 0)
    assert cached(engine.generate(prompts[6:], 1)) == [full_blocks(200)] * 4


def test_own_hits_wait_for_no_store(engines: Engines) -> None:
    """A conversation's next part comes while the last one is stored: its blocks are only read."""
    engine, first, more = engines.engine, prompt(90, 300), prompt(91, 40)
    expected = engines.plain.generate([first, first + more])
    engine.control_stream()
    with engines.daemon.fault(f"store slow {LONGEST_WAIT_S}"):
        found = engine.generate([first])
        engine.control_stream()
        found += engine.generate([first + more])
        waits = engine.control_stream()["host_s"]
    assert cached(found) == [0, full_blocks(300)]
    assert tokens(found) == tokens(expected)
    assert max(waits) < LONGEST_WAIT_S / 2
    engines.settle()


@pytest.mark.nightly
def test_an_engine_of_new_processes_runs_too(engines: Engines) -> None:
    """As vLLM starts them for users of a CPU. It loads what the forked engine stored."""
    prompts = [prompt(seed, 400) for seed in (95, 96)]
    engines.engine.control_stream()
    expected = engines.engine.generate(prompts)
    wait_stored(engines.daemon.directory)
    with EngineProcess(engines.model, engines.daemon.directory, v2=True, fork=False, patient=True) as engine:
        wait_connected(engines.daemon.directory, pids=lambda: engine.pids)
        engine.control_stream(lag_s=0.02)
        found = engine.generate(prompts)
        assert engine.control_stream()["ahead"] > 2, "the host did not run ahead of the stream"
        assert "Using V2 Model Runner" in engine.log
    assert cached(found) == [full_blocks(400)] * 2
    assert tokens(found) == tokens(expected)
