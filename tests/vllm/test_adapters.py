"""What names the content of LoRA adapters: what the workers have read, and what the scheduler half makes of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
from vllm.config import LoRAConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from kvoffd_client import NamespaceSpec, SchedulerClient
from kvoffd_client.vllm import adapter_contents, adapters
from kvoffd_client.vllm.adapter_contents import ANSWER_PATIENCE_S, ASK_AGAIN_S, AdapterContents
from kvoffd_client.vllm.adapters import AHEAD_S, UNREADABLE, LiveAdapters
from kvoffd_client.vllm.chunk_groups import wire_keys
from kvoffd_client.vllm.connector_metadata import WorkerNews
from kvoffd_client.vllm.engine_namespace import EngineNamespace, MemoryState, Search
from kvoffd_client.vllm.prompt_queue import ASKED_AT_ONCE, MAX_AHEAD
from tests.kit.clock import Clock
from tests.kit.models import write_lora_adapter
from tests.vllm.scheduler_harness import SchedulerHarness
from tests.vllm.vllm_config import make_config
from tests.vllm.vllm_fakes import FakeSchedulerClient


def lora_request(path: Path | str, number: int = 1, *, in_place: bool = False) -> Any:
    return LoRARequest("name", number, str(path), load_inplace=in_place)


class AdapterManager:
    """What of vLLM's manager of adapters counts: it reads files, and holds `capacity` of what it has read."""

    def __init__(self, capacity: int = 1) -> None:
        self.capacity, self.reads = capacity, 0
        self.held: dict[int, LoRAModel] = {}

    def list_adapters(self) -> set[int]:
        return set(self.held)

    def add_adapter(self, request: LoRARequest) -> None:
        number = request.lora_int_id
        if number not in self.held or request.load_inplace:
            adapter = self._load_adapter(request)
            self.held.pop(number, None)
            while len(self.held) >= self.capacity:
                del self.held[next(iter(self.held))]
            self.held[number] = adapter

    def _load_adapter(self, request: LoRARequest) -> LoRAModel:
        self.reads += 1
        path = request.lora_path
        return LoRAModel.from_local_checkpoint(
            path,
            {"q_proj", "v_proj"},
            PEFTHelper.from_local_dir(path, None),
            lora_model_id=request.lora_int_id,
            device="cpu",
            dtype=torch.float32,
        )


class AdapterWorker:
    """A worker's adapters, and how often one of them has changed."""

    def __init__(self, capacity: int = 1, changed: Callable[[], None] = lambda: None, **settings: Any) -> None:
        self._changed = changed
        self.manager, self.changes = AdapterManager(capacity), 0
        self.adapters = LiveAdapters(self.manager, LoRAConfig(**settings), self.change)

    def change(self) -> None:
        self.changes += 1
        self._changed()

    def loaded(self, path: Path, number: int = 1, *, in_place: bool = False) -> bytes:
        """The digest of an adapter that vLLM wants now."""
        self.manager.add_adapter(lora_request(path, number, in_place=in_place))
        return self.contents[number]

    @property
    def contents(self) -> dict[int, bytes]:
        contents = self.adapters.contents()
        assert contents is not None
        return {number: content for number, (_, content) in contents.items()}


def test_what_is_hooked_is_vllms() -> None:
    for name in ("_load_adapter", "list_adapters"):
        assert callable(getattr(WorkerLoRAManager, name))


def test_equal_adapters_are_one_wherever_they_are_and_others_are_not(tmp_path: Path) -> None:
    one, other = write_lora_adapter(tmp_path / "one", seed=1), write_lora_adapter(tmp_path / "other", seed=2)
    shutil.copytree(one, copied := tmp_path / "copied")
    worker = AdapterWorker(capacity=4)
    first, second, third = (worker.loaded(path, number) for number, path in enumerate((one, copied, other), 1))
    assert first == second != third
    assert AdapterWorker().loaded(one) == first, "in every process"
    config = (one / "adapter_config.json").read_text()
    (one / "adapter_config.json").write_text(config.replace('"lora_alpha": 16', '"lora_alpha": 32'))
    assert AdapterWorker().loaded(one) != first
    assert worker.changes == 0


