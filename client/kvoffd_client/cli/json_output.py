"""Wire structs as objects with named fields, for ``--json``."""

from __future__ import annotations

import json
import sys
from typing import cast

from msgspec import Struct

from kvoffd_client.cli.console import print_line
from kvoffd_client.namespace import fields_of_description

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
        fields = {name: to_plain(getattr(value, name)) for name in value.__struct_fields__ if name not in _INTERNAL}
        return fields | ({"description": described(text)} if isinstance(text := fields.get("description"), str) else {})
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form.")


def described(description: str) -> Plain:
    """A namespace's description as an object; as it is where it is none."""
    fields = fields_of_description(description)
    return description if fields is None else cast(Plain, fields)


def to_json(value: object) -> str:
    """Return ``value`` as one line of JSON. Raises TypeError for what has no JSON form."""
    encoding = sys.stdout.encoding or "utf-8"
    return json.dumps(to_plain(value), ensure_ascii=encoding.lower() != "utf-8")


def print_json(value: object) -> None:
    """Print ``value`` as one line of JSON and flush."""
    print_line(to_json(value))
