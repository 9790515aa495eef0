"""vLLM's OffloadingManager of ours over a fake client."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from kvoffd_client import NamespaceSpec, SchedulerClient
from kvoffd_client.vllm.chunk_groups import ChunkGroup
from kvoffd_client.vllm.config import ConnectorOptions
from kvoffd_client.vllm.connector_metadata import WorkerNews
from kvoffd_client.vllm.engine_facts import EngineFacts
from kvoffd_client.vllm.engine_namespace import EngineNamespace, MemoryState
from kvoffd_client.vllm.hints import HintsOption
from kvoffd_client.vllm.keyed_lookup import result_of
from kvoffd_client.vllm.manager import KvoffdManager
from tests.kit.clock import Clock
from tests.vllm.vllm_fakes import FakeSchedulerClient, block_hash, key

KEYS = [key(1), key(2), key(3)]
HASHES = {block_hash(1), block_hash(2), block_hash(3)}
SHARD_BYTES = 1000


CHUNK_TOKENS = 1000
PENDING = LookupResult.HIT_PENDING


class ManagerHarness:
    """A manager and its fake client, of one group unless more are given. A lookup's deadline is 0.1 s.

    Others' requests run, so that it may be long until the engine looks again.
    """

    def __init__(
        self,
        groups: tuple[ChunkGroup, ...] = (ChunkGroup(0, 1, CHUNK_TOKENS),),
        *,
        do_no_harm: bool = True,
        disk_wait_s: float = 120.0,
        hints: HintsOption = "all",
    ) -> None:
        self.clock = Clock()
        self.client = FakeSchedulerClient(self.clock)
        self.requests: dict[str, Any] = {}
        self.contexts: dict[str, ReqContext] = {}
        self.waits: dict[str, bool] = {}
        """By request, whether vLLM must not scan it now."""
        options = ConnectorOptions(
            lookup_deadline_ms=100.0, disk_wait_ms=1000 * disk_wait_s, do_no_harm=do_no_harm, hints=hints
        )
        namespace = EngineNamespace(1, lambda _: cast(SchedulerClient, self.client), self.clock)
        self.manager = KvoffdManager(namespace, groups, self.clock, options, self.sleep)
        self.begin_engine()
        self.prefill = self.manager.prefill
        self.report("weights")

    def begin_engine(self, **facts: Any) -> None:
        """Have another engine, whose first step begins."""
        usual = {"shard_bytes": [SHARD_BYTES] * len(self.manager.groups), "most_running": 1, "prompt_step_tokens": 256}
        self.manager.begin_engine(EngineFacts(**{**usual, **facts}))
        self.may_have_tails = bool(facts.get("tail_tokens"))
        self.manager.begin_step([1])

    def sleep(self, seconds: float) -> None:
        self.clock.now += seconds

    def report(self, weights: str, *, problem: str = "", adapters: dict[int, tuple[str, bytes]] | None = None) -> None:
        """The worker reports weights and adapters, and that its memory is registered, unless there is a problem."""
        namespace = self.manager.namespace
        report = MemoryState(NamespaceSpec.named("model"), weights, namespace.generation, problem=problem)
        report = replace(report, adapters=adapters)
        namespace.update({0: report})
        assert namespace.current is not None
        namespace.take_message()
        if not problem:
            report = replace(report, registered=namespace.current.fingerprint)
            namespace.update({0: report})
        self.memory = report

    def grant(self, credit_bytes: int) -> None:
        """The worker reports how many bytes of stores may be outstanding."""
        self.memory = replace(self.memory, credit_bytes=credit_bytes)
        self.manager.handle_news(WorkerNews(memory={0: self.memory}))

    def new(self, name: str = "r", hashes: int = len(KEYS)) -> ReqContext:
        """A new request that vLLM has announced; nothing of it is looked up."""
        context = ReqContext(name)
        self.manager.on_new_request(context)
        self.begin(context, hashes)
        return context

    def begin(self, context: ReqContext, hashes: int = len(KEYS)) -> None:
        """Make a request, and have vLLM tell of its keys' places."""
        self.contexts[context.req_id] = context
        self.requests[context.req_id] = SimpleNamespace(
            request_id=context.req_id,
            block_hashes=[block_hash(number + 1) for number in range(hashes)],
            num_tokens=hashes * CHUNK_TOKENS + 1,
            num_prompt_tokens=hashes * CHUNK_TOKENS + 1,
            num_computed_tokens=0,
            num_preemptions=0,
            priority=0,
            skip_reading_prefix_cache=False,
            pooling_params=None,
            lora_request=None,
            cache_salt=None,
            mm_features=[],
            prompt_embeds=None,
            is_finished=lambda: False,
        )
        self.manager.requests[context.req_id].request = self.requests[context.req_id]
        for number in range(hashes):
            context.set_offload_key_position(key(number + 1), (number + 1) * CHUNK_TOKENS)

    def request(self, name: str = "r", ready: set[bytes] | None = None) -> ReqContext:
        """A new request that is looked up, its lookup answered when ``ready`` is given."""
        context = self.new(name)
        self.look_up(name)
        if ready is not None:
            self.client.answer(ready)
            self.scan(name)
        return context

    def look_up(self, name: str = "r") -> None:
        self.manager.lookups.look_up(self.manager.requests[name])

    def prepare(self, name: str, computed: int, **arguments: bool) -> bool:
        """vLLM comes to a request; whether it may scan it."""
        return self.manager.waits.prepare_scan(
            self.manager.requests[name],
            computed,
            **{"engine_has_all": False, "may_have_tail": self.may_have_tails, **arguments},
        )

    def scan(self, name: str = "r", computed: int = 0) -> bool:
        """vLLM asks for a request in its next step, and scans its keys unless it waits; whether a lookup was sent."""
        before, request, context = len(self.client.asked), self.requests[name], self.contexts[name]
        self.manager.waits._must_wake = True
        self.manager.lookups.queue.begin_step()
        if not self.manager.waits.pass_over(name, computed):
            self.waits[name] = not self.prepare(name, computed)
            keys = [key(number + 1) for number in range(len(request.block_hashes))]
            if not self.waits[name] and PENDING in [self.manager.lookup(one, context) for one in keys]:
                self.manager.waits.record_scan(self.manager.requests[name], computed, None)
        return len(self.client.asked) > before

    def results(self, context: ReqContext, keys: list[OffloadKey] = KEYS) -> list[LookupResult]:
        """What vLLM's scan finds of these keys. RETRY for all while it must not scan for want of an answer; while
        blocks come up, what the last answer said."""
        state = self.manager.requests[context.req_id]
        if not self.waits.get(context.req_id):
            return [self.manager.lookup(item, context) for item in keys]
        if state.answer is None or not state.wait.tier.is_awaited:
            return [LookupResult.RETRY] * len(keys)
        found: dict[bytes, LookupResult] = {}
        for index, chunks in state.answer.chunks.items():
            suffix = self.manager.groups[index].suffix
            states = state.answer.chunk_states(index)
            found |= {one + suffix: result_of(code, state.tiers) for one, code in zip(chunks, states, strict=True)}
        found |= {tail: result_of(code, state.tiers) for tail, code in state.answer.tail_states().items()}
        return [found.get(item, LookupResult.MISS) for item in keys]

    def offer(self, context: ReqContext, keys: list[OffloadKey] = KEYS) -> list[OffloadKey] | None:
        """vLLM offers keys for a store; those that are to be stored, None where it is to offer them again."""
        output = self.manager.prepare_store(keys, context)
        return None if output is None else list(output.keys_to_store)

    def end(self, name: str, computed_tokens: int) -> None:
        """A request ends, of which so many tokens are computed."""
        request = self.requests[name]
        request.is_finished, request.num_computed_tokens = (lambda: True), computed_tokens

    def counted(self) -> dict[str, Any]:
        """What the manager has counted since the last time."""
        stats = self.manager.get_stats()
        assert stats is not None
        return cast(dict[str, Any], stats.reduce())
