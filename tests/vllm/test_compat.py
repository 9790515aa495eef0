"""Which vLLM the connector starts with: each thing it needs is looked for, and a release that nobody tried is named."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from inspect import get_annotations
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin

import pytest
import vllm
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvoffd_client.vllm import compat
from kvoffd_client.vllm.connector import KvoffdConnector
from tests.kit.cases import case
from tests.vllm.vllm_config import cache_config, make_config

CONVENTIONS = {
    "connector_output": KVConnectorOutput,
    "offloading": OffloadingConfig,
    "request": Request,
    "scheduler_output": SchedulerOutput,
    "self._kv_cache_config": KVCacheConfig,
    "self._pool": BlockPool,
    "self._vllm_config": VllmConfig,
    "self.config": OffloadingConfig,
    "state.request": Request,
}
"""Objects that no annotation tells."""

Names = dict[str, Any]
"""Types, functions and modules by the text that names them."""


def reads_of(directory: Path, package: str) -> set[tuple[type, str]]:
    """The attributes that a package's functions read, by the class of vLLM's that has them, where that can be told."""
    found: set[tuple[type, str]] = set()
    for path in sorted(directory.glob("*.py")):
        tree = ast.parse(path.read_text())
        module = import_module(package if path.stem == "__init__" else f"{package}.{path.stem}")
        names: Names = {**vars(module), **CONVENTIONS}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:  # those for types alone are not in the module
                for one in node.names:
                    with suppress(AttributeError):
                        names[one.asname or one.name] = getattr(import_module(node.module), one.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                own = getattr(module, node.name, None)
                base = own.__mro__[1] if isinstance(own, type) else None
                for function in node.body:
                    if isinstance(function, ast.FunctionDef):
                        found |= _Function(function, names | {"self": own, "cls": own, "super()": base}).read
            elif isinstance(node, ast.FunctionDef):
                found |= _Function(node, names).read
    return found


class _Function:
    """What one function reads."""

    def __init__(self, function: ast.FunctionDef, names: Names) -> None:
        self.read: set[tuple[type, str]] = set()
        self._names = dict(names)
        for argument in (*function.args.args, *function.args.kwonlyargs):
            annotation = _evaluated(ast.unparse(argument.annotation), names) if argument.annotation else Any
            if annotation is not Any:
                self._names[argument.arg] = annotation
        for node in ast.walk(function):
            if isinstance(node, ast.Assign | ast.NamedExpr) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._assign(target, node.value)
            elif isinstance(node, ast.For | ast.comprehension):
                self._bind(node.target, _element(self._type(node.iter)))
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute):
                self._type(node)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, of in zip(target.elts, value.elts, strict=True):
                self._assign(one, of)
        else:
            self._bind(target, self._type(value))

    def _bind(self, target: ast.expr, annotation: Any) -> None:
        if isinstance(target, ast.Name) and target.id not in CONVENTIONS:
            self._names[target.id] = annotation

    def _type(self, node: ast.expr) -> Any:
        """The annotation of an expression; None where it is not known."""
        text = ast.unparse(node)
        if text in self._names:
            return self._names[text]
        if isinstance(node, ast.Attribute):
            return self._attribute(_class_of(self._type(node.value)), node.attr)
        if isinstance(node, ast.Subscript):
            return _element(self._type(node.value))
        return None

    def _attribute(self, cls: type | None, name: str) -> Any:
        if cls is None:
            return None
        owner = next((one for one in cls.__mro__ if name in _own_names(one)), cls)
        if owner.__module__.startswith("vllm."):
            self.read.add((cls if cls.__module__.startswith("vllm.") else owner, name))
        return _evaluated(get_annotations(owner).get(name), vars(sys.modules[owner.__module__]))


def _own_names(cls: type) -> set[str]:
    made = getattr(vars(cls).get("__init__"), "__code__", None)
    return {*vars(cls), *get_annotations(cls), *getattr(made, "co_names", ())}


def _evaluated(annotation: Any, names: Mapping[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, dict(names))
    except Exception:  # of a name that is imported for types alone
        return None


def _class_of(annotation: Any) -> type | None:
    """The class of an object; of one that may be None too, the other one."""
    if get_origin(annotation) in (Union, UnionType):
        return next((_class_of(one) for one in get_args(annotation) if one is not type(None)), None)
    return annotation if isinstance(annotation, type) and get_origin(annotation) is None else None


def _element(annotation: Any) -> Any:
    """What is in a sequence; in a mapping, its values."""
    if get_origin(annotation) in (Union, UnionType):
        return _element(next((one for one in get_args(annotation) if one is not type(None)), None))
    inside = [one for one in get_args(annotation) if one is not Ellipsis]
    return inside[-1] if inside else None


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


@pytest.mark.parametrize("place", ["TransferResult", "ReqContext"])
def test_what_cannot_be_made_as_the_connector_does_is_refused(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(self: Any, *arguments: Any, new: int, **named: Any) -> None: ...

    monkeypatch.setattr(getattr(base, place), "__init__", made)
    with pytest.raises(ImportError, match=rf"which has changed: {place}\. This"):
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