def test_an_adapter_that_an_engine_applies_in_part_is_another_one(tmp_path: Path) -> None:
    path = write_lora_adapter(tmp_path / "one", seed=1)

    def content(**settings: Any) -> bytes:
        return AdapterWorker(**settings).loaded(path)

    whole = content()
    assert whole == content(max_loras=4, max_lora_rank=32, fully_sharded_loras=True), "where and how fast"
    parts = [content(target_modules=["q_proj"]), content(target_modules=["q_proj", "v_proj"])]
    assert parts[1] == content(target_modules=["v_proj", "q_proj"])
    assert len({whole, *parts, content(lora_dtype="bfloat16"), content(enable_tower_connector_lora=True)}) == 5


def test_other_content_under_a_number_is_a_change(tmp_path: Path) -> None:
    path, other = write_lora_adapter(tmp_path / "one", seed=1), write_lora_adapter(tmp_path / "two", seed=3)
    worker = AdapterWorker()
    first = worker.loaded(path)
    assert worker.loaded(path, in_place=True) == first
    assert worker.changes == 0, "it is the same"
    write_lora_adapter(path, seed=2)
    assert worker.loaded(path) == first, "that is in memory"
    second = worker.loaded(path, in_place=True)
    assert (second != first, worker.changes) == (True, 1)
    # vLLM drops it for another one, and reads its files again.
    worker.loaded(other, 2)
    assert worker.contents.keys() == {2}
    write_lora_adapter(path, seed=1)
    assert (worker.loaded(path), worker.changes) == (first, 2)
    # After a reset nothing of before is used.
    worker.loaded(other, 2)
    write_lora_adapter(path, seed=2)
    worker.adapters.forget_absent()
    assert (worker.loaded(path), worker.changes) == (second, 2)


def test_vllm_gets_the_adapter_that_was_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = write_lora_adapter(tmp_path / "one", seed=1), write_lora_adapter(tmp_path / "two", seed=3)
    worker = AdapterWorker()
    worker.adapters.read_ahead([lora_request(path)])
    (first,) = worker.contents.values()
    write_lora_adapter(path, seed=2)
    worker.adapters.read_ahead([lora_request(path)])
    assert (worker.loaded(path), worker.manager.reads, worker.changes) == (first, 1, 0)
    worker.adapters.read_ahead([lora_request(path)])
    assert worker.manager.reads == 1, "vLLM holds it"
    worker.adapters.read_ahead([lora_request(other)])
    assert worker.adapters.contents() == {1: (str(other), first)}, "it computes with that, whatever a request says"
    # But not what a load in place replaces, what is old, or what had no space.
    worker.loaded(other, 2)
    worker.adapters.read_ahead([lora_request(path)])
    assert (worker.contents[1] != first, worker.changes) == (True, 1), "a reader of its blocks must hear of it"
    write_lora_adapter(path, seed=1)
    assert worker.loaded(path, in_place=True) == first
    for number in (3, 4):
        worker.adapters.read_ahead([lora_request(other, number)])
    assert worker.contents.keys() == {1, 4}
    before = worker.manager.reads
    monkeypatch.setattr(adapters, "AHEAD_S", 0.0)
    worker.loaded(other, 4)
    assert worker.manager.reads == before + 1


