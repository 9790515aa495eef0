"""Which vLLM this connector runs with: what it uses of vLLM is checked piece by piece, whatever the version."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import vllm

MINIMUM = (0, 32)
TESTED = ((0, 32), (0, 33))
"""Releases that the engine tests ran with: major and minor number."""
_TESTED = " and ".join(f"{major}.{minor}" for major, minor in TESTED)

# The methods that this connector's classes have. A release may ask for fewer, not for others.
MANAGER_METHODS = frozenset({"lookup", "on_new_request", "prepare_load", "prepare_store"})
WORKER_METHODS = frozenset({"get_finished", "submit_load", "submit_store", "wait"})
SPEC_METHODS = frozenset({"get_manager", "get_worker"})


def release_of(version: str) -> tuple[int, int] | None:
    """Return major and minor number of a version string, None when it has none."""
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return None
    return int(parts[0]), int(parts[1])


HAS_DEFECTS_OF_0_32 = release_of(vllm.__version__) == (0, 32)
"""Whether this vLLM has the two that ``forget_session_blocks`` and ``note_given_blocks`` go around."""


def require_vllm() -> None:
    """Raise ImportError where this vLLM is too old, or lacks something that the connector uses; it says what."""
    version = vllm.__version__
    if (release_of(version) or (0, 0)) < MINIMUM:
        raise ImportError(
            f"kvoffd's vLLM connector needs vLLM {'.'.join(map(str, MINIMUM))} or newer, and this is vLLM {version}. "
            f"It was tested with vLLM {_TESTED}."
        )
    if missing := _changes():
        raise ImportError(
            f"kvoffd's vLLM connector does not fit vLLM {version}, which has changed: {'; '.join(missing)}. This "
            f"kvoffd was tested with vLLM {_TESTED}: install one of those, or a newer kvoffd."
        )


def untested() -> str:
    """Return a sentence where this vLLM is no tested release; an empty string where it is one."""
    if release_of(vllm.__version__) in TESTED:
        return ""
    return (
        f"This kvoffd was tested with vLLM {_TESTED}, and this is vLLM {vllm.__version__}, whose interfaces fit. It "
        "shares blocks with engines of the same vLLM release only."
    )


def check_version(*, strict: bool) -> None:
    """Raise ValueError where ``strict`` asks for a tested release and this vLLM is none."""
    if strict and (sentence := untested()):
        raise ValueError(f"kvoffd cannot serve this engine, since strict_version is set. {sentence}")


def _fields(cls: Any) -> set[str]:
    return {item.name for item in dataclasses.fields(cls)}


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def _checks() -> dict[str, Callable[[], bool]]:
    """What the connector needs of vLLM, by what an error calls it. Raises ImportError where a module has moved."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base as connector_base
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.v1.kv_offload import base

    def fills_block_lists() -> bool:
        spec = base.GPULoadStoreSpec([3], [1], [0])
        return (list(spec.block_ids), list(spec.group_sizes), list(spec.block_indices)) == ([3], [1], [0])

    def tells_positions() -> bool:
        context = base.ReqContext("request")
        key = b"key"
        context.set_offload_key_position(key, 32)
        return context.get_offload_key_position(key) == 32 and hasattr(context, "load_tier_filter")

    return {
        "OffloadingManager's methods": lambda: base.OffloadingManager.__abstractmethods__ <= MANAGER_METHODS,
        "OffloadingWorker's methods": lambda: base.OffloadingWorker.__abstractmethods__ <= WORKER_METHODS,
        "OffloadingSpec's methods": lambda: base.OffloadingSpec.__abstractmethods__ <= SPEC_METHODS,
        "OffloadingSpec's constructor": lambda: _parameters(base.OffloadingSpec.__init__) == ["self", "config"],
        "OffloadingConnector's methods": lambda: not OffloadingConnector.__abstractmethods__,
        "OffloadingConnector's constructor": lambda: (
            _parameters(OffloadingConnector.__init__) == ["self", "vllm_config", "role", "kv_cache_config"]
        ),
        "the scheduler half's manager": lambda: "manager" in OffloadingConnectorScheduler.__init__.__code__.co_names,
        "the worker half's worker and spec": lambda: (
            {"worker", "spec"} <= {*OffloadingConnectorWorker.__init__.__code__.co_names}
        ),
        "the worker half's methods": lambda: all(
            _parameters(getattr(OffloadingConnectorWorker, name)) == ["self", "metadata"]
            for name in ("prepare_store_kv", "start_kv_transfers")
        ),
        "TransferJob's fields": lambda: {"req_id", "src_spec", "dst_spec"} <= _fields(common.TransferJob),
        "OffloadingConnectorMetadata's fields": lambda: (
            {"load_jobs", "store_jobs", "jobs_to_flush"} <= _fields(common.OffloadingConnectorMetadata)
        ),
        "OffloadingWorkerMetadata's fields": lambda: (
            {"completed_jobs", "transfer_stats"} <= _fields(common.OffloadingWorkerMetadata)
        ),
        "KVConnectorTransferResults' failed_recving": lambda: (
            "failed_recving" in _parameters(connector_base.KVConnectorTransferResults)
        ),
        "TransferResult's fields": lambda: (
            {"job_id", "success", "transfer_size", "transfer_time"} <= _fields(base.TransferResult)
        ),
        "GPULoadStoreSpec": fills_block_lists,
        "make_offload_key": lambda: base.make_offload_key(b"h" * 32, 7) == b"h" * 32 + b"\0\0\0\7",
        "LookupResult": lambda: {"HIT", "HIT_PENDING", "MISS", "RETRY"} == {one.name for one in base.LookupResult},
        "ReqContext": tells_positions,
    }


