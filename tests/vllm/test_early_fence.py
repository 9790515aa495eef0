"""Stores are waited for before vLLM's second model runner writes into their blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata

from kvoffd_client.vllm.early_fence import fence_early


class SecondRunner:
    """As far as its order goes."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def update_requests(self, scheduler_output: Any) -> None:
        self.order.append("blocks are zeroed")

    def fence(self, metadata: OffloadingConnectorMetadata) -> None:
        self.order.append(f"waits for {metadata.jobs_to_flush}")


@pytest.mark.parametrize("below_multi_connector", [False, True])
def test_stores_are_waited_for_before_blocks_are_zeroed(below_multi_connector: bool) -> None:
    runner = SecondRunner()
    fence_early(runner, runner.fence)
    for jobs in ({7}, set[int]()):
        metadata: Any = OffloadingConnectorMetadata({}, {}, jobs)
        if below_multi_connector:
            metadata = MultiKVConnectorMetadata(metadata=(SimpleNamespace(), metadata))
        runner.update_requests(SimpleNamespace(kv_connector_metadata=metadata))
    assert runner.order == ["waits for {7}", "blocks are zeroed", "blocks are zeroed"]


def test_a_runner_without_such_a_method_stays_as_it_is() -> None:
    fence_early(None, print)
    runner = SimpleNamespace(get_model=None)
    fence_early(runner, print)
    assert vars(runner) == {"get_model": None}