def test_an_adapter_that_was_read_ahead_long_ago_is_read_again_before_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads its files, which may be others by now: blocks of the former ones must not be loaded for it."""
    now = Clock()
    monkeypatch.setattr(time, "monotonic", now)
    path = write_lora_adapter(tmp_path / "one", seed=1)
    worker = AdapterWorker()
    worker.adapters.read_ahead([lora_request(path)])
    (first,) = worker.contents.values()
    write_lora_adapter(path, seed=2)
    now.now += AHEAD_S
    assert worker.contents == {}, "the scheduler half must not rely on it"
    worker.adapters.read_ahead([lora_request(path)])
    (second,) = worker.contents.values()
    assert (second != first, worker.changes) == (True, 1)
    assert (worker.loaded(path), worker.manager.reads) == (second, 2)


@pytest.mark.parametrize("broken", ["gone", "no directory", "no weights", "damaged"])
def test_files_that_cannot_be_read_end_nothing(tmp_path: Path, broken: str, said: list[str]) -> None:
    path = write_lora_adapter(tmp_path / "one", seed=1)
    if broken == "gone":
        shutil.rmtree(path)
    elif broken == "no directory":
        shutil.rmtree(path)
        path.write_text("a file")
    elif broken == "no weights":
        (path / "adapter_model.safetensors").unlink()
    else:
        (path / "adapter_model.safetensors").write_bytes(b"nothing")
    worker = AdapterWorker()
    worker.adapters.read_ahead([lora_request(path)])
    assert worker.contents == {1: UNREADABLE}
    assert any("could not be read" in line for line in said)
    if path.is_file():
        path.unlink()
    write_lora_adapter(path, seed=1)
    first = worker.loaded(path)
    assert (first not in (b"", None), worker.changes) == (True, 0)
    # While it is not in memory, its files come and go.
    worker.loaded(write_lora_adapter(tmp_path / "other", seed=1), 2)
    shutil.rmtree(path)
    worker.adapters.read_ahead([lora_request(path)])
    assert (worker.contents[1], worker.changes) == (UNREADABLE, 0)
    write_lora_adapter(path, seed=2)
    assert (worker.loaded(path) != first, worker.changes) == (True, 1)


def test_an_adapter_of_an_unknown_form_ends_nothing(tmp_path: Path, said: list[str]) -> None:
    path, worker = write_lora_adapter(tmp_path / "one", seed=1), AdapterWorker()
    first = worker.loaded(path)
    read, sparse = AdapterManager._load_adapter, torch.eye(3).to_sparse()

    def unknown(manager: AdapterManager, request: LoRARequest) -> LoRAModel:
        adapter = read(manager, request)
        next(iter(adapter.loras.values())).lora_a = sparse
        return adapter

    other = AdapterWorker()
    other.adapters._read = unknown.__get__(other.manager)
    assert other.loaded(path) == UNREADABLE
    worker.adapters._read = unknown.__get__(worker.manager)
    assert worker.loaded(path, in_place=True) == UNREADABLE != first
    assert (worker.changes, other.changes) == (1, 0)


def test_a_worker_remembers_a_bounded_number_of_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_REMEMBERED", 3)
    path, worker = write_lora_adapter(tmp_path / "one", seed=1), AdapterWorker()
    for number in range(1, 5):
        worker.loaded(path, number)
    assert (worker.contents.keys(), worker.changes) == ({4}, 1), "of the others nobody would notice a change"


def test_an_engine_whose_adapters_cannot_be_seen_says_so(tmp_path: Path) -> None:
    for manager in (None, object()):
        unseen = LiveAdapters(manager, LoRAConfig(), lambda: None)
        unseen.read_ahead([lora_request(tmp_path)])
        unseen.forget_absent()
        assert unseen.contents() is None
    worker = AdapterWorker()
    worker.manager.held[1] = cast(LoRAModel, None)  # loaded in a way that is not known
    worker.adapters.read_ahead([lora_request(tmp_path)])
    assert worker.contents == {1: UNREADABLE}


# --- the scheduler half ---------------------------------------------------------------------------------------


class Scheduler:
    """The scheduler half's knowledge, of an engine with two workers."""

    def __init__(self) -> None:
        self.namespace = EngineNamespace(2, lambda _: cast(SchedulerClient, FakeSchedulerClient(Clock())), Clock())
        self.adapters = AdapterContents(self.namespace, Clock())

    def report(self, path: Path, *contents: dict[int, bytes] | None) -> None:
        report = MemoryState(NamespaceSpec.named("one"), "weights", self.namespace.generation)
        for rank, each in enumerate(contents):
            of_path = {number: (str(path), content) for number, content in each.items()} if each is not None else None
            self.namespace.update({rank: replace(report, adapters=of_path)})