def _changes() -> list[str]:
    """What the connector needs of vLLM and does not find in this one."""
    try:
        checks = _checks()
    except ImportError as error:
        return [str(error)]
    changed = []
    for name, holds in checks.items():
        try:
            fits = holds()
        except Exception:  # whatever another release does in place of it
            fits = False
        if not fits:
            changed.append(name)
    return changed


def forget_session_blocks(scheduler: Any, request_ids: Iterable[str]) -> None:
    """Have 0.32's offloading scheduler forget the blocks of requests that are scheduled as new.

    A session's next part is scheduled as a new request that has all blocks of the session, and 0.32 puts them behind
    those that it knows.
    """
    for request_id in request_ids:
        if (status := scheduler._req_status.get(request_id)) is not None:
            for group in status.group_states:
                group.block_ids.clear()


def note_given_blocks(scheduler: Any, block_ids: Iterable[int]) -> None:
    """Have stores that read these blocks end before this step.

    0.32 notes blocks only where it loads them itself, or computes: below MultiConnector another connector may load into
    them, and a store of who had them before would take its bytes.
    """
    scheduler._current_batch_allocated_block_ids.update(block_ids)


def patch_v2_runner_fence(runner: object, fence: Callable[[Any], None]) -> bool:
    """Have ``fence``, a handle_preemptions(), called before vLLM's second model runner writes into blocks.

    The first runner calls it before anything else. The second one calls it just before the model's forward pass, when
    it has zeroed new blocks and copied others (those of mamba layers, and of caches of mixed precision), which stores
    may still have to read. It is called again later, as ever. False where this is no such runner.
    """
    write = getattr(runner, _WRITES_BLOCKS, None)
    if not callable(write):
        return False

    @wraps(write)
    def update_requests(scheduler_output: Any) -> None:
        for metadata in _offloading_metadata(scheduler_output.kv_connector_metadata):
            if metadata.jobs_to_flush:
                fence(metadata)
        write(scheduler_output)

    setattr(runner, _WRITES_BLOCKS, update_requests)
    return True


_WRITES_BLOCKS = "update_requests"
"""The method of the second runner that writes into blocks; the first one has none of that name."""


def _offloading_metadata(metadata: object) -> Iterator[Any]:
    """The connector's own metadata, below MultiConnector's too; no other of its children has any of this class."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata

    if isinstance(metadata, OffloadingConnectorMetadata):
        yield metadata
    for child in getattr(metadata, "metadata", ()):
        yield from _offloading_metadata(child)
