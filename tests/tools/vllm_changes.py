"""What changed between two releases of vLLM in the things that the connector uses. Only sources are read.

A changed signature, an attribute that is gone or a new abstract method is found by comparing syntax trees. A method
that does something else under an unchanged signature is only named, when its body changed: somebody must read it.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign
MARKS = ("abstractmethod", "classmethod", "staticmethod", "property", "cached_property")


@dataclass(frozen=True)
class Member:
    """A method or attribute of a class, or a function.

    Attributes:
        shape: what a caller sees: parameters with their defaults and kind, or the annotation of an attribute.
        body: what it does, docstrings left out; empty for attributes.
    """

    shape: str
    body: str = ""
    abstract: bool = False


class Tree:
    """The Python files of one release. ``root`` is the folder of the package ``vllm``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.module = cache(self._module)
        self.members = cache(self._members)

    def find(self, module: str, name: str) -> tuple[str, Definition] | None:
        """Return where a name of a module is defined, through re-exports, and the definition; None where it is not."""
        tree = self.module(module)
        for node in _top_level(tree) if tree else ():
            if isinstance(node, Definition) and name in _names(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                source = _source_of(node, module)
                for alias in node.names:
                    if (alias.asname or alias.name) == name and source != module and source.startswith("vllm"):
                        return self.find(source, alias.name)
        return None

    def _module(self, name: str) -> ast.Module | None:
        path = self._root.joinpath(*name.split(".")[1:])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text())
        return None

    def _members(self, module: str, name: str) -> Mapping[str, Member]:
        """Return the members of a class, those of its bases within vLLM too; a function is the member ``()``."""
        found = self.find(module, name)
        if found is None:
            return {}
        module, node = found
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return {"()": _function(node)}
        if not isinstance(node, ast.ClassDef):
            return {}
        members: dict[str, Member] = {}
        for base in reversed(node.bases):
            if isinstance(base, ast.Name) and base.id != name:
                members.update(self.members(module, base.id))
        members.update(own_members(node))
        return members


def own_members(node: ast.ClassDef) -> dict[str, Member]:
    """Return what a class itself defines: methods, fields, and attributes that its methods set."""
    members: dict[str, Member] = {}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign | ast.AnnAssign):
            for target in inner.targets if isinstance(inner, ast.Assign) else [inner.target]:
                for place in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(place, ast.Attribute) and ast.unparse(place.value) == "self":
                        members.setdefault(place.attr, Member(_annotation(inner)))
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            members[inner.name] = _function(inner)
        elif isinstance(inner, ast.Assign | ast.AnnAssign):
            members.update((name, Member(_annotation(inner))) for name in _names(inner))
    return members


@dataclass
class Uses:
    """What the connector's sources use of vLLM.

    Attributes:
        imported: module and name of all that is imported from vLLM.
        extended: those of them that are extended, by which of our classes, each with its own members.
        attributes: every name that is read or set behind a dot.
    """

    imported: set[tuple[str, str]] = field(default_factory=set)
    extended: dict[tuple[str, str], dict[str, set[str]]] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, sources: Iterable[Path]) -> Uses:
        uses = cls()
        for path in sources:
            nodes = list(ast.walk(ast.parse(path.read_text())))
            names: dict[str, tuple[str, str]] = {}
            for node in nodes:
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                    names.update((alias.asname or alias.name, (str(node.module), alias.name)) for alias in node.names)
                elif isinstance(node, ast.Attribute):
                    uses.attributes.add(node.attr)
            uses.imported.update(names.values())
            for node in nodes:
                if isinstance(node, ast.ClassDef):
                    for base in node.bases:
                        if isinstance(base, ast.Name) and base.id in names:
                            uses.extended.setdefault(names[base.id], {})[node.name] = set(own_members(node))
        return uses


def changes(base: Tree, new: Tree, uses: Uses) -> list[str]:
    """Return the lines of a report: what is extended, what is called, and attributes that are used and gone.

    A line begins with ``!`` where the connector cannot work or may clash, ``~`` where something changed, ``-`` where it
    is gone, ``+`` where it is new.
    """
    lines: list[str] = []
    for title, extended in (("Extended", True), ("Called", False)):
        for thing in sorted(uses.imported):
            if (thing in uses.extended) == extended:
                ours = uses.extended.get(thing, {})
                by = f", by {', '.join(sorted(ours))}" if ours else ""
                lines += _section(
                    f"{title}: {'.'.join(thing)}{by}", _changes_of(base, new, thing, ours, uses.attributes)
                )
    before, after = _owners(base, uses), _owners(new, uses)
    lines += _section("Private attributes that are used", _private(before, after, uses))
    gone = (
        f"- {owner}.{name}"
        for name in sorted(uses.attributes)
        if not name.startswith("_")
        for owner in sorted(before.get(name, {}).keys() - after.get(name, {}).keys())
    )
    lines += _section("Gone, while attributes of these names are used", gone)
    return lines


