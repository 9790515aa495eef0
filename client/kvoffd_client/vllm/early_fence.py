"""The fence before blocks are written over, put where vLLM's second model runner needs it.

The first runner calls a connector's handle_preemptions() before anything else. The second one calls it just before the
model's forward pass, when it has zeroed new blocks and copied others (those of mamba layers, and of caches of mixed
precision), which stores may still have to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata

if TYPE_CHECKING:
    from kvoffd_client.vllm.vllm_types import SchedulerOutput

WRITES_BLOCKS = "update_requests"
"""The method of the second runner (0.32) that writes into blocks; the first one has none of that name."""


def fence_early(runner: object, fence: Callable[[Any], None]) -> None:
    """Have ``fence``, a handle_preemptions(), called before ``runner`` writes; it is called again later, as ever."""
    write = getattr(runner, WRITES_BLOCKS, None)
    if not callable(write):
        return

    @wraps(write)
    def update_requests(scheduler_output: SchedulerOutput) -> None:
        for metadata in _of_offloading(scheduler_output.kv_connector_metadata):
            if metadata.jobs_to_flush:
                fence(metadata)
        write(scheduler_output)

    setattr(runner, WRITES_BLOCKS, update_requests)


def _of_offloading(metadata: object) -> Iterator[OffloadingConnectorMetadata]:
    """The connector's own metadata, below MultiConnector's too; no other of its children has any of this class."""
    if isinstance(metadata, OffloadingConnectorMetadata):
        yield metadata
    for child in getattr(metadata, "metadata", ()):
        yield from _of_offloading(child)