def test_content_is_what_all_workers_say(tmp_path: Path) -> None:
    scheduler = Scheduler()
    adapter = lora_request(tmp_path)
    assert scheduler.adapters.record_content(adapter) is None
    scheduler.report(tmp_path, {1: b"one"}, {})
    assert scheduler.adapters.record_content(adapter) is None
    scheduler.report(tmp_path, {1: b"one"}, {1: b"other part"})
    content = scheduler.adapters.record_content(adapter)
    assert content
    other = Scheduler()
    other.report(tmp_path, {1: b"one"}, {1: b"another part"})
    assert other.adapters.record_content(adapter) not in (content, None, UNREADABLE)
    scheduler.namespace.leave(engine_cache_kept=False)
    assert scheduler.adapters.record_content(adapter) is None
    for second in (None, {1: UNREADABLE}):
        unseen = Scheduler()
        unseen.report(tmp_path, {1: b"one"}, second)
        assert unseen.adapters.record_content(adapter) == UNREADABLE


def test_other_content_under_a_path_is_not_used_until_a_reset(tmp_path: Path, said: list[str]) -> None:
    scheduler, adapter, moved = Scheduler(), lora_request(tmp_path), lora_request(tmp_path / "moved")
    for content in (b"first", b"second"):
        scheduler.report(tmp_path, {1: content}, {1: content})
        found = scheduler.adapters.record_content(adapter)
    assert found == UNREADABLE, "vLLM's own cache has blocks of the first"
    assert scheduler.adapters.record_content(adapter) == UNREADABLE
    # From a new path, of which vLLM's own cache has nothing. Before workers say so, the number may mean the old one.
    assert scheduler.adapters.record_content(moved) is None
    scheduler.report(tmp_path / "moved", {1: b"second"}, {1: b"second"})
    second = scheduler.adapters.record_content(moved)
    assert second not in (None, UNREADABLE)
    scheduler.report(tmp_path, {1: b"second"}, {1: b"second"})
    assert sum("loaded again with another content" in line for line in said) == 1
    scheduler.adapters.engine_cache_reset()
    assert scheduler.adapters.record_content(adapter) == second
    # What was computed before anybody knew with what may be anything.
    scheduler.adapters.record_unknown(adapter)
    assert scheduler.adapters.record_content(adapter) == UNREADABLE


def test_adapters_beyond_a_bound_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setattr(adapter_contents, "MAX_CACHED", 1)
    scheduler = Scheduler()
    for name, is_used in (("one", True), ("two", False), ("one", True)):
        scheduler.report(tmp_path / name, {1: b"content"}, {1: b"content"})
        assert (scheduler.adapters.record_content(lora_request(tmp_path / name)) != UNREADABLE) is is_used
    assert any("exceeds the limit of 1 adapters," in line for line in said)


def test_one_adapter_is_asked_for_in_a_step(tmp_path: Path) -> None:
    """A step waits while it is read. What blocks are loaded for is looked at in any case."""
    known = Scheduler().adapters
    first, second, third = (lora_request(tmp_path, number) for number in (1, 2, 3))
    known.want(first)
    assert known.may_want(first)
    assert not known.may_want(second)
    known.want(third)
    assert known.take_wanted() == [first, third]
    assert known.may_want(second)
    assert known.take_wanted() == []


