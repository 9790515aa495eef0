"""LMCache's client in the comparison: ``python -m tests.bench.peers.play_lmcache SERVER_PID URL LAYOUT``.

Runs in LMCache's own environment. It drives the two adapters that LMCache's vLLM connector drives, with the same calls
in the same order, and leaves every setting of theirs at its default. LAYOUT is LMCache's name for the order of heads
and tokens in a page: ``HND`` is what vLLM has on CPU, ``NHD`` needs no transposition and is the easiest for LMCache.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from statistics import median

import torch
import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    ParallelStrategy,
)
from lmcache.v1.multiprocess.transfer_context import EngineDrivenContextShm, EngineDrivenTransferContext

from tests.bench.peers.player import BLOCK_TOKENS, measured, play

MODEL = "peers"
HEAD_BYTES = 512
"""K and V of one token and head: 2 x 128 elements of 2 bytes."""
VOCABULARY = 128_000
WAIT_S = 30.0
POLL_S = 100e-6
"""Between two looks at an answer. Looking without a pause is slower: it keeps the GIL from the client's own thread."""


class LMCachePlayer:
    """A scheduler adapter and a worker adapter, as the connector has one in each of vLLM's processes."""

    def __init__(self, server_pid: int, url: str, layout: str) -> None:
        self._server_pid, self._url, self._layout = server_pid, url, layout
        self._context = zmq.Context()
        self._scheduler: LMCacheMPSchedulerAdapter | None = None
        self._worker: LMCacheMPWorkerAdapter | None = None
        self._kv: dict[str, torch.Tensor] = {}
        self._request_ids = (f"request-{os.getpid()}-{number}" for number in itertools.count())
        self._filled: list[int] = []
        self._patient = False
        self._random = random.Random()

    @property
    def _adapters(self) -> tuple[LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter]:
        assert self._scheduler is not None, "open() comes first"
        assert self._worker is not None
        return self._scheduler, self._worker

    def open(self, layers: int, blocks: int, page_bytes: int) -> None:
        self._end_session()
        alone = ParallelStrategy(mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1)
        self._scheduler = LMCacheMPSchedulerAdapter([self._url], self._context, MODEL, BLOCK_TOKENS, alone)
        self._worker = LMCacheMPWorkerAdapter(self._url, self._context, MODEL, BLOCK_TOKENS, alone)
        self._kv = self._tensors(layers, blocks, page_bytes)
        self._worker.register_kv_caches(self._kv, layout_hints={"kv_layout": self._layout})
        transfer = self._worker.transfer_ctx
        assert isinstance(transfer, EngineDrivenTransferContext)
        assert isinstance(transfer.engine_driven_context, EngineDrivenContextShm), "It took another mode."

    def _tensors(self, layers: int, blocks: int, page_bytes: int) -> dict[str, torch.Tensor]:
        """vLLM's shape for K and V packed in one page: [blocks, tokens, heads, 256], or with heads before tokens."""
        token_bytes = page_bytes // BLOCK_TOKENS
        heads, width = (token_bytes // HEAD_BYTES, HEAD_BYTES) if token_bytes >= HEAD_BYTES else (1, token_bytes)
        page = (BLOCK_TOKENS, heads) if self._layout == "NHD" else (heads, BLOCK_TOKENS)
        shape = (blocks, *page, width // 2)
        return {f"layer.{layer}": torch.full(shape, layer, dtype=torch.bfloat16) for layer in range(layers)}

    def fill(self, tokens: int, keys: int) -> None:
        blocks = tokens // BLOCK_TOKENS
        self._filled = self._prompt(blocks)
        self._store(self._filled, list(range(1, blocks + 1)))

    def warm(self, order: list[int], jobs: int) -> None:
        for _ in range(jobs):
            self._store(self._prompt(len(order)), order)
        self._adapters[0].reset_cache()

    def lookups(self, tokens: int, keys: int, hit: bool, samples: int) -> list[float]:
        """In two ways, looking for the answer again and again and waiting for it; the faster way counts."""
        ways = []
        for self._patient in (False, True):
            ways.append([self._look_up(tokens, hit) for _ in range(samples)])
        return min(ways, key=median)

    def _look_up(self, tokens: int, hit: bool) -> float:
        prompt = self._filled if hit else self._prompt(tokens // BLOCK_TOKENS)
        request_id = next(self._request_ids)
        begin = time.perf_counter()
        # What the connector does for one prompt from its first sight to the known number of cached tokens.
        found = self._ask(request_id, prompt)
        seconds = time.perf_counter() - begin
        assert found == (tokens if hit else 0), f"A lookup found {found} tokens."
        # What it does when the request needs nothing of what was found, and ends.
        scheduler, _ = self._adapters
        scheduler.cleanup_lookup_result(request_id)
        if found:
            scheduler.free_lookup_locks(prompt, 0, found, request_id)
        scheduler.end_session(request_id)
        self._settle(prompt)
        return seconds

    def copies(self, order: list[int]) -> list[dict[str, float]]:
        scheduler, _ = self._adapters
        tokens = self._prompt(len(order))
        stored = measured(self._server_pid, lambda: self._store(tokens, order))
        loaded = self._load(tokens, order[::-1])
        self._settle(tokens)
        assert scheduler.reset_cache(), "LMCache did not clear its cache."
        return [stored, loaded]

    def verify(self, blocks: int) -> None:
        scheduler, _ = self._adapters
        tokens = self._prompt(blocks)
        ids = [1 + index for index in torch.randperm(blocks).tolist()]
        for tensor in self._kv.values():
            tensor.view(torch.uint8).random_()
        before = [tensor.clone() for tensor in self._kv.values()]
        self._store(tokens, ids)
        for tensor in self._kv.values():
            tensor.zero_()
        self._load(tokens, ids[::-1])
        for tensor, old in zip(self._kv.values(), before, strict=True):
            same = torch.equal(tensor[ids[::-1]].view(torch.uint8), old[ids].view(torch.uint8))
            assert same, "What was loaded is not what was stored."
        scheduler.reset_cache()

    def facts(self) -> str:
        return f"LMCache {version('lmcache')}, torch {torch.__version__}, {torch.get_num_threads()} threads"

    def close(self) -> None:
        self._end_session()
        self._context.destroy(linger=0)

    def _end_session(self) -> None:
        if self._worker is not None and self._scheduler is not None:
            self._worker.shutdown()
            self._scheduler.shutdown()
            self._worker = self._scheduler = None

    def _prompt(self, blocks: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(blocks * BLOCK_TOKENS)]

    def _ask(self, request_id: str, tokens: list[int]) -> int:
        scheduler, _ = self._adapters
        scheduler.maybe_submit_lookup_request(request_id, tokens)
        deadline = time.monotonic() + WAIT_S
        while (found := scheduler.check_lookup_result(request_id)) is None:
            assert time.monotonic() < deadline, "LMCache did not answer a lookup."
            if self._patient:
                self._wait(request_id)
            else:
                time.sleep(POLL_S)
        return int(found)

    def _wait(self, request_id: str) -> None:
        """Until the reply that check_lookup_result() looks for next is here, which the connector never does."""
        scheduler, _ = self._adapters
        if (unacknowledged := scheduler._unacked_lookups.get(request_id)) is not None:
            pending = unacknowledged.futures[self._url]
        else:
            pending, _ = scheduler._lookup_status[request_id][self._url]
        pending.wait(timeout=WAIT_S)

    def _settle(self, tokens: list[int]) -> None:
        """Wait until the server's lookup thread has done all it was sent: an empty range to free comes after it."""
        scheduler, _ = self._adapters
        empty = scheduler._create_key(tokens[:1], 0, 0, "settle").no_worker_id_version()
        scheduler.req_clients[self._url].free_lookup_locks(empty, 1).result(timeout=WAIT_S)

    def _store(self, tokens: list[int], block_ids: list[int]) -> None:
        scheduler, worker = self._adapters
        request_id = next(self._request_ids)
        operation = LoadStoreOp(tokens, [block_ids], 0, len(tokens))
        worker.batched_submit_store_requests([request_id], [operation], worker.create_recorded_event())
        self._until(lambda: request_id in (worker.get_finished({request_id})[0] or ()))
        assert not worker.get_failed_store_requests()
        scheduler.end_session(request_id)

    def _load(self, tokens: list[int], block_ids: list[int]) -> dict[str, float]:
        scheduler, worker = self._adapters
        request_id = next(self._request_ids)
        found = self._ask(request_id, tokens)
        assert found == len(tokens), f"LMCache acknowledged a store of {len(tokens)} tokens and has {found} of them."
        scheduler.cleanup_lookup_result(request_id)
        operation = LoadStoreOp(tokens, [block_ids], 0, len(tokens))

        def load() -> None:
            worker.batched_submit_retrieve_requests([request_id], [operation], worker.create_recorded_event())
            self._until(lambda: request_id in (worker.get_finished(set())[1] or ()))

        copy = measured(self._server_pid, load)
        assert not worker.get_block_ids_with_load_errors()
        scheduler.end_session(request_id)
        return copy

    def _until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < deadline, "An LMCache transfer did not end."
            time.sleep(POLL_S)


if __name__ == "__main__":
    play(LMCachePlayer(int(sys.argv[1]), *sys.argv[2:]))
