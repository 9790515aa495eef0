"""Finds tests that measure a speed: ``python -m tests.tools.wall_times [PATH...]``, a part of ``make lint``.

A test asserts on time by a promised deadline, or on what it counts; what is a speed is a benchmark in ``tests/bench``.
This finds assertions in the rest of ``tests/`` that compare

* a measured time with another: ``assert loaded_s <= 1.05 * computed_s``;
* a quotient of measured times with anything: ``assert max(slow_s / fast_s for ...) < 2``;
* a percentile, a median or a mean of measured times with anything.

A time is measured if it is a difference of two readings of a clock of ``time``, or if an engine has measured it
(``MEASURED``), and so is what is computed of one, collected of some, or returned by a function of the same file.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path

TESTS = Path(__file__).parents[1]
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS} | {"time", "time_ns"}
MEASURED = {"first_token_s", "ttft_ms"}
"""Attributes and keys of what an engine measures."""
STATISTICS = {"mean", "fmean", "median", "quantiles", "quantile", "percentile"}
ADVICE = "assert on a count or on a promised deadline, or make it a benchmark (tests/README.md)"


class Kind(IntEnum):
    """What an expression is made of, of which the last counts where several are joined."""

    OTHER = 0
    READING = 1
    TIME = 2
    RATIO = 3
    """A quotient of times, or a statistic of them."""


Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = Function | ast.ClassDef
PASSES = 4
"""A name may be made of another that gets its value further down: this many steps are followed."""


class Names:
    """What the names in a function are, or in a module, whatever the order in which they get their values."""

    def __init__(self, outer: Names | None = None) -> None:
        self._outer = outer
        self._kinds: dict[str, Kind] = {}

    def kind(self, name: str) -> Kind:
        return self._kinds.get(name) or (self._outer.kind(name) if self._outer else Kind.OTHER)

    def add(self, name: str, kind: Kind) -> None:
        self._kinds[name] = max(kind, self._kinds.get(name, Kind.OTHER))

    def add_attribute(self, name: str, kind: Kind) -> None:
        """Note an attribute for all of the module."""
        self._outer.add_attribute(name, kind) if self._outer else self.add(name, kind)

    def read(self, node: ast.AST) -> None:
        """Learn what a statement or an expression, without those in it, gives names."""
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, value)
            case (
                ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.AugAssign(target=target, value=value)
                | ast.NamedExpr(target=target, value=value)
                | ast.For(target=target, iter=value)
                | ast.comprehension(target=target, iter=value)
            ):
                self._bind(target, value)
            case ast.Call(func=ast.Attribute(value=target, attr="append" | "add" | "extend"), args=[value]):
                self._bind(target, value)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        match target:
            case ast.Name(id=name):
                self.add(name, self.of(value))
            case ast.Attribute(attr=name):
                self.add_attribute(name, self.of(value))
            case ast.Subscript(value=inner) | ast.Starred(value=inner):
                self._bind(inner, value)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                values = value.elts if isinstance(value, ast.Tuple) else []
                for part, one in zip(parts, values if len(values) == len(parts) else [value] * len(parts), strict=True):
                    self._bind(part, one)

    def of(self, node: ast.AST) -> Kind:
        """Return what an expression is."""
        match node:
            case ast.Name(id=name):
                return self.kind(name)
            case ast.Attribute(value=value, attr=name):
                return Kind.TIME if name in MEASURED else self.kind(name) or self.of(value)
            case ast.Subscript(value=value, slice=index):
                is_measured = isinstance(index, ast.Constant) and index.value in MEASURED
                return Kind.TIME if is_measured else self.of(value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr=name)) if name in CLOCKS:
                return Kind.READING
            case ast.Call(func=ast.Name(id="len" | "range" | "str")) | ast.Compare() | ast.Lambda() | ast.JoinedStr():
                return Kind.OTHER
            case ast.Call(func=function, args=arguments):
                kind = max(map(self.of, [function, *arguments]))
                name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                return Kind.RATIO if kind is Kind.TIME and name in STATISTICS else kind
            case ast.BinOp(left=left, right=right, op=operator):
                return _joined(self.of(left), operator, self.of(right))
            case ast.GeneratorExp(elt=one) | ast.ListComp(elt=one) | ast.SetComp(elt=one) | ast.DictComp(value=one):
                return self.of(one)
        return max(map(self.of, ast.iter_child_nodes(node)), default=Kind.OTHER)


def _joined(left: Kind, operator: ast.operator, right: Kind) -> Kind:
    match left, operator, right:
        case Kind.READING, ast.Sub(), Kind.READING:
            return Kind.TIME
        case Kind.TIME, ast.Div(), Kind.TIME:
            return Kind.RATIO
        case (Kind.READING, _, Kind.TIME) | (Kind.TIME, _, Kind.READING):
            return Kind.READING  # a deadline
    return max(left, right)


def _within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below one, those of functions and classes in it left out."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, Scope):
            yield from _within(child)


def _scopes(node: ast.AST, names: Names, outer: Names) -> Iterator[tuple[ast.AST, Names, Names]]:
    """Yield a module and all functions in it, with their names and those around them."""
    yield node, names, outer
    for child in _within(node):
        if isinstance(child, ast.ClassDef):
            yield from _scopes(child, names, outer)  # of a class only its methods have names of their own
        elif isinstance(child, Function):
            yield from _scopes(child, Names(names), names)


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each comparison of an assertion that measures, and its text."""
    module = ast.parse(source)
    scopes = list(_scopes(module, Names(), Names()))
    for _ in range(PASSES):
        for scope, names, outer in scopes:
            for node in _within(scope):
                names.read(node)
                if isinstance(node, ast.Return) and node.value and isinstance(scope, Function):
                    outer.add_attribute(scope.name, names.of(node.value))
    for scope, names, _ in scopes:
        for node in _within(scope):
            if isinstance(node, ast.Assert):
                for compared in ast.walk(node.test):
                    if isinstance(compared, ast.Compare):
                        kinds = [names.of(each) for each in (compared.left, *compared.comparators)]
                        if Kind.RATIO in kinds or kinds.count(Kind.TIME) > 1:
                            yield compared.lineno, ast.unparse(compared)


def files() -> Iterator[Path]:
    """Yield every file that is checked."""
    yield from (path for path in TESTS.rglob("*.py") if path.relative_to(TESTS).parts[0] not in ("bench", "tools"))


def main(arguments: Sequence[str]) -> int:
    """Print findings, with paths those of these alone; return 1 if there are any."""
    status = 0
    for path in sorted(map(Path, arguments)) or sorted(files()):
        for line, text in sorted(set(findings(path.read_text()))):
            shown = path.relative_to(TESTS.parent) if path.is_relative_to(TESTS.parent) else path
            print(f"{shown}:{line}: `{text}` measures: {ADVICE}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
