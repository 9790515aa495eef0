"""Wire structs as objects with named fields, for ``--json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import UnionType
from typing import get_type_hints

import msgspec
from msgspec import Meta, Struct

from kvoffd_client.cli.console import print_line

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
"""A value that JSON has a form for."""

_INTERNAL = frozenset({"request_id"})


def to_plain(value: object) -> Plain:
    """Turn a struct, and the structs in it, into objects by field name; bytes become hex. Raises TypeError."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Struct):
        return {name: to_plain(getattr(value, name)) for name in value.__struct_fields__ if name not in _INTERNAL}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form.")


def to_json(value: object) -> str:
    """Return ``value`` as one line of JSON. Raises TypeError for what has no JSON form."""
    return json.dumps(to_plain(value), ensure_ascii=False)


def print_json(value: object) -> None:
    """Print ``value`` as one line of JSON and flush."""
    print_line(to_json(value))


def describe(struct: type[Struct], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, description) of every field, nested ones as ``pool.free_bytes`` or ``namespaces[].label``."""
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        if field.name in _INTERNAL:
            continue
        hint = hints[field.name]
        yield f"{prefix}{field.name}", _description(hint)
        inner, is_list = _struct_in(hint)
        if inner is not None:
            yield from describe(inner, f"{prefix}{field.name}{'[]' if is_list else ''}.")


def _description(hint: object) -> str:
    found = [
        meta.description for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Meta) and meta.description
    ]
    return found[-1] if found else ""


def _struct_in(hint: object) -> tuple[type[Struct] | None, bool]:
    """Return the struct in ``hint`` (a struct, an optional one, or a list of them), and whether it is a list."""
    bare = getattr(hint, "__origin__", hint) if hasattr(hint, "__metadata__") else hint
    if isinstance(bare, type) and issubclass(bare, Struct):
        return bare, False
    if getattr(bare, "__origin__", None) is list:
        return _struct_in(bare.__args__[0])[0], True  # type: ignore[attr-defined]
    if isinstance(bare, UnionType):
        return next((found for one in bare.__args__ if (found := _struct_in(one))[0] is not None), (None, False))
    return None, False
