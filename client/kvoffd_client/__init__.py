"""Clients of the kvoffd daemon. The names in this module are public; everything else is internal.

>>> from kvoffd_client import SchedulerClient, WorkerClient, AdminClient

Each name is imported on first use, so that importing the package is cheap: the command line and vLLM import it at every
start. ``kvoffd_client.testing`` has an engine without a model, for tests.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # "as" tells type checkers that the name is public here
    from kvoffd_client.admin_client import AdminClient as AdminClient
    from kvoffd_client.blocks import BlockClient as BlockClient
    from kvoffd_client.errors import DaemonUnavailable as DaemonUnavailable
    from kvoffd_client.errors import ForkedProcess as ForkedProcess
    from kvoffd_client.errors import KvoffdClientError as KvoffdClientError
    from kvoffd_client.errors import RequestRefused as RequestRefused
    from kvoffd_client.errors import RequestTimeout as RequestTimeout
    from kvoffd_client.memory import Registration as Registration
    from kvoffd_client.memory import SharedMemory as SharedMemory
    from kvoffd_client.namespace import NamespaceSpec as NamespaceSpec
    from kvoffd_client.scheduler_client import LookupFuture as LookupFuture
    from kvoffd_client.scheduler_client import SchedulerClient as SchedulerClient
    from kvoffd_client.session import ClientOptions as ClientOptions
    from kvoffd_client.worker_client import Job as Job
    from kvoffd_client.worker_client import WorkerClient as WorkerClient
    from kvoffd_proto.errors import ErrorCode as ErrorCode
    from kvoffd_proto.messages import GroupKeys as GroupKeys
    from kvoffd_proto.messages import GroupSpec as GroupSpec
    from kvoffd_proto.messages import GroupTransfer as GroupTransfer
    from kvoffd_proto.messages import HintAction as HintAction
    from kvoffd_proto.messages import JobResult as JobResult
    from kvoffd_proto.messages import KeyState as KeyState
    from kvoffd_proto.messages import PageRef as PageRef
    from kvoffd_proto.messages import TensorLayout as TensorLayout

    __version__: str

_HOMES = {
    "kvoffd_client.admin_client": "AdminClient",
    "kvoffd_client.blocks": "BlockClient",
    "kvoffd_client.session": "ClientOptions",
    "kvoffd_client.errors": "DaemonUnavailable ForkedProcess KvoffdClientError RequestRefused RequestTimeout",
    "kvoffd_client.namespace": "NamespaceSpec",
    "kvoffd_client.scheduler_client": "LookupFuture SchedulerClient",
    "kvoffd_client.memory": "Registration SharedMemory",
    "kvoffd_client.worker_client": "Job WorkerClient",
    "kvoffd_proto.errors": "ErrorCode",
    "kvoffd_proto.messages": "GroupKeys GroupSpec GroupTransfer HintAction JobResult KeyState PageRef TensorLayout",
}
"""Public names by the module that defines them."""

__all__ = sorted(["__version__", *" ".join(_HOMES.values()).split()])


def __getattr__(name: str) -> object:
    if name == "__version__":
        found: object = import_module("importlib.metadata").version("kvoffd")
    else:
        home = next((module for module, names in _HOMES.items() if name in names.split()), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(home), name)
    globals()[name] = found  # for the next use
    return found


def __dir__() -> list[str]:
    return __all__