def _section(title: str, found: Iterable[str]) -> list[str]:
    inner = [f"  {line}" for line in found]
    return [title, *inner] if inner else []


def _changes_of(
    base: Tree, new: Tree, thing: tuple[str, str], ours: Mapping[str, set[str]], attributes: set[str]
) -> Iterator[str]:
    if base.find(*thing) is None:
        return  # the release before has it not either, or makes it when it runs
    if new.find(*thing) is None:
        yield "! it is gone, or was moved"
        return
    before, after = base.members(*thing), new.members(*thing)
    overriding = {member: owner for owner, members in ours.items() for member in members}
    rewritten = []
    for member in sorted(before.keys() | after.keys()):
        old, now = before.get(member), after.get(member)
        used = member in attributes or member in overriding or member in ("__init__", "()")
        note = f" ({overriding[member]} has it)" if member in overriding else ""
        label = "" if member == "()" else member
        if now is not None and now.abstract and not (old and old.abstract) and ours and member not in overriding:
            yield f"! {label}{now.shape} is abstract now"
        elif old is None and now is not None:
            if note and not now.body:
                yield f"! {label} is an attribute of vLLM's own now{note}"
            elif used or not member.startswith("_"):
                yield f"+ {label}{now.shape if now.body else ''}{note}"
        elif old is not None and now is None:
            if used or not member.startswith("_"):
                yield f"- {label}{old.shape if old.body else ''}{note}"
        elif old is not None and now is not None:
            if old.shape != now.shape and (used or not member.startswith("_")):
                yield f"~ {label}{_joined(old)} is now {label}{_joined(now)}{note}"
            if used and old.body != now.body:
                rewritten.append(label or "it")
    if rewritten:
        yield f"~ does something else, or does it otherwise: {', '.join(rewritten)}"


def _joined(member: Member) -> str:
    return member.shape if member.body else f": {member.shape}" if member.shape else ""


def _private(
    before: Mapping[str, Mapping[str, Member]], after: Mapping[str, Mapping[str, Member]], uses: Uses
) -> Iterator[str]:
    for name in sorted(uses.attributes):
        if not name.startswith("_") or name.startswith("__"):
            continue
        for owner, old in sorted(before.get(name, {}).items()):
            now = after.get(name, {}).get(owner)
            if now is None:
                yield f"! {owner}.{name} is gone"
            elif now.shape != old.shape:
                yield f"~ {owner}.{name}{_joined(old)} is now {owner}.{name}{_joined(now)}"
            else:
                yield f"  {owner}.{name} is as it was"


def _owners(tree: Tree, uses: Uses) -> dict[str, dict[str, Member]]:
    """Return the classes that define an attribute, by its name, in the modules of what is imported.

    Modules that those import from count too: the objects that vLLM hands to the connector come from there.
    """
    near = set(uses.imported)
    for module in sorted({module for module, _ in uses.imported}):
        parsed = tree.module(module)
        for node in ast.walk(parsed) if parsed else ():
            if isinstance(node, ast.ImportFrom) and (source := _source_of(node, module)).startswith("vllm."):
                near.update((source, alias.name) for alias in node.names)
    modules = {found[0] for module, name in near if (found := tree.find(module, name))}
    owners: dict[str, dict[str, Member]] = {}
    for module in modules:
        parsed = tree.module(module)
        for node in parsed.body if parsed else ():
            if isinstance(node, ast.ClassDef):
                for name, member in own_members(node).items():
                    owners.setdefault(name, {})[node.name] = member
    return owners


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Member:
    kinds = [name for item in node.decorator_list if (name := ast.unparse(item).split(".")[-1]) in MARKS]
    kinds += ["async"] if isinstance(node, ast.AsyncFunctionDef) else []
    arguments = copy.deepcopy(node.args)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    shape = f"({ast.unparse(arguments)})" + (f" [{', '.join(kinds)}]" if kinds else "")
    body = "\n".join(ast.unparse(line) for line in node.body if not _is_docstring(line))
    return Member(shape, body or "pass", "abstractmethod" in kinds)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _annotation(node: ast.Assign | ast.AnnAssign) -> str:
    return ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Go through a module's statements, those under ``if`` and ``try`` too."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, ast.If | ast.Try):
            waiting += [*node.body, *node.orelse]


def _names(node: Definition) -> list[str]:
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    return [node.name]


def _source_of(node: ast.ImportFrom, module: str) -> str:
    """Return the absolute name of the module that is imported from; a relative one is taken from a plain module."""
    if not node.level:
        return node.module or ""
    return ".".join([*module.split(".")[: -node.level], *([node.module] if node.module else [])])
