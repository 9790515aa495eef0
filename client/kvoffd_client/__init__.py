"""Clients of the kvoffd daemon. This module is the face of the library: what it names is public, the rest is inside.

>>> from kvoffd_client import SchedulerClient, WorkerClient, AdminClient

Each name is imported when it is first used, so that importing the package costs nothing: the command line and vLLM
import it at every start. ``kvoffd_client.testing`` has an engine without a model, for tests.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvoffd_client.admin_client import AdminClient, RemoteAdminClient
    from kvoffd_client.blocks.block import Block, Layer, Shard, checksum_of
    from kvoffd_client.blocks.block_client import BlockClient
    from kvoffd_client.blocks.block_file import BlockFile, BlockFileError
    from kvoffd_client.blocks.block_transfer import Exported, Imported, export_blocks, import_blocks
    from kvoffd_client.client_options import ClientOptions
    from kvoffd_client.errors import (
        BlockDamaged,
        BlockUnavailable,
        DaemonUnavailable,
        ForkedProcess,
        KvoffdClientError,
        RequestRefused,
        RequestTimeout,
    )
    from kvoffd_client.namespace_spec import Geometry, NamespaceSpec
    from kvoffd_client.scheduler_client import SchedulerClient
    from kvoffd_client.scheduler_session import LookupFuture
    from kvoffd_client.shared_memory import Registration, SharedMemory
    from kvoffd_client.worker_client import WorkerClient
    from kvoffd_proto.errors import ErrorCode
    from kvoffd_proto.handles import PageRef, TensorLayout
    from kvoffd_proto.messages import GroupKeys, GroupSpec, GroupTransfer, JobResult

    __version__: str

__all__ = [
    "AdminClient",
    "Block",
    "BlockClient",
    "BlockDamaged",
    "BlockFile",
    "BlockFileError",
    "BlockUnavailable",
    "ClientOptions",
    "DaemonUnavailable",
    "ErrorCode",
    "Exported",
    "ForkedProcess",
    "Geometry",
    "GroupKeys",
    "GroupSpec",
    "GroupTransfer",
    "Imported",
    "JobResult",
    "KvoffdClientError",
    "Layer",
    "LookupFuture",
    "NamespaceSpec",
    "PageRef",
    "Registration",
    "RemoteAdminClient",
    "RequestRefused",
    "RequestTimeout",
    "SchedulerClient",
    "Shard",
    "SharedMemory",
    "TensorLayout",
    "WorkerClient",
    "__version__",
    "checksum_of",
    "export_blocks",
    "import_blocks",
]

_HOMES = {
    "kvoffd_client.admin_client": ("AdminClient", "RemoteAdminClient"),
    "kvoffd_client.blocks.block": ("Block", "Layer", "Shard", "checksum_of"),
    "kvoffd_client.blocks.block_client": ("BlockClient",),
    "kvoffd_client.blocks.block_file": ("BlockFile", "BlockFileError"),
    "kvoffd_client.blocks.block_transfer": ("Exported", "Imported", "export_blocks", "import_blocks"),
    "kvoffd_client.client_options": ("ClientOptions",),
    "kvoffd_client.errors": (
        "BlockDamaged",
        "BlockUnavailable",
        "DaemonUnavailable",
        "ForkedProcess",
        "KvoffdClientError",
        "RequestRefused",
        "RequestTimeout",
    ),
    "kvoffd_client.namespace_spec": ("Geometry", "NamespaceSpec"),
    "kvoffd_client.scheduler_client": ("SchedulerClient",),
    "kvoffd_client.scheduler_session": ("LookupFuture",),
    "kvoffd_client.shared_memory": ("Registration", "SharedMemory"),
    "kvoffd_client.worker_client": ("WorkerClient",),
    "kvoffd_proto.errors": ("ErrorCode",),
    "kvoffd_proto.handles": ("PageRef", "TensorLayout"),
    "kvoffd_proto.messages": ("GroupKeys", "GroupSpec", "GroupTransfer", "JobResult"),
}
"""Where each name is defined."""


def __getattr__(name: str) -> object:
    if name == "__version__":
        found: object = import_module("importlib.metadata").version("kvoffd")
    else:
        home = next((module for module, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(home), name)
    globals()[name] = found  # the next use finds it without this function
    return found


def __dir__() -> list[str]:
    return __all__