class AdapterEngine(SchedulerHarness):
    """An engine over vLLM's scheduler whose worker reads the adapters that it is asked for, and keeps ``MAX_LORAS``.

    Attributes:
        read: numbers of the adapters that the worker read, step after step.
        silent: numbers of adapters that it does not report.
    """

    MAX_LORAS = 2

    def __init__(self, model: Path, directory: Path) -> None:
        lora = {"enable_lora": True, "max_loras": self.MAX_LORAS, "max_lora_rank": 8}
        super().__init__(make_config(model, {"directory": str(directory)}, max_model_len=1024, **lora), 500)
        self.read: list[list[int]] = []
        self.silent: set[int] = set()
        self.memory: dict[int, tuple[str, bytes]] = {}
        self.report()

    def report(self) -> None:
        namespace = self.manager.namespace
        assert namespace.current is not None
        state = MemoryState(NamespaceSpec.named("model"), "weights", namespace.generation, adapters={**self.memory})
        self.manager.handle_news(WorkerNews(memory={0: replace(state, registered=namespace.current.fingerprint)}))

    def add_one(self, number: int, max_tokens: int = 1) -> Any:
        """A new prompt of two blocks for the adapter of this number."""
        tokens = Random(number).choices(range(1000), k=65)
        return self.add(f"{number}", tokens, max_tokens, lora_request=lora_request(f"/{number}", number))

    def work(self, output: Any, meta: Any) -> Any:
        self.read.append([one.lora_int_id for one in meta.adapters if one.lora_int_id not in self.memory])
        for number in self.read[-1]:
            if number not in self.silent:
                self.memory[number] = f"/{number}", b"%d" % number
        self.memory = dict([*self.memory.items()][-self.MAX_LORAS :])
        self.report()
        return super().work(output, meta)


def wire_keys_of(request: Any) -> set[bytes]:
    """The keys on the wire of the prompt of ``AdapterEngine.add_one``."""
    content = sha256(b"%d" % request.lora_request.lora_int_id).digest()
    return {*wire_keys(list(map(bytes, request.block_hashes)), content)}


def test_a_prompt_waits_for_its_adapter_from_when_the_workers_were_asked_for_it(model: Path, tmp_path: Path) -> None:
    """vLLM runs prompts of ``max_loras`` adapters at once, for long, and comes to others only then."""
    engine = AdapterEngine(model, tmp_path)
    first = [engine.add_one(number, max_tokens=50) for number in range(1, 6)]
    last = engine.add_one(6)
    engine.there = wire_keys_of(last)
    while not all(one.is_finished() for one in first):
        engine.step()
        if len(engine.scheduler.running) == engine.MAX_LORAS:
            engine.clock.now += ANSWER_PATIENCE_S / 20
    engine.end([last], 20)
    assert engine.loaded == [last.request_id]
    engine.close()


def test_an_adapter_that_no_worker_reports_delays_no_other_ones(model: Path, tmp_path: Path) -> None:
    """The workers are asked for each in its turn."""
    engine = AdapterEngine(model, tmp_path)
    engine.silent = {1, 2}
    silent = [engine.add_one(number) for number in (1, 2)]
    others = [engine.add_one(number) for number in range(3, 9)]
    engine.there = {key for one in others for key in wire_keys_of(one)}
    began = engine.clock.now
    engine.end(others, 100)
    assert engine.clock.now - began < ASK_AGAIN_S
    assert {*engine.loaded} == {one.request_id for one in others}
    assert not any(one.num_computed_tokens for one in silent)
    engine.clock.now += ANSWER_PATIENCE_S
    for _ in silent:
        engine.step()  # asks for one of them again
    engine.clock.now += ASK_AGAIN_S
    engine.end(silent, 20)
    engine.close()


def test_adapters_that_no_worker_reports_delay_no_others_where_steps_are_long(model: Path, tmp_path: Path) -> None:
    """Each of them is due to be asked for again in every step, before the others."""
    engine = AdapterEngine(model, tmp_path)
    engine.silent = {1, 2, 3}
    for number in engine.silent:
        engine.add_one(number)
    others = [engine.add_one(number) for number in range(4, 8)]
    engine.there = {key for one in others for key in wire_keys_of(one)}
    for _ in range(12):
        engine.step()
        engine.answer()  # at once
        engine.clock.now += ASK_AGAIN_S
    assert {*engine.loaded} == {one.request_id for one in others}
    engine.close()


