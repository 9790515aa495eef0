"""Reads and writes single blocks for programs that are no engines, with an engine's copies."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffd_client.admin_client import MIN_PREFIX_DIGITS, AdminClient, find_namespace_info, matching_namespaces
from kvoffd_client.errors import DaemonUnavailable, KvoffdClientError, RequestRefused, RequestTimeout
from kvoffd_client.memory import Registration, SharedMemory
from kvoffd_client.namespace import NamespaceSpec, is_int, is_positive
from kvoffd_client.repeated_lookup import RepeatedLookup
from kvoffd_client.scheduler_client import LookupFuture, SchedulerClient
from kvoffd_client.session import ClientOptions, Closing
from kvoffd_client.worker_client import Job, WorkerClient
from kvoffd_proto.admin import BlockFound, DescribeNamespace, FindBlock, ListBlocks, ShardSpec
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import (
    FINGERPRINT_BYTES,
    MAX_SOLE,
    READY,
    GroupKeys,
    GroupTransfer,
    JobResult,
    PageRef,
    TensorLayout,
)
from kvoffd_proto.stats import MISS_REASONS
from kvoffd_proto.units import printable

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]
Item = TypeVar("Item")
TIMEOUT_S = 60.0
CONNECT_S = 10.0
STORE_PAUSE_S = 0.005
"""Pause before a block that another client stores is looked up again."""
CHECKSUM_BYTES = 8
READS = 3
"""Most reads of a block for one call: the block of the key may be replaced by another during one."""
NEVER_STORED = ("unknown", "forgotten")
"""Reasons of a miss whose key may have been computed with other settings than the engine's."""
NUMBERS = "biufcV"
"""Kinds of numpy's types of numbers; V: those of other packages, such as bfloat16."""
NAME = "kvoffd blocks"
"""Name of the sessions, for operators."""
KEY_HINTS: dict[type, str] = {
    int: (
        ". vLLM's KV events have the last 8 bytes of a hash as a number: look among keys() for the one whose last 8 "
        "bytes are it, or start the engine with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."
    ),
    str: "; if these are its hex digits, give bytes.fromhex(key).",
}
"""Ends of the sentence that refuses a key, by the key's type."""


