"""Messages of any type, within the bounds of their fields, as hypothesis makes them up."""

from __future__ import annotations

import functools
import types
import typing
from enum import Enum

from hypothesis import strategies as st
from msgspec import Meta, Struct

from kvoffd_proto.messages import fields_of


def bound(metas: list[Meta], name: str, otherwise: int) -> int:
    return next((getattr(meta, name) for meta in metas if getattr(meta, name) is not None), otherwise)


def values(hint: object, metas: list[Meta]) -> st.SearchStrategy[object]:
    """Values of ``hint`` that keep its bounds; long ones are cut, since a test of them says nothing more."""
    if typing.get_origin(hint) is typing.Annotated:
        own = [meta for meta in hint.__metadata__ if isinstance(meta, Meta)]  # type: ignore[attr-defined]
        return values(typing.get_args(hint)[0], metas + own)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    low, high = bound(metas, "min_length", 0), min(bound(metas, "max_length", 3), 64)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([values(argument, metas) for argument in arguments])
    if origin is list:
        return st.lists(values(arguments[0], []), min_size=low, max_size=max(min(high, 3), low))
    if origin is dict:
        return st.dictionaries(values(arguments[0], []), values(arguments[1], []), max_size=2)
    assert isinstance(hint, type)
    if hint is type(None):
        return st.none()
    if hint is bool:
        return st.booleans()
    if issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    if issubclass(hint, Struct):
        return instances(hint)
    if hint is int:
        highest = min(bound(metas, "le", 2**63 - 1), bound(metas, "lt", 2**63) - 1)
        return st.integers(bound(metas, "ge", 0), highest)
    if hint is float:
        return st.floats(0, bound(metas, "le", 10**12), allow_nan=False)
    if hint is str:
        return st.text(min_size=low, max_size=high)
    assert hint is bytes, hint
    return st.binary(min_size=low, max_size=high)


@functools.cache
def instances(struct: type[Struct]) -> st.SearchStrategy[Struct]:
    return st.builds(struct, *(values(hint, []) for _, hint, _ in fields_of(struct)))
