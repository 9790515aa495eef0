"""Which vLLM the connector starts with: each thing it needs is looked for, and a release that nobody tried is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.config import ParallelConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_offload import base
from vllm.v1.request import Request

from kvoffd_client.vllm import compat
from kvoffd_client.vllm.connector import KvoffdConnector
from tests.kit.cases import case
from tests.vllm.vllm_config import cache_config, make_config
from tests.vllm.vllm_reads import reads_of

OF_ONE_KIND = "attention_chunk_size", "kv_cache_specs", "mamba_cache_mode"
"""What is read of those kinds of KVCacheSpec alone that have it."""


def test_what_the_connector_reads_of_vllms_objects_is_in_the_list() -> None:
    listed = {place.partition(":")[2]: {*names.split()} for place, names in compat.USED.items()}
    read = reads_of(Path(compat.__file__).parent, compat.__package__ or "")
    assert len(read) > 150
    unlisted = {f"{cls.__name__}.{name}" for cls, name in read if name not in listed.get(cls.__name__, ())}
    known = {f"KVCacheSpec.{name}" for name in OF_ONE_KIND}
    assert {one for one in unlisted - known if not one.endswith("__init__")} == set()


def test_what_is_gone_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(BlockPool, "get_usage")
    monkeypatch.delattr(Request, "num_tokens")
    monkeypatch.delattr(ParallelConfig, "nnodes_within_dp")
    monkeypatch.delattr(base, "GPULoadStoreSpec")
    gone = (
        r"ParallelConfig\.nnodes_within_dp; BlockPool\.get_usage; GPULoadStoreSpec\.block_ids; "
        r"GPULoadStoreSpec\.block_indices; GPULoadStoreSpec\.group_sizes; Request\.num_tokens"
    )
    with pytest.raises(ImportError, match=rf"which has changed: {gone}\. This .*install one of those"):
        compat.require_vllm()

    class Half(base.OffloadingWorker):
        """Lacks all methods that vLLM asks for."""

    with pytest.raises(ImportError, match=r"has changed: OffloadingWorker's methods\. This"):
        compat.require_methods(KvoffdConnector, Half)


@pytest.mark.parametrize("place", compat.SIGNATURES)
def test_other_parameters_are_refused_by_the_functions_name(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place.replace(":", "."), lambda self, another: None)
    with pytest.raises(ImportError, match=rf"which has changed: .*{place.partition(':')[2]}'s parameters\. This"):
        compat.require_vllm()


def test_keys_of_another_form_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "make_offload_key", lambda block_hash, group_idx: bytes([group_idx]) + block_hash)
    with pytest.raises(ImportError, match=r"which has changed: make_offload_key\. This"):
        compat.require_vllm()


def test_an_old_vllm_is_refused_and_a_tested_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    why = r"needs vLLM 0\.32 or newer, but this is vLLM .*tested with vLLM 0\.32 and"
    for version in ("0.31.9", "0.1.dev1+g0123456"):
        monkeypatch.setattr(vllm, "__version__", version)
        with case(version), pytest.raises(ImportError, match=why):
            compat.require_vllm()
    monkeypatch.setattr(vllm, "__version__", "dev")
    with pytest.raises(ImportError, match="vLLM does not know its version"):
        compat.require_vllm()
    for version in ("0.32.0", "0.32.1+cpu", "0.33.2", "0.33.0+cu130"):
        monkeypatch.setattr(vllm, "__version__", version)
        with case(version):
            compat.require_vllm()
            compat.check_version(strict=True)
            assert not compat.untested()
            assert compat.version_factor() in ("0.32", "0.33")


@pytest.mark.parametrize(
    "version",
    ["0.33.1.dev900+g0123456", "0.33.0rc2", "0.33.0.post1", "0.33.0+acme.1", "0.33.0+g0123456.cu130", "0.34.0"],
)
def test_what_is_no_tested_release_shares_with_its_like_alone(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build between two releases, or of somebody's own, may compute and lay out pages as neither does."""
    monkeypatch.setattr(vllm, "__version__", version)
    compat.require_vllm()
    assert f"this is vLLM {version}. Its interfaces" in compat.untested()
    assert compat.version_factor() == version
    with pytest.raises(ValueError, match="strict_version"):
        compat.check_version(strict=True)


def test_an_untested_release_starts_with_one_warning_or_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    config = make_config(model, {"directory": "/nowhere"})

    def start(*, strict: bool, role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> None:
        config.kv_transfer_config.kv_connector_extra_config["strict_version"] = strict
        KvoffdConnector(config, role, cache_config()).shutdown()

    start(strict=True)
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    compat.require_vllm()
    start(strict=False)
    start(strict=False, role=KVConnectorRole.WORKER)
    [line] = [line for line in said if "0.99.0" in line]
    assert "tested with the releases 0.32 and 0.33 of vLLM" in line
    with pytest.raises(ValueError, match=r"because strict_version is set\. .* this is vLLM 0\.99\.0"):
        start(strict=True)
    with pytest.raises(ValueError, match="strict_version"):  # before vLLM loads the model
        KvoffdConnector.requires_piecewise_for_cudagraph({"strict_version": True})


class SecondRunner:
    """As far as its order goes."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def update_requests(self, scheduler_output: Any) -> str:
        self.order.append("blocks are zeroed")
        return "what it returns"

    def fence(self, metadata: OffloadingConnectorMetadata) -> None:
        self.order.append(f"waits for {metadata.jobs_to_flush}")


@pytest.mark.parametrize("below_multi_connector", [False, True])
def test_stores_are_waited_for_before_blocks_are_zeroed(below_multi_connector: bool) -> None:
    runner = SecondRunner()
    assert compat.patch_v2_runner_fence(runner, runner.fence)
    for jobs in ({7}, set[int]()):
        metadata: Any = OffloadingConnectorMetadata({}, {}, jobs)
        if below_multi_connector:
            metadata = MultiKVConnectorMetadata(metadata=(SimpleNamespace(), metadata))
        assert runner.update_requests(SimpleNamespace(kv_connector_metadata=metadata)) == "what it returns"
    assert runner.order == ["waits for {7}", "blocks are zeroed", "blocks are zeroed"]