class BlockClient(Closing):
    """Reads and writes blocks of one namespace as lists of tensors, one for each layer of a rank's shard.

    >>> with BlockClient("/run/kvoffd", "tiny-llama") as blocks:                           # doctest: +SKIP
    ...     for key in blocks.keys():
    ...         layers = blocks.get(key)       # each uint8 [engine blocks of a key, bytes of a page]
    ...         blocks.put(another_key, layers)

    Not for several threads at once. The daemon counts its copies as an engine's.

    Args:
        directory: where the daemon's sockets are.
        namespace: an open namespace's label or first hex digits of its fingerprint, or its whole fingerprint as bytes.
        timeout_s: bounds each call.

    Raises:
        ValueError: a namespace of another type, a fingerprint of another length, or no time.
        DaemonUnavailable: no daemon in time.
        RequestRefused: the daemon refuses this user.
        KvoffdClientError: no namespace of this name or fingerprint, or its layers are unknown.
    """

    def __init__(
        self, directory: str | os.PathLike[str], namespace: str | bytes, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        if not is_positive(timeout_s):
            raise ValueError(f"timeout_s is a time in seconds, not {timeout_s}.")
        if not isinstance(namespace, str | bytes):
            raise ValueError(f"namespace is a label or a fingerprint, str or bytes, not {type(namespace).__name__}.")
        if isinstance(namespace, bytes) and len(namespace) != FINGERPRINT_BYTES:
            raise ValueError(
                f"A fingerprint has {FINGERPRINT_BYTES} bytes, not {len(namespace)}; give its first digits as text."
            )
        self._closing: list[Closing] = []
        """Clients and memory that ``close`` closes, the last first."""
        self._layouts: list[list[ShardSpec]] = []
        """Layout of a shard by rank and group."""
        self._shard_memory: list[list[Bytes]] = []
        """Memory for one shard by rank and group; copies go through it."""
        self._timeout_s = timeout_s
        self._job_ids = itertools.count(1)
        try:
            self._open(directory, namespace)
        except BaseException:
            self.close()
            raise

    def _open(self, directory: str | os.PathLike[str], namespace: str | bytes) -> None:
        """Connect as administrator, scheduler and one worker for each rank. Raises as the class."""
        self._admin = AdminClient(directory, self._timeout_s)
        self._admin.directory_hint = "give BlockClient its directory"
        self._closing.append(self._admin)
        namespace = self._fingerprint_of(namespace)
        described = self._admin.ask(DescribeNamespace, namespace)
        for rank, layouts in enumerate(described.shards):
            if layouts is None:
                raise KvoffdClientError(
                    f"The daemon does not know the layers of rank {rank} of the namespace {described.label!r}; start "
                    "its engine once."
                )
            self._layouts.append(layouts)
        geometry = described.world_size, described.key_bytes, tuple(described.groups)
        self.namespace = spec = NamespaceSpec(namespace, described.label, *geometry, described.description)
        options = ClientOptions(request_timeout_s=self._timeout_s)
        clients: list[SchedulerClient | WorkerClient] = []
        self._scheduler = SchedulerClient(directory, spec, name=NAME, options=options)
        clients.append(self._scheduler)
        self._closing.append(self._scheduler)
        self._workers: list[WorkerClient] = []
        for rank in range(spec.world_size):
            worker = WorkerClient(directory, spec, self._registration(rank), name=NAME, options=options)
            self._workers.append(worker)
            clients.append(worker)
            self._closing.append(worker)
        deadline = time.monotonic() + min(CONNECT_S, self._timeout_s)
        for client in clients:
            if not client.wait_settled(max(0.0, deadline - time.monotonic())):
                why = f"The kvoffd daemon in {os.fspath(directory)} opened no session in time: {client.problem}"
                raise client.refusal or DaemonUnavailable(why)

    def _fingerprint_of(self, namespace: str | bytes) -> bytes:
        """Return the fingerprint of an open namespace. Raises KvoffdClientError if there is none, or several."""
        there = self._admin.namespaces().namespaces
        if isinstance(namespace, bytes):
            wanted, found = f"fingerprint {namespace.hex()}", [one for one in there if one.namespace == namespace]
        else:
            wanted = f"label {printable(namespace)!r} or a fingerprint that begins with it ({MIN_PREFIX_DIGITS} digits)"
            found = matching_namespaces(there, namespace)
        if not found:
            listed = ", ".join(f"{printable(one.label)} ({one.namespace.hex()[:12]})" for one in there) or "none"
            raise KvoffdClientError(
                f"The kvoffd daemon in {self._admin.directory} has no namespace with the {wanted}. It has: {listed}. "
                "An engine must have opened the namespace since the daemon's start."
            )
        if isinstance(namespace, bytes):
            return namespace
        return find_namespace_info(found, namespace).namespace  # raises if several match

    def _registration(self, rank: int) -> Registration:
        """Allocate memory for one block of each group and lay it out as the daemon's slots are, layer after layer."""
        layouts = self._layouts[rank]
        sizes = [layout.blocks_per_key * sum(layout.page_bytes) for layout in layouts]
        memory = SharedMemory(max(1, sum(sizes)), "kvoffd-blocks")
        self._closing.append(memory)
        tensors: list[TensorLayout] = []
        groups: list[tuple[PageRef, ...]] = []
        start, by_group = 0, list[Bytes]()
        for layout, size in zip(layouts, sizes, strict=True):
            by_group.append(memory.view[start : start + size])
            groups.append(tuple(PageRef(len(tensors) + at, nbytes) for at, nbytes in enumerate(layout.page_bytes)))
            for nbytes in layout.page_bytes:
                tensors.append(TensorLayout(0, start, nbytes, layout.blocks_per_key))
                start += layout.blocks_per_key * nbytes
        self._shard_memory.append(by_group)
        return Registration(rank, layouts[0].blocks_per_key, (memory,), tuple(tensors), tuple(groups))

    def get(
        self,
        key: bytes,
        *,
        group: int = 0,
        rank: int = 0,
        dtype: torch.dtype | None = None,
        shape: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """Return copies of the layers of a rank's shard, in the engine's order, after a comparison with its checksum.

        Each is uint8, [engine blocks of a key, bytes of a page], or viewed as ``dtype`` and ``shape``. A block on a
        disk or in a shared store is brought up first.

        Raises:
            KeyError: the block is not ready; the sentence has the reason.
            ValueError: a key, group or rank of another namespace or of a wrong type, or a layer is not of this dtype
                and shape.
            KvoffdClientError: the bytes do not match their checksum, or the copy failed.
        """
        import torch

        self._check(key, group)
        if not is_int(rank):
            raise ValueError(f"rank is an int, not {type(rank).__name__}.")
        if not 0 <= rank < self.namespace.world_size:
            raise ValueError(f"The namespace has ranks 0 to {self.namespace.world_size - 1}, not {rank}.")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype is a torch.dtype such as torch.bfloat16, not {type(dtype).__name__}.")
        sizes = () if shape is None else _sequence(shape, "shape", "ints")
        if not all(hasattr(size, "__index__") and not isinstance(size, bool) for size in sizes):
            raise ValueError(f"shape is a list or tuple of ints, not {shape}.")
        data = self._read(key, group, rank)
        return [self._viewed(torch.from_numpy(layer), dtype, shape) for layer in self._layers(data, group, rank)]

    def put(self, key: bytes, kv: Sequence[object], *, group: int = 0) -> bool:
        """Store a block: a list of its layers, or with several ranks a list of such lists. Layers are tensors or arrays
        of any type, of as many bytes as ``get`` returns.

        Returns False if the daemon has the block with the same bytes. A block that an engine or another client is
        storing is waited for: no block has shards of two.

        Raises:
            ValueError: a layer has another size, or there are other numbers of ranks or layers.
            KvoffdClientError: the daemon has a block of this key with other bytes, or did not store it; then no rank's
                shard of it is left.
        """
        self._check(key, group)
        shards = self._checked(kv, group)
        sums, deadline = b"".join(map(_checksum, shards)), time.monotonic() + self._timeout_s
        with self._leased([key], group):  # brings it up from a tier, to compare it
            if self._is_there(key, self._find(key, group), sums):
                return False
        while True:
            for by_group, data in zip(self._shard_memory, shards, strict=True):
                by_group[group][:] = data
            try:
                results = self._copy(key, group, range(self.namespace.world_size))
            except BaseException:  # the shards of some ranks may be there
                self._scheduler.invalidate([GroupKeys(group, key)])
                raise
            has_copied = any(result.bytes for result in results)
            found = self._find(key, group)
            if self._is_there(key, found, sums):
                return has_copied  # if nothing was copied, another client has stored it since
            if has_copied:  # the shards of some ranks
                self._scheduler.invalidate([GroupKeys(group, key)])
                break
            # The daemon accepts a block that another client is storing, and copies nothing.
            is_being_stored = all(result.ok and not result.rejected for result in results)
            # One without its first engine blocks stays as long as a lease pins it: also that above, whose end was sent
            # in another session, so that the daemon may handle it after the copy.
            is_narrow = found.state == READY and found.first_block
            if not (is_being_stored or is_narrow) or time.monotonic() >= deadline:
                break
            time.sleep(STORE_PAUSE_S)  # until that store ends or is dropped, or the lease ends
        # What the last attempt found is the reason.
        raise KvoffdClientError(f"The block {key.hex()} was not stored. {_why_not_stored(found, results)}")

    def keys(self, prefix_of: Sequence[bytes] | None = None, *, group: int = 0, limit: int = 1024) -> Iterator[bytes]:
        """Yield the keys of the blocks that are in the pool, in no order, in pages of ``limit`` keys.

        ``prefix_of``: keys of a prompt, root first. Only the leading ones that can be read are yielded, in their order;
        those on a disk or in a shared store are brought up.

        Raises ValueError if a key, the group or the limit does not fit.
        """
        self.namespace.check_group(group)
        if not is_int(limit) or not 1 <= limit <= 4096:
            raise ValueError(f"A page has 1 to 4096 keys, not {limit}.")
        size = self.namespace.key_bytes
        if prefix_of is not None:
            for key in _sequence(prefix_of, "prefix_of", "keys"):
                self._check(key, group)
            for at in range(0, len(prefix_of), limit):
                page = prefix_of[at : at + limit]
                with self._leased(page, group) as found:
                    ready = found.leading_ready()
                yield from page[:ready]
                if ready < len(page):
                    return
            return
        position = 0
        while True:
            listed = self._admin.ask(ListBlocks, self.namespace.fingerprint, group, position, limit)
            yield from (listed.keys[at : at + size] for at in range(0, len(listed.keys), size))
            position = listed.next_position
            if not position:
                return

    def close(self) -> None:
        """End the sessions and free the memory. Repeatable."""
        self._shard_memory.clear()
        while self._closing:
            self._closing.pop().close()

    def _check(self, key: bytes, group: int) -> None:
        """Raise ValueError for an unknown group, or a key of another type or length."""
        self.namespace.check_group(group)
        if not isinstance(key, bytes):
            what_to_do = KEY_HINTS.get(type(key), ".")
            raise ValueError(f"A key is bytes, not {type(key).__name__}{what_to_do}")
        if len(key) != self.namespace.key_bytes:
            raise ValueError(f"A key of this namespace has {self.namespace.key_bytes} bytes, not {len(key)}.")

    def _layers(self, data: Bytes, group: int, rank: int) -> list[Bytes]:
        """Return the layers of a shard, [engine blocks of a key, bytes of a page]."""
        layout, start, layers = self._layouts[rank][group], 0, list[Bytes]()
        for nbytes in layout.page_bytes:
            end = start + layout.blocks_per_key * nbytes
            layers.append(data[start:end].reshape(layout.blocks_per_key, nbytes))
            start = end
        return layers

    def _viewed(self, layer: torch.Tensor, dtype: torch.dtype | None, shape: Sequence[int] | None) -> torch.Tensor:
        """Return a layer's bytes as this type and shape. Raises ValueError if they are not of them."""
        try:
            viewed = layer.flatten().view(dtype).reshape(layer.shape[0], -1) if dtype is not None else layer
            return viewed if shape is None else viewed.reshape(tuple(shape))
        except (RuntimeError, TypeError) as error:
            wanted = "the same shape" if shape is None else f"shape {tuple(shape)}"
            hint = "; give its dtype too" if dtype is None else ""
            raise ValueError(
                f"A layer of {layer.numel()} bytes is not of {dtype or layer.dtype} and {wanted}{hint}."
            ) from error

    def _checked(self, kv: Sequence[object], group: int) -> list[Bytes]:
        """Return the bytes of each rank's shard. Raises ValueError if their sizes differ from the namespace's."""
        count = self.namespace.world_size
        if not isinstance(kv, list | tuple):
            raise ValueError(
                f"A block is a list of layers, or of lists of layers by rank, not {type(kv).__name__}; "
                "give list(tensor) if its first dimension is the layers."
            )
        # With one rank its layers may be given alone.
        is_by_rank = any(isinstance(one, list | tuple) for one in kv)
        if count > 1 and not is_by_rank:
            shown = f"[layers of rank 0, layers of rank 1{', ...' if count > 2 else ''}]"
            raise ValueError(
                f"A block of this namespace has {count} ranks; give {shown}, not a list of {len(kv)} layers."
            )
        ranks = kv if is_by_rank else [kv]
        if len(ranks) != count:
            shown = "1 rank" if count == 1 else f"{count} ranks"
            hint = "; give its list of layers alone" if count == 1 else ""
            raise ValueError(f"A block of this namespace has {shown}, not {len(ranks)}{hint}.")
        shards = []
        for rank, (layers, layouts) in enumerate(zip(ranks, self._layouts, strict=True)):
            layout = layouts[group]
            if not isinstance(layers, list | tuple):
                kind = type(layers).__name__
                raise ValueError(f"The layers of rank {rank} are a list of tensors, not {kind}; give list(tensor).")
            given = [_bytes_of(layer) for layer in layers]
            if len(given) != len(layout.page_bytes):
                raise ValueError(f"Rank {rank} has {len(layout.page_bytes)} layers in group {group}, not {len(given)}.")
            for number, (layer, nbytes) in enumerate(zip(given, layout.page_bytes, strict=True)):
                if layer.size != (expected := layout.blocks_per_key * nbytes):
                    raise ValueError(f"Layer {number} of rank {rank} has {expected} bytes, not {layer.size}.")
            shards.append(np.concatenate([np.empty(0, np.uint8), *given]))
        return shards

    def _find(self, key: bytes, group: int) -> BlockFound:
        return self._admin.ask(FindBlock, self.namespace.fingerprint, group, key)

    def _is_whole(self, found: BlockFound) -> bool:
        """Return whether all ranks' shards are there, from the key's first engine block on."""
        return found.state == READY and not found.first_block

    def _is_there(self, key: bytes, found: BlockFound, checksums: bytes) -> bool:
        """Return whether the daemon has the whole block. Raises KvoffdClientError if that has other checksums."""
        if not self._is_whole(found):
            return False
        if found.checksums != checksums:
            raise KvoffdClientError(
                f"The daemon has a block {key.hex()} with other bytes, which stays; a key stands for the tokens up to "
                "its block, so one of the two is wrong. Put yours under another key."
            )
        return True

    @contextmanager
    def _leased(self, keys: Sequence[bytes], group: int) -> Iterator[LookupFuture]:
        """Pin keys that are in the pool, once those on disks and in stores have come up or the time is over."""
        asked, lookup = [GroupKeys(group, b"".join(keys))], RepeatedLookup(self._scheduler)
        try:
            # Not counted: no prompt needs them.
            found = lookup.wait(lambda _: self._scheduler.lookup(asked, again=True), self._timeout_s)
            if found is None:
                raise DaemonUnavailable(f"The daemon did not look the block up: {self._scheduler.problem}")
            yield found
        finally:
            lookup.release()

    def _read(self, key: bytes, group: int, rank: int) -> Bytes:
        """Load a shard; return its bytes, compared with its checksum. Raises as ``get``."""
        for _ in range(READS):  # again if the block was replaced, after which its checksum is another
            with self._leased([key], group) as leased:
                found = self._find(key, group)
                if not leased.leading_ready() or not self._is_whole(found):
                    reason = "tier_late" if leased.pending else found.reason or "partial"
                    why = f"{MISS_REASONS[reason]}.{self._hash_hint(group) if reason in NEVER_STORED else ''}"
                    raise KeyError(f"The block {key.hex()} of group {group} is not ready: {why}")
                (result,) = self._copy(key, group, [rank], leased.lease_id)
            if result.error is None:
                data = self._shard_memory[rank][group].copy()
                if found.checksums[rank * CHECKSUM_BYTES :][:CHECKSUM_BYTES] == _checksum(data):
                    return data
                why = f"The block {key.hex()} does not match its checksum; recompute it."
                failure = RequestRefused(ErrorCode.CHECKSUM, why)
            else:
                failure = RequestRefused(result.error, "")
                if result.error is not ErrorCode.NOT_READY:
                    break
        raise failure

    def _hash_hint(self, group: int) -> str:
        """Return what to compare if a key was computed otherwise than the engine's."""
        tokens, factors = self.namespace.groups[group].tokens_per_block, None
        with suppress(ValueError, RecursionError):  # the description of a client that is no vLLM
            factors = json.loads(self.namespace.description)
        factors = factors if isinstance(factors, dict) else {}
        shown = f"tokens per block ({tokens} here)" if tokens else "tokens per block"
        if (hashed := factors.get("tokens_per_hash", tokens)) != tokens:
            shown += f", tokens per hash ({hashed} here)"
        algorithm = f" ({factors['hash_algorithm']} here)" if "hash_algorithm" in factors else ""
        return (
            f" If you computed the key, compare with the engine's: {shown}, hash algorithm{algorithm}, PYTHONHASHSEED."
        )

    def _copy(self, key: bytes, group: int, ranks: Sequence[int], lease_id: int | None = None) -> list[JobResult]:
        """Store a block from the memory of these ranks, or load it there; return each rank's result."""
        job_id, results = next(self._job_ids), list[JobResult]()
        sole = secrets.randbelow(MAX_SOLE) + 1  # the same for all ranks: the block gets no shard of another store
        workers = [self._workers[rank] for rank in ranks]
        deadline = time.monotonic() + self._timeout_s
        try:
            for rank, worker in zip(ranks, workers, strict=True):
                transfer = GroupTransfer.of([key], range(self._layouts[rank][group].blocks_per_key), group)
                # ``_leased`` releases the lease. Without ``keep_lease`` the daemon ends it once all ranks have loaded.
                worker.submit([Job(job_id, [transfer], lease_id, keep_lease=lease_id is not None)], sole)
            for worker in workers:
                found: list[JobResult] = []
                while not found and time.monotonic() < deadline:
                    left = max(0.0, deadline - time.monotonic())
                    found = [one for one in worker.wait_results(left) if one.job_id == job_id]
                if not found:
                    raise RequestTimeout("The daemon did not copy the block in time; try again.")
                results += found
        except BaseException:
            for worker in workers:  # the next call uses the memory
                worker.fence([job_id], 0.0)
            raise
        return results


def _why_not_stored(found: BlockFound, results: Sequence[JobResult]) -> str:
    """Return a sentence for a store with these results, after which this was found."""
    if (error := next((one.error for one in results if one.error is not None), None)) is not None:
        return error.sentence
    if found.state == READY:
        return "The daemon has it without its first engine blocks, and an engine uses what there is; try again later."
    reason = "rejected" if any(one.rejected for one in results) else found.reason
    return f"It is {reason}: {MISS_REASONS[reason]}."


def _checksum(data: Bytes) -> bytes:
    """Return the checksum of a shard as ``BlockFound`` has it."""
    return (xxhash.xxh3_64_intdigest(data) or 1).to_bytes(CHECKSUM_BYTES, "big")  # type: ignore[arg-type]


def _sequence(given: Sequence[Item], name: str, items: str) -> Sequence[Item]:
    """Return an argument. Raises ValueError if it is no sequence of such items."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ValueError(f"{name} is a list or tuple of {items}, not {type(given).__name__}.")
    return given


def _bytes_of(layer: object) -> Bytes:
    """Return the bytes of a torch tensor or an array. Raises ValueError for anything else."""
    if hasattr(layer, "detach"):
        import torch

        if isinstance(layer, torch.Tensor):
            flat: Bytes = layer.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            return flat
    elif hasattr(layer, "__array__") and not isinstance(layer, np.generic):
        array = np.ascontiguousarray(layer)
        if array.dtype.kind in NUMBERS and not array.dtype.hasobject:
            return array.reshape(-1).view(np.uint8)
    raise ValueError(f"A layer is a tensor or an array of numbers, not {type(layer).__name__}.")
