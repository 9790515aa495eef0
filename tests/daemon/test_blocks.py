"""Single blocks: keys, and blocks that are read, put and compared by a program that is no engine."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffd_client import (
    AdminClient,
    BlockClient,
    DaemonUnavailable,
    ErrorCode,
    GroupKeys,
    GroupTransfer,
    Job,
    JobResult,
    KeyState,
    KvoffdClientError,
    LookupFuture,
    RequestRefused,
    RequestTimeout,
    SharedMemory,
)
from kvoffd_client.testing import FakeEngine
from tests.kit.checked import flip
from tests.kit.daemon import DaemonProcess
from tests.kit.redis_server import RedisServer
from tests.kit.require import require
from tests.kit.waiting import wait_until
from tests.kit.wire import WireClient, books, keys, store_of

torch: Any
PAGE_BYTES = 4096
LAYERS = 4
BLOCKS = 8
LABEL = "tiny"
KEYS = keys(*range(1, BLOCKS + 1))
NEW = keys(50)[0]


@pytest.fixture(scope="module", autouse=True)
def _torch() -> None:
    """Not at the file's import: it takes seconds, and each of the processes side by side imports all files."""
    global torch
    torch = pytest.importorskip("torch")


def engine_on(daemon: DaemonProcess, **given: int) -> FakeEngine:
    return FakeEngine(daemon.directory, LABEL, **{"world_size": 2, "blocks": 256, "page_bytes": PAGE_BYTES, **given})


@pytest.fixture(scope="module")
def module_daemon() -> Iterator[DaemonProcess]:
    """What ``shared_daemon`` gives."""
    with DaemonProcess("2MiB", eviction_policy="lru", limits={"leased_share": 1}) as running:
        yield running


@pytest.fixture
def engine(shared_daemon: DaemonProcess) -> Iterator[FakeEngine]:
    with engine_on(shared_daemon) as fake:
        fake.fill(range(BLOCKS), seed=1)
        assert fake.store(KEYS, range(BLOCKS)).ok
        yield fake


@pytest.fixture
def blocks(shared_daemon: DaemonProcess, engine: FakeEngine) -> Iterator[BlockClient]:
    with BlockClient(shared_daemon.directory, LABEL) as client:
        yield client


def both_ranks(blocks: BlockClient, key: bytes) -> list[list[Any]]:
    return [blocks.get(key, rank=rank) for rank in range(2)]


def test_a_block_is_read_as_it_was_stored(blocks: BlockClient, engine: FakeEngine) -> None:
    for number, key in enumerate(KEYS):
        for rank in range(2):
            layers = blocks.get(key, rank=rank)
            assert [(one.dtype, tuple(one.shape)) for one in layers] == [(torch.uint8, (1, PAGE_BYTES))] * LAYERS
            for layer, page in zip(layers, engine._pages[rank][:, number], strict=True):
                assert layer.numpy().tobytes() == page.tobytes()
    (first, *_) = blocks.get(KEYS[0], dtype=torch.float16, shape=(2, 32, 32))
    assert first.numpy().tobytes() == engine._pages[0][0, 0].tobytes()
    assert (first.dtype, tuple(first.shape)) == (torch.float16, (2, 32, 32))


def test_a_put_block_is_loaded_once_it_is_whole(blocks: BlockClient, engine: FakeEngine) -> None:
    mine = both_ranks(blocks, KEYS[0])
    assert blocks.put(NEW, [[one.view(torch.bfloat16) for one in layers] for layers in mine])
    assert not blocks.put(NEW, mine), "it is there"
    assert engine.lookup([NEW]) == 1
    assert engine.load([NEW], [100]).ok
    assert engine.checksums([100]) == engine.checksums([0])
    other = both_ranks(blocks, KEYS[1])
    with pytest.raises(KvoffdClientError, match="with other bytes, which stays"):
        blocks.put(NEW, other)
    assert both_ranks(blocks, NEW)[1][0].equal(mine[1][0])


