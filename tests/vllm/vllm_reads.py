"""What the connector's code reads of vLLM's objects: its syntax trees, and vLLM's own annotations."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from inspect import get_annotations
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

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