def test_an_adapter_that_no_worker_reports_does_not_wait_for_ever_behind_new_ones(model: Path, tmp_path: Path) -> None:
    """In every step there are more of those than it may read."""
    engine = AdapterEngine(model, tmp_path)
    engine.silent = {1}
    silent, numbers = engine.add_one(1), iter(range(2, 100))
    for _ in range(14):
        for _ in range(2):
            engine.add_one(next(numbers))
        engine.step()
        engine.answer()
        engine.clock.now += ASK_AGAIN_S
    assert silent.is_finished()
    engine.close()


def test_a_prompt_keeps_what_was_reported_of_an_adapter_that_the_workers_have_dropped(
    model: Path, tmp_path: Path
) -> None:
    """Prompts behind it took the places of ``max_loras`` adapters while its own was read, and ran for long."""
    engine = AdapterEngine(model, tmp_path)
    engine.memory = {number: (f"/{number}", b"%d" % number) for number in (2, 3)}
    engine.report()
    waits, *running = [engine.add_one(number, max_tokens) for number, max_tokens in ((1, 1), (2, 5), (3, 5))]
    engine.step()
    assert engine.read == [[1]]
    assert {*engine.ran} == {one.request_id for one in running}
    engine.clock.now += ANSWER_PATIENCE_S
    del engine.memory[1]
    engine.report()
    engine.there = wire_keys_of(waits)
    engine.end(running, 10)
    engine.end([waits], 10)
    assert engine.loaded == [waits.request_id]
    engine.close()


def test_of_many_prompts_whose_adapter_becomes_known_few_are_looked_up_in_a_step(model: Path, tmp_path: Path) -> None:
    """They had to wait when it was their turn to be looked up ahead."""
    engine = AdapterEngine(model, tmp_path)
    engine.answers, engine.silent, count = False, {1}, 3 * MAX_AHEAD
    for at in range(count):
        tokens = Random(at).choices(range(1000), k=65)
        engine.add(f"{at}", tokens, lora_request=lora_request("/1", 1))
    for _ in range(4):
        engine.step()
    assert not engine.client.asked, "its content is unknown"
    engine.memory[1] = "/1", b"1"
    engine.report()
    asked = [0]
    while asked[-1] < count and len(asked) < count:
        engine.step()
        engine.clock.now -= 0.01  # no answer is late
        asked.append(len(engine.client.asked))
    assert asked[-1] == count
    assert max(after - before for before, after in pairwise(asked)) <= MAX_AHEAD + ASKED_AT_ONCE
    engine.close()


def test_a_step_reads_one_adapter_though_prompts_of_many_could_be_loaded(model: Path, tmp_path: Path) -> None:
    """Their workers have read each of them once, and keep ``max_loras`` of them."""
    engine = AdapterEngine(model, tmp_path)
    engine.answers = False
    requests = [engine.add_one(number) for number in range(1, 13)]
    for _ in range(20):
        engine.step()
        engine.clock.now -= 0.01  # no answer is late
    assert [number for numbers in engine.read for number in numbers] == [*range(1, 13)]
    engine.there = {key for one in requests for key in wire_keys_of(one)}
    engine.answers = True
    engine.end(requests, 100)
    assert {*engine.loaded} == {one.request_id for one in requests}
    assert max(map(len, engine.read)) == 1
    engine.close()


def test_a_prompt_asks_again_for_its_adapter_after_a_reset(model: Path, tmp_path: Path) -> None:
    """The workers have forgotten what they read."""
    engine = AdapterEngine(model, tmp_path)
    engine.silent = {1}
    request = engine.add_one(1)
    engine.step()
    namespace: Any = engine.manager.namespace
    before = namespace.current
    namespace.leave(engine_cache_kept=False)
    namespace.current, namespace._search = before, Search.FOUND
    engine.silent, engine.there, engine.read = set(), wire_keys_of(request), []
    engine.report()
    engine.step()
    assert engine.read == [[1]]
    engine.end([request], 20)
    assert engine.loaded == [request.request_id]
    engine.close()