@pytest.mark.parametrize("policy", ["learned", "lru", "arc"])
def test_what_is_larger_than_the_pool_keeps_its_beginning(policy: str) -> None:
    """A store of several messages, without a lookup, is told what finds no space. Older blocks go first."""
    wanted, there = keys(*range(5000, 8000)), 2048
    with (
        DaemonProcess("16MiB", eviction_policy=policy) as daemon,
        engine_on(daemon, world_size=1, layers=1, blocks=len(wanted), page_bytes=(16 << 20) // there) as engine,
    ):
        assert engine.store(keys(*range(1000)), range(1000)).ok
        assert engine.store(wanted, range(len(wanted))).failed_keys == wanted[there:]
        assert engine.lookup(wanted) == there * 7 // 8, "as much of it as leases may pin"
        counted = books(daemon.directory).namespaces[engine.namespace.fingerprint]
        assert (counted.evicted_blocks, counted.no_space_keys) == (1000, len(wanted) - there)
        assert engine.store(keys(9000), [0]).ok, "a newer prompt has space"


def test_keys_come_in_pages_each_once() -> None:
    wanted = keys(*range(1500))
    with (
        DaemonProcess("16MiB") as daemon,
        engine_on(daemon, world_size=1, layers=1, blocks=len(wanted), page_bytes=512) as engine,
    ):
        assert engine.store(wanted, range(len(wanted))).ok
        with BlockClient(daemon.directory, engine.namespace.fingerprint) as blocks:
            found = []
            for key in blocks.keys(limit=100):
                if len(found) in (10, 1100):
                    engine.scheduler.invalidate([GroupKeys(0, b"".join(wanted[:5]))])
                    assert engine.store(keys(*range(5000 + len(found), 5020 + len(found))), range(20)).ok
                found.append(key)
            assert len(found) == len(set(found))
            assert set(wanted[5:]) <= set(found)
            prompt = [*wanted[5:1200], *keys(9999), *wanted[1200:]]
            assert list(blocks.keys(prefix_of=prompt, limit=100)) == wanted[5:1200]


WRONG: dict[str, tuple[Callable[[BlockClient, list[list[Any]]], object], type[Exception], str]] = {
    "key never stored": (
        lambda blocks, kv: blocks.get(keys(99)[0]), KeyError, (
            "is not ready: never stored in this namespace.*If you computed the key, compare with the engine's: "
            "tokens per block, hash algorithm, PYTHONHASHSEED"
        )
    ),
    "short key": (lambda blocks, kv: blocks.get(b"short"), ValueError, "has 32 bytes, not 5"),
    "unknown rank": (lambda blocks, kv: blocks.get(KEYS[0], rank=2), ValueError, "ranks 0 to 1, not 2"),
    "unknown group": (lambda blocks, kv: blocks.get(KEYS[0], group=1), ValueError, "groups 0 to 0, not 1"),
    "shape": (
        lambda blocks, kv: blocks.get(KEYS[0], dtype=torch.float16, shape=(3, 5)),
        ValueError,
        r"4096 bytes is not of torch.float16 and shape \(3, 5\)",
    ),
    "rank as text": (lambda blocks, kv: blocks.get(KEYS[0], rank="1"), ValueError, "rank is an int, not str"),  # type: ignore[arg-type]
    "group as text": (lambda blocks, kv: blocks.get(KEYS[0], group="0"), ValueError, "group is an int, not str"),  # type: ignore[arg-type]
    "rank as truth": (lambda blocks, kv: blocks.get(KEYS[0], rank=True), ValueError, "rank is an int, not bool"),
    "group as truth": (lambda blocks, kv: blocks.get(KEYS[0], group=False), ValueError, "group is an int, not bool"),
    "shape with truth": (
        lambda blocks, kv: blocks.get(KEYS[0], shape=(True, 4096)),
        ValueError,
        r"ints, not \(True, 4096\)",
    ),
    "text for a key": (
        lambda blocks, kv: blocks.get("x" * 32),  # type: ignore[arg-type]
        ValueError,
        r"A key is bytes, not str; if these are its hex digits, give bytes.fromhex\(key\)",
    ),
    "number of an event for a key": (
        lambda blocks, kv: blocks.get(1 << 60),  # type: ignore[arg-type]
        ValueError,
        "not int. vLLM's KV events have the last 8 bytes of a hash .*VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0",
    ),
    "text for a dtype": (
        lambda blocks, kv: blocks.get(KEYS[0], dtype="float16"),  # type: ignore[arg-type]
        ValueError,
        "dtype is a torch.dtype such as torch.bfloat16, not str",
    ),
    "shape without dtype": (
        lambda blocks, kv: blocks.get(KEYS[0], shape=(2, 32, 32)),
        ValueError,
        r"is not of torch.uint8 and shape \(2, 32, 32\); give its dtype too",
    ),
    "tensor of ranks": (
        lambda blocks, kv: blocks.put(NEW, torch.stack(kv[0])),
        ValueError,
        r"list of layers, or of lists of layers by rank, not Tensor; give list\(tensor\)",
    ),
    "tensor of layers": (
        lambda blocks, kv: blocks.put(NEW, [torch.stack(kv[0]), kv[1]]),
        ValueError,
        r"The layers of rank 0 are a list of tensors, not Tensor; give list\(tensor\)",
    ),
    "text for a layer": (
        lambda blocks, kv: blocks.put(NEW, [["x" * 1024] * 4] * 2), ValueError, "array of numbers, not str"
    ),
    "bytes for a layer": (
        lambda blocks, kv: blocks.put(NEW, [[b"x" * PAGE_BYTES] * 4] * 2), ValueError, "array of numbers, not bytes"
    ),
    "list for a layer": (
        lambda blocks, kv: blocks.put(NEW, [[[1] * (PAGE_BYTES // 8)] * 4] * 2), ValueError, "of numbers, not list"
    ),
    "number for a layer": (lambda blocks, kv: blocks.put(NEW, [[7] * 4] * 2), ValueError, "of numbers, not int"),
    "array of text": (
        lambda blocks, kv: blocks.put(NEW, [[np.full(1024, "x")] * 4] * 2), ValueError, "of numbers, not ndarray"
    ),
    "array with objects": (
        lambda blocks, kv: blocks.put(NEW, [[np.zeros(512, [("x", object)])] * 4] * 2),
        ValueError,
        "of numbers, not ndarray",
    ),
    "number for a shape": (
        lambda blocks, kv: blocks.get(KEYS[0], shape=8),  # type: ignore[arg-type]
        ValueError,
        "shape is a list or tuple of ints, not int",
    ),
    "text in a shape": (
        lambda blocks, kv: blocks.get(KEYS[0], shape=["8"]),  # type: ignore[list-item]
        ValueError,
        "shape is a list or tuple of ints, not ",
    ),
    "text for keys": (
        lambda blocks, kv: list(blocks.keys(prefix_of=b"x" * 32)),  # type: ignore[arg-type]
        ValueError,
        "prefix_of is a list or tuple of keys, not bytes",
    ),
    "part of a page": (
        lambda blocks, kv: list(blocks.keys(limit=1.5)),  # type: ignore[arg-type]
        ValueError,
        "1 to 4096 keys, not 1.5",
    ),
    "objects": (lambda blocks, kv: blocks.put(NEW, [[object()] * 4] * 2), ValueError, "array of numbers, not object"),
    "layers of one rank": (
        lambda blocks, kv: blocks.put(NEW, kv[0]),
        ValueError,
        r"2 ranks; give \[layers of rank 0, layers of rank 1\], not a list of 4 layers",
    ),
    "one rank": (lambda blocks, kv: blocks.put(NEW, kv[:1]), ValueError, "2 ranks, not 1"),
    "layers": (lambda blocks, kv: blocks.put(NEW, [kv[0], kv[1][:3]]), ValueError, "4 layers in group 0, not 3"),
    "size": (
        lambda blocks, kv: blocks.put(NEW, [kv[0], [*kv[1][:3], kv[1][3][:, :-1]]]),
        ValueError,
        "Layer 3 of rank 1 has 4096 bytes, not 4095",
    ),
    "page": (lambda blocks, kv: list(blocks.keys(limit=0)), ValueError, "1 to 4096 keys, not 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_with_its_sentence(name: str, blocks: BlockClient) -> None:
    call, error, sentence = WRONG[name]
    kv = both_ranks(blocks, KEYS[0])
    with pytest.raises(error, match=sentence):
        call(blocks, kv)
    assert NEW not in list(blocks.keys())


def test_an_unknown_namespace_is_refused(shared_daemon: DaemonProcess) -> None:
    short = "A fingerprint has 32 bytes, not 3; give its first digits as text"
    wrong: list[tuple[Any, Any, str]] = [
        (b"abc", 1.0, short),
        (7, 1.0, "namespace is a label or a fingerprint, str or bytes, not int"),
        (LABEL, 0.0, "not 0.0"),
        (LABEL, float("nan"), "not nan"),
        (LABEL, "1", "not 1"),
    ]
    for namespace, timeout_s, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            BlockClient(shared_daemon.directory, namespace, timeout_s=timeout_s)
    there = f"The kvoffd daemon in {shared_daemon.directory} has no namespace with the "
    for name, named in ((bytes(32), f"fingerprint {'00' * 32}. "), ("nobody", "label 'nobody' or a fingerprint that ")):
        with engine_on(shared_daemon) as engine, pytest.raises(KvoffdClientError) as refused:
            BlockClient(shared_daemon.directory, name)
        assert str(refused.value).startswith(there + named)
        assert f"{LABEL} ({engine.namespace.fingerprint.hex()[:12]})" in str(refused.value)
        assert str(refused.value).endswith("An engine must have opened the namespace since the daemon's start.")


def test_without_a_daemon_the_argument_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for directory, shown in ((tmp_path, tmp_path), ("", "''")):
        with pytest.raises(DaemonUnavailable) as refused:
            BlockClient(directory, LABEL, timeout_s=5.0)
        assert (
            str(refused.value) == f"There is no kvoffd daemon in {shown}; start one, or give BlockClient its directory."
        )


def test_one_rank_is_given_no_list_of_ranks() -> None:
    with DaemonProcess("8MiB") as daemon, engine_on(daemon, world_size=1) as engine:
        assert engine.store(KEYS, range(BLOCKS)).ok
        with BlockClient(daemon.directory, LABEL) as blocks:
            kv = blocks.get(KEYS[0])
            with pytest.raises(ValueError, match="has 1 rank, not 2; give its list of layers alone"):
                blocks.put(NEW, [kv, kv])
            assert blocks.put(NEW, [kv])
            assert not blocks.put(NEW, kv)


def test_a_block_that_left_says_why(blocks: BlockClient, engine: FakeEngine) -> None:
    engine.scheduler.invalidate([GroupKeys(0, KEYS[3])])
    with pytest.raises(KeyError, match="stored before a reset or a clear, or dropped by an engine"):
        wait_until(lambda: blocks.get(KEYS[3]) is None)
    engine.workers[0].store(7, [engine._transfer([keys(77)[0]], [0])])
    assert engine.workers[0].wait_results(10)
    with pytest.raises(KeyError, match="a rank has not stored its part"):
        blocks.get(keys(77)[0])


def test_puts_of_two_clients_never_mix(shared_daemon: DaemonProcess, blocks: BlockClient, engine: FakeEngine) -> None:
    """Of each key one client's block is there, of which the other hears; no rank has a shard of the other."""
    kv = [both_ranks(blocks, key) for key in KEYS[:2]]
    wanted = keys(*range(200, 264))

    def put_all(number: int) -> list[str]:
        with BlockClient(shared_daemon.directory, LABEL) as client:
            return [_outcome(client, key, kv[number]) for key in wanted]

    with ThreadPoolExecutor(2) as threads:
        outcomes = list(zip(*threads.map(put_all, range(2)), strict=True))
    assert set(map(frozenset, outcomes)) == {frozenset({"stored", "other"})}
    for key, (first, _) in zip(wanted, outcomes, strict=True):
        its = kv[0 if first == "stored" else 1]
        for rank, layers in enumerate(both_ranks(blocks, key)):
            assert all(layer.equal(one) for layer, one in zip(layers, its[rank], strict=True)), (key.hex(), rank)
    assert books(shared_daemon.directory).writing_bytes == 0


def _outcome(client: BlockClient, key: bytes, kv: list[list[Any]]) -> str:
    try:
        return "stored" if client.put(key, kv) else "there"
    except KvoffdClientError as error:
        return "other" if "with other bytes" in str(error) else str(error)


def test_a_put_adds_nothing_to_a_block_that_an_engine_stores(
    shared_daemon: DaemonProcess, blocks: BlockClient, engine: FakeEngine
) -> None:
    (key,) = keys(300)
    kv = both_ranks(blocks, KEYS[1])
    engine.workers[0].store(7, [engine._transfer([key], [0])])
    assert engine.workers[0].wait_results(10)
    with BlockClient(shared_daemon.directory, LABEL, timeout_s=1.0) as impatient:
        with pytest.raises(KvoffdClientError, match="a rank has not stored its part"):
            impatient.put(key, kv)
    assert engine.lookup([key]) == 0, "rank 1 is the engine's to store"
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(_outcome, blocks, key, kv)
        engine.workers[1].store(8, [engine._transfer([key], [0])])
        assert engine.workers[1].wait_results(10)
        assert waiting.result(30) == "other"
    assert engine.lookup([key]) == 1
    for rank, layers in enumerate(both_ranks(blocks, key)):
        assert layers[0].numpy().tobytes() == engine._pages[rank][0, 0].tobytes()


def test_an_engine_adds_nothing_to_a_block_that_is_put(blocks: BlockClient, engine: FakeEngine) -> None:
    """Its store is ok, as of a block that is there, and the block becomes ready with the bytes that were put alone."""
    (key,) = keys(301)
    kv = both_ranks(blocks, KEYS[1])
    for rank in range(2):
        for layer, page in zip(kv[rank], blocks._layers(blocks._shard_memory[rank][0], 0, rank), strict=True):
            page[:] = layer.numpy()
    job = Job(900, [GroupTransfer.of([key], range(1))])
    blocks._workers[0].submit([job], sole=5)
    assert blocks._workers[0].wait_results(10)[0].bytes
    assert engine.store([key], [0]).ok
    assert engine.lookup([key]) == 0
    blocks._workers[1].submit([job], sole=5)
    assert blocks._workers[1].wait_results(10)[0].bytes
    assert engine.lookup([key]) == 1
    for found, put in zip(both_ranks(blocks, key), kv, strict=True):
        assert all(layer.equal(one) for layer, one in zip(found, put, strict=True))


def test_a_put_replaces_blocks_that_nobody_uses(
    shared_daemon: DaemonProcess, blocks: BlockClient, engine: FakeEngine
) -> None:
    kv = both_ranks(blocks, KEYS[0])
    for first in range(2000, 2128, 16):
        assert engine.store(keys(*range(first, first + 16)), range(16)).ok
    wait_until(lambda: not books(shared_daemon.directory).pinned_blocks)
    before = books(shared_daemon.directory).ready_blocks
    (key,) = keys(2200)
    assert blocks.put(key, kv)
    assert books(shared_daemon.directory).ready_blocks == before, "one went for it"
    assert both_ranks(blocks, key)[1][0].equal(kv[1][0])


def test_a_put_does_not_replace_what_an_engine_uses_of_a_block(shared_daemon: DaemonProcess) -> None:
    """The daemon has it without its first engine block, and a lease pins it."""
    namespace, (key,), kv = b"narrow".ljust(32), keys(1), [np.full(2 * PAGE_BYTES, 7, np.uint8)]
    directory = shared_daemon.directory
    with WireClient(directory) as worker, WireClient(directory, "scheduler") as scheduler:
        for client in (worker, scheduler):
            client.open_namespace(namespace)
        with SharedMemory(8 * PAGE_BYTES, "narrow") as memory:
            cache = worker.register(memory, PAGE_BYTES, namespace=namespace, blocks_per_key=2)
            assert worker.step(cache, [store_of(1, [key], [0], first_block=1)])[1].ok
            assert scheduler.lookup(1, [key], namespace).states == "R"
            with BlockClient(directory, namespace, timeout_s=1.0) as blocks:
                with pytest.raises(KvoffdClientError, match="without its first engine blocks"):
                    blocks.put(key, kv)
                assert scheduler.release(1) == 1
                assert blocks.put(key, kv)


def test_a_put_waits_for_the_end_of_its_own_lease(
    shared_daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another session sends it, so a busy daemon may handle it after the copy."""
    namespace, (key,), kv = b"later".ljust(32), keys(1), [np.full(2 * PAGE_BYTES, 7, np.uint8)]
    with WireClient(shared_daemon.directory) as worker, SharedMemory(8 * PAGE_BYTES, "later") as memory:
        worker.open_namespace(namespace)
        cache = worker.register(memory, PAGE_BYTES, namespace=namespace, blocks_per_key=2)
        assert worker.step(cache, [store_of(1, [key], [0], first_block=1)])[1].ok
        with BlockClient(shared_daemon.directory, namespace, timeout_s=10.0) as blocks:
            released, release = list[threading.Timer](), blocks._scheduler.release

            def release_later(lease_id: int) -> None:
                released.append(timer := threading.Timer(0.2, release, [lease_id]))
                timer.start()

            monkeypatch.setattr(blocks._scheduler, "release", release_later)
            assert blocks.put(key, kv)
            for timer in released:
                timer.join()


@pytest.mark.parametrize("end", ["refused", "late", "interrupted"])
def test_a_call_that_fails_releases_what_it_leased(
    shared_daemon: DaemonProcess, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Also if it had looked the block up before: the daemon would pin that for ten minutes."""
    engine.release()
    wait_until(lambda: not books(shared_daemon.directory).leases)
    with BlockClient(shared_daemon.directory, LABEL, timeout_s=1.0) as blocks:
        look_up, lookups = blocks._scheduler.lookup, list[LookupFuture]()

        def lookup(groups: Sequence[GroupKeys], **given: bool) -> LookupFuture:
            if lookups and end != "interrupted":
                lookups.append(LookupFuture(0, done=end == "refused", failed=True))
            else:
                lookups.append(found := look_up(groups, **given))
                assert found.wait(10)
                assert found.leased
                found.states = [bytes([KeyState.PENDING])]
            return lookups[-1]

        def interrupt(seconds: float) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(blocks._scheduler, "lookup", lookup)
        if end == "interrupted":
            monkeypatch.setattr(time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt if end == "interrupted" else DaemonUnavailable):
            blocks.get(KEYS[0])
        assert lookups[0].leased
        monkeypatch.undo()
        wait_until(lambda: not books(shared_daemon.directory).leases)


def test_a_put_of_which_one_rank_is_late_ends_that_of_the_others(
    shared_daemon: DaemonProcess, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would still read the memory, which the next call uses."""
    with BlockClient(shared_daemon.directory, LABEL, timeout_s=1.0) as blocks:
        kv, fenced = both_ranks(blocks, KEYS[0]), list[int]()
        for rank, worker in enumerate(blocks._workers):
            monkeypatch.setattr(worker, "fence", lambda ids, timeout_s, rank=rank: fenced.append(rank))
        monkeypatch.setattr(blocks._workers[0], "submit", lambda *given: None)
        with pytest.raises(RequestTimeout):
            blocks.put(NEW, kv)
        assert fenced == [0, 1]


def test_a_block_that_is_replaced_during_each_read_is_not_ready(
    blocks: BlockClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = list[int]()

    def replaced(key: bytes, group: int, ranks: Sequence[int], lease_id: int | None) -> list[JobResult]:
        reads.append(1)
        return [JobResult(1, False, 0, 0.0, ErrorCode.NOT_READY)]

    monkeypatch.setattr(blocks, "_copy", replaced)
    with pytest.raises(RequestRefused) as refused:
        blocks.get(KEYS[0])
    assert (refused.value.code, len(reads)) == (ErrorCode.NOT_READY, 3)


def test_a_closed_client_has_no_memory_and_says_that_it_is_closed(
    shared_daemon: DaemonProcess, engine: FakeEngine
) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:kvoffd-blocks")

    before = mapped()
    blocks = BlockClient(shared_daemon.directory, LABEL)
    kv = both_ranks(blocks, KEYS[0])
    assert mapped() > before
    blocks.close()
    assert mapped() == before
    for call in (lambda: blocks.get(KEYS[0]), lambda: blocks.put(NEW, kv), lambda: list(blocks.keys())):
        with pytest.raises(DaemonUnavailable, match="closed"):
            call()


def test_a_put_that_is_late_leaves_no_shard(
    shared_daemon: DaemonProcess, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an engine could not store the key for a minute: no block has shards of two."""
    late = keys(51)[0]
    with BlockClient(shared_daemon.directory, LABEL, timeout_s=1.0) as blocks:
        kv = both_ranks(blocks, KEYS[0])
        monkeypatch.setattr(blocks._workers[1], "submit", lambda *given: None)
        with pytest.raises(KvoffdClientError, match="in time"):
            blocks.put(late, kv)
        wait_until(lambda: engine.store([late], [0]).ok and engine.lookup([late]) == 1)


def test_a_full_pool_takes_no_block(shared_daemon: DaemonProcess, blocks: BlockClient, engine: FakeEngine) -> None:
    kv = both_ranks(blocks, KEYS[0])
    for first in range(1000, 1128, 16):
        assert engine.store(keys(*range(first, first + 16)), range(16)).ok
    there = list(blocks.keys())
    wait_until(lambda: not books(shared_daemon.directory).pinned_blocks)
    assert engine.lookup(there) == len(there), "it leases all of the pool"
    with pytest.raises(KvoffdClientError, match=r"was not stored\. The pool has no space"):
        blocks.put(keys(80)[0], kv)
    engine.release()
    wait_until(lambda: not books(shared_daemon.directory).pinned_blocks)
    assert books(shared_daemon.directory).writing_bytes == 0
    assert books(shared_daemon.directory).balanced


def test_changed_bytes_are_not_returned(pool_file: Path) -> None:
    """Memory that changed under the daemon does not match its checksum."""
    with DaemonProcess("8MiB", pool_file=str(pool_file), verify_share="0") as daemon, engine_on(daemon) as engine:
        engine.fill(range(BLOCKS), seed=1)
        assert engine.store(KEYS, range(BLOCKS)).ok
        with BlockClient(daemon.directory, LABEL) as blocks:
            data = np.concatenate([one.numpy().ravel() for one in blocks.get(KEYS[0], rank=1)]).tobytes()
            flip(pool_file, zlib.crc32(data), len(data))
            with pytest.raises(KvoffdClientError, match="does not match its checksum"):
                blocks.get(KEYS[0], rank=1)


def test_a_restarted_daemon_knows_the_layers(pool_file: Path) -> None:
    with DaemonProcess("8MiB", pool_file=str(pool_file)) as daemon:
        with engine_on(daemon) as engine:
            engine.fill(range(BLOCKS), seed=1)
            assert engine.store(KEYS, range(BLOCKS)).ok
            expected = engine.checksums([0])
        daemon.stop()
        daemon.start()
        with BlockClient(daemon.directory, LABEL) as blocks:
            pages = [one.numpy().tobytes() for layers in both_ranks(blocks, KEYS[0]) for one in layers]
            assert [zlib.crc32(b"".join(pages))] == expected


@pytest.mark.parametrize("kind", ["disk", "shared store"])
def test_a_block_below_the_pool_is_brought_up(kind: str, tmp_path: Path) -> None:
    """It is read, listed by its prompt, and compared with what is put."""
    with ExitStack() as stack:
        if kind == "disk":
            flags = {"disk": f"{tmp_path}=64MiB", "disk_write": "always"}
        else:
            flags = {"shared": stack.enter_context(RedisServer()).url, "shared_write": "always"}
        daemon = stack.enter_context(DaemonProcess("2MiB", eviction_policy="lru", **flags))

        def is_up() -> bool:
            found = books(daemon.directory)
            return all(one.up for one in found.said.shared) and all(one.state == "serving" for one in found.disks)

        wait_until(is_up)
        with engine_on(daemon) as engine:
            for first in range(0, 10 * BLOCKS, BLOCKS):
                engine.fill(range(BLOCKS), seed=first)
                assert engine.store(keys(*range(1 + first, 1 + first + BLOCKS)), range(BLOCKS)).ok
                wait_until(lambda: not books(daemon.directory).tiers.writes_waiting)
            engine.fill(range(BLOCKS), seed=0)
            with BlockClient(daemon.directory, LABEL) as blocks:
                assert not set(KEYS) & set(blocks.keys()), "they are not in the pool"
                for number, key in enumerate(KEYS[:4]):
                    for rank, layers in enumerate(both_ranks(blocks, key)):
                        assert layers[1].numpy().tobytes() == engine._pages[rank][1, number].tobytes()
                assert list(blocks.keys(prefix_of=KEYS)) == KEYS
                kv = both_ranks(blocks, KEYS[5])
                assert not blocks.put(KEYS[5], kv)
                with pytest.raises(KvoffdClientError, match="with other bytes"):
                    blocks.put(KEYS[6], kv)


def test_a_user_who_may_not_administer_is_refused() -> None:
    """Before it opens a session of an engine."""
    require("root", os.geteuid() == 0, "only root can be somebody else")
    with DaemonProcess("8MiB", allowed_uids="4242", admin_uids="4343") as daemon, engine_on(daemon):
        for path in (daemon.directory, *daemon.directory.glob("*.sock")):
            path.chmod(0o777)

        os.seteuid(4242)
        try:
            with pytest.raises(
                KvoffdClientError, match="User 4242 may not administer this kvoffd; add the uid to admin_"
            ):
                BlockClient(daemon.directory, LABEL)
        finally:
            os.seteuid(0)
        with AdminClient(daemon.directory) as admin:
            assert not [one for one in admin.sessions().sessions if one.name == "kvoffd blocks"]
