"""Rounds of random prompts that share prefixes, for models of five families and both of vLLM's model runners: what
kvoffd loads changes no token, with pre-emptions and a killed daemon, and is what vLLM's own prefix cache would give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.kit.amount import TIMES
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import Completion, EngineProcess, cached, completions, prompt, wait_connected
from tests.kit.models import make_draft, make_tiny_llama
from tests.kit.shapes import make_tiny_deepseek, make_tiny_gemma3, make_tiny_qwen3_next, make_transformers_model
from tests.kit.verdict import TIE_NATS, compare
from tests.kit.waiting import wait_until
from tests.kit.wire import books

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(3600)]
ROUNDS = 10 * TIMES
PROMPTS, MAX_TOKENS = 4, 8
BATCH_NATS = 0.1
"""Answers of a batch, some computed again after a pre-emption, differ by 0.03 in bfloat16, though nothing is loaded."""
NO_LOAD = {"max_load_tokens": 0}
KILLS = {2: "store", 4: "load"}
"""What is copied when the daemon is killed, in some of five rounds."""


@dataclass(frozen=True)
class Family:
    """A model, and an engine with so few blocks that prompts of up to ``tokens`` pre-empt each other.

    Attributes:
        block_tokens: of vLLM's blocks.
        alone: whether prompts share no prefix, come one at a time, and what is loaded is compared with what vLLM's own
            prefix cache gives, not with what was computed; answers that a reset pre-empted are not compared. On a CPU
            without AMX and with latent attention vLLM gives other tokens in a batch, and behind what it finds in its
            own cache, where what followed a prefix when it was computed changes them too; all without a connector.
        drafts: tokens that an EAGLE draft proposes. Of what vLLM finds in its own cache it computes the last block
            again for the draft (use_eagle_block_drop in its kv_cache_coordinator.py). What is loaded has that block, as
            from vLLM's own offloading (offloading/scheduler.py).
    """

    make: Callable[[Path], Path]
    blocks: int
    tokens: int = 300
    block_tokens: int = 32
    settings: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    drafts: int = 0


make_tiny_gpt_oss = partial(
    make_transformers_model, config_class="GptOssConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=128
)
FAMILIES = {
    "qwen3-next": Family(
        partial(make_tiny_qwen3_next, experts_per_token=4),  # of two, rounding of bfloat16 may choose others
        blocks=24,
        tokens=600,
        block_tokens=160,
        settings={"dtype": "bfloat16", "prefix_match_unit": 32},
    ),
    "gemma-3": Family(make_tiny_gemma3, 68),
    "gpt-oss": Family(make_tiny_gpt_oss, 28),
    "deepseek-v2": Family(
        make_tiny_deepseek, 28, block_tokens=16, settings={"enable_prefix_caching": True}, alone=True
    ),
    "llama-eagle": Family(make_tiny_llama, 13, drafts=3),
}


class Rounds:
    """An engine and its daemon, whose pool outlives it, and what was counted."""

    def __init__(self, family: Family, models: Path, pool: Path, *, v2: bool) -> None:
        settings = dict(family.settings)
        if family.drafts:
            draft = make_draft(models / "draft", eagle=True)
            settings["speculative_config"] = {
                "method": "eagle",
                "model": str(draft),
                "num_speculative_tokens": family.drafts,
            }
        self.daemon = DaemonProcess("128MiB", faults=True, pool_file=str(pool))
        self.engine = EngineProcess(
            family.make(models / "model"),
            self.daemon.directory,
            v2=v2,
            patient=True,
            num_blocks=family.blocks,
            max_model_len=family.tokens + 20,
            max_num_batched_tokens=256,
            max_num_seqs=PROMPTS,
            **settings,
        )
        self.family, self.counts, self.random = family, Counter[str](), Random(1)
        self.begun = [prompt(self.random.randrange(10**6), family.tokens) for _ in range(3)]

    def ask(self, prompts: Sequence[list[int]], kill: str = "", **arguments: Any) -> list[Completion]:
        """Ask them; the daemon is killed while it copies what ``kill`` says."""
        if len(prompts) > 1 and self.family.alone:
            return self.ask(prompts[:1], kill, **arguments) + self.ask(prompts[1:], **arguments)
        if "preempt" in arguments:
            self.settle()  # vLLM gives no block back that is being stored
        arguments = {"prompts": prompts, "max_tokens": MAX_TOKENS, "sampling": {"logprobs": 5}, **arguments}
        arguments["transfer"] = [arguments.get("transfer")] * len(prompts)
        if not kill:
            return completions(self.engine.call("generate", **arguments))
        with self.daemon.fault(f"{kill} slow 0.3"):
            self.engine.begin("generate", **arguments)
            wait_until(lambda: getattr(books(self.daemon.directory), kill).running_jobs, interval_s=0.01)
            self.daemon.kill()
        self.daemon.start()
        self.counts["kills"] += 1
        return completions(self.engine.finish())

    def settle(self) -> None:
        """The daemon has all that was stored, and the engine's own cache is empty."""
        wait_connected(self.daemon.directory)
        self.engine.forget()  # which is refused while blocks are stored

    def play(self, number: int) -> None:
        prompts = [self.next_prompt() for _ in range(PROMPTS)]
        kill = KILLS.get(number % 5, "")
        if kill and self.family.alone:  # all of the first one is stored, and loaded
            prompts[0] = self.random.choices(range(3, 1000), k=self.family.tokens)
        computed = self.ask(prompts, salt=str(number), transfer={"max_offload_tokens": 0})
        self.settle()
        answers, stores = [], kill if kill == "store" else ""
        if self.family.alone:
            self.ask(prompts, stores, transfer=NO_LOAD)
            self.ask(prompts, salt=f"{number} again", preempt=True)
        else:
            answers.append(self.ask(prompts, stores))
        self.settle()
        own, loaded = [], []
        for each in prompts:  # in a batch they would overwrite each other's blocks
            if self.family.alone:
                self.settle()
            self.ask([each], max_tokens=1, transfer=NO_LOAD if self.family.alone else None)
            own += self.ask([each], transfer=NO_LOAD)
        if kill == "load":
            self.settle()
            answers.append(self.ask(prompts, kill))
        for each in prompts:
            self.settle()
            loaded += self.ask([each])
        most, expected = self.family.block_tokens, cached(own)
        if self.family.drafts:
            expected = [(len(each) - 1) // most * most for each in prompts]
            assert cached(own) == [max(0, tokens - most) for tokens in expected], f"round {number}"
        elif self.family.alone:
            assert expected == [len(each) // most * most for each in prompts], f"round {number}"
        assert cached(loaded) == expected, f"round {number}"
        self.counts["own"] += sum(cached(own))
        self.counts["loaded"] += sum(cached(loaded))
        for given in (loaded,) if self.family.alone else (*answers, loaded):
            for case in zip(prompts, own if self.family.alone else computed, own, given, strict=True):
                self.judge(number, TIE_NATS if given is loaded else BATCH_NATS, *case)

    def judge(
        self, number: int, nats: float, tokens: list[int], computed: Completion, own: Completion, given: Completion
    ) -> None:
        is_same, found = compare(computed, own, given, nats)
        self.counts["tokens"] += len(given.tokens)
        self.counts["ties"] += found.at is not None
        assert given.finish == "length"
        assert is_same, (number, nats, len(tokens), found, computed, own, given)

    def next_prompt(self) -> list[int]:
        """A prompt that begins as an earlier one does."""
        random, most, block = self.random, self.family.tokens, self.family.block_tokens
        begin = random.choice(self.begun[-12:])
        cut = random.choice([0, len(begin), random.randrange(len(begin)), random.randrange(len(begin))])
        cut = 0 if self.family.alone else cut
        tokens = (begin[:cut] + random.choices(range(3, 1000), k=random.randint(1, most)))[:most]
        if self.family.alone and not len(tokens) % block:  # a block more would be loaded, as by vLLM's offloading
            tokens.pop()
        if random.random() < 0.7:  # its answer needs another block, for which another prompt may be pre-empted
            tokens = tokens[: max(1, len(tokens) // block) * block - 2 - self.family.drafts]
        self.begun.append(tokens)
        return tokens


@pytest.fixture
def pool() -> Iterator[Path]:
    with TemporaryDirectory(prefix="kvoffd-rounds-", dir="/dev/shm") as directory:
        yield Path(directory, "pool")


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_token_changes(name: str, v2: bool, tmp_path: Path, pool: Path) -> None:
    rounds = Rounds(FAMILIES[name], tmp_path, pool, v2=v2)
    counts = rounds.counts
    try:
        with rounds.daemon, rounds.engine:
            wait_connected(rounds.daemon.directory)
            for number in range(ROUNDS):
                rounds.play(number)
                counts["preemptions"] = int(rounds.engine.metrics()["vllm:num_preemptions"])
            assert ("Using V2 Model Runner" in rounds.engine.log) == v2
    finally:
        print(name, "v2" if v2 else "v1", dict(counts))
    assert counts["preemptions"] > ROUNDS / 10
    assert counts["kills"] >= ROUNDS // 5 * 2
