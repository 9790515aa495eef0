"""Prints the wire's reference page: ``python -m tests.tools.protocol_page > proto/PROTOCOL.md``.

The prose is in ``proto/PROTOCOL.template.md``, with ``$Name`` where the Struct of that name is described. Requests,
replies and parts of messages that have no place there are described at ``$requests`` and ``$parts``. Fields, ranges and
error sentences are put into it from the Structs themselves.
"""

from __future__ import annotations

import textwrap
import typing
from collections.abc import Iterable, Sequence
from enum import Enum, IntEnum
from pathlib import Path
from string import Template

import msgspec
from msgspec import Struct
from msgspec import inspect as of

from kvoffd.config import ServerLimits
from kvoffd_proto import admin, errors, events, lifeline, stats
from kvoffd_proto import messages as m
from kvoffd_proto.codec import encode
from kvoffd_proto.messages import fields_of
from kvoffd_proto.paths import SYSTEM_DIRECTORY, SocketPaths

TEMPLATE = Path(__file__).parents[2] / "proto" / "PROTOCOL.template.md"

MODULES = (m, admin, stats, lifeline, events, errors)
_KINDS = {kind for module in MODULES for kind in vars(module).values() if isinstance(kind, type)}
_STRUCTS = {kind.__name__: kind for kind in _KINDS if issubclass(kind, Struct)}
REQUESTS = {exchange.answer: request for request, exchange in m.EXCHANGES.items()}
"""By what answers them: a reply that answers nothing else needs no sentence of its own."""


def reference() -> str:
    """The page, as Markdown."""
    sockets, template = SocketPaths(SYSTEM_DIRECTORY), Template(TEMPLATE.read_text())
    described = _descriptions()
    placed = [_STRUCTS[name] for name in template.get_identifiers() if name in _STRUCTS]
    requests = dict.fromkeys(one for request, exchange in m.EXCHANGES.items() for one in (request, exchange.answer))
    known = [*placed, *(one for one in requests if one not in placed)]
    above = len(known)
    for one in known:  # which grows: a part may have parts
        for _, hint, _ in fields_of(one):
            known += [part for part in structs_in(hint) if part not in known]
    return template.substitute(
        described,
        requests="\n".join(described[one.__name__] for one in known[len(placed) : above]),
        parts="\n".join(described[one.__name__] for one in known[above:]),
        version=m.PROTOCOL_VERSION,
        directory=SYSTEM_DIRECTORY,
        sockets="\n".join(
            f"| `{getattr(sockets, name).name}` | {_docstring(getattr(SocketPaths, name))} |"
            for name in ("jobs", "events", "lifeline")
        ),
        length_bytes=lifeline.LENGTH_BYTES,
        max_frame_bytes=lifeline.MAX_FRAME_BYTES,
        job_deadline_s=f"{ServerLimits().job_deadline_s:g}",
        exchanges=_exchange_table(),
        examples=_examples(),
    )


def _descriptions() -> dict[str, str]:
    """The description of every type of the wire by its name. The template says which are described where."""
    structs = {name: _struct(kind) for name, kind in _STRUCTS.items()}
    return structs | {kind.__name__: _enum(kind) for kind in _KINDS if issubclass(kind, Enum)}


def structs_in(hint: object) -> list[type[Struct]]:
    """The types of messages in the type of a field."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return [hint]
    return list(dict.fromkeys(one for argument in typing.get_args(hint) for one in structs_in(argument)))


def _exchange_table() -> str:
    rows = []
    for request, exchange in m.EXCHANGES.items():
        roles = "any" if exchange.roles == m.ANY_ROLE else ", ".join(exchange.roles)
        where = ", in a completion" if exchange.answer is m.Completions else ""
        rows.append([_link(request), roles, _link(exchange.answer) + where])
    return _table(["request", "roles", "answer"], rows)


def _examples() -> str:
    greeting = lifeline.Greeting(m.PROTOCOL_VERSION, 2**40, 3, bytes(range(m.TOKEN_BYTES)))
    one, seven = ((number).to_bytes(m.BLOCK_ID_BYTES, "little") for number in (1, 7))
    stores = m.Stores([5], [m.GroupBlocks(0, one, one, b"", b"k" * 8, seven)])
    submit = m.Submit(2, b"r" * 16, stores, m.Loads([], [], [], []))
    examples = {
        "A Greeting on the lifeline, length first": lifeline.encode_frame(greeting),
        "Hello": encode(m.Hello(1, m.PROTOCOL_VERSION, m.Role.WORKER, "me", "my 1.0")),
        "Store of one key of 8 bytes, from engine block 7": encode(submit),
        "Its completion": encode(m.Completions(1, 2**30, [m.JobResult(5, True, 4096, 0.5)])),
        "Done": encode(m.Done(2, 1)),
    }
    rows = {title: textwrap.fill(frame.hex(" "), 95) for title, frame in examples.items()}
    return "\n\n".join(f"{title}:\n\n```\n{hexed}\n```" for title, hexed in rows.items())


def _struct(struct: type[Struct]) -> str:
    config, fields = struct.__struct_config__, fields_of(struct)
    if not config.array_like:
        shape = "a map of" if config.tag is None else f'a map with `"type": "{config.tag}"` and'
    else:
        shape = "an array without a tag:" if config.tag is None else f'an array: `"{config.tag}"`, then'
    lines = [f"#### {struct.__name__}", "", _docstring(struct), ""]
    if not fields:
        return "\n".join([*lines, f"Encoded as {shape} nothing else.", ""])
    first = 0 if config.tag is None else 1
    rows = [
        (
            str(number) if config.array_like else "",
            f"`{item.name}`",
            _type(of.type_info(hint)) + _default(item),
            _markdown(description),
        )
        for number, (item, hint, description) in enumerate(fields, first)
    ]
    return "\n".join([*lines, f"Encoded as {shape}", "", _table(["#", "field", "type", "meaning"], rows)])


def _enum(enum: type[Enum]) -> str:
    """A table of values, with their names where they are numbers, and what they mean where they say so."""
    rows = []
    for one in enum:
        meaning = _markdown(getattr(one, "sentence", "") or getattr(one, "meaning", ""))
        named = [str(one.value), f"`{one.name}`"] if issubclass(enum, IntEnum) else [f"`{one.value}`"]
        rows.append([*named, *([meaning] if meaning else [])])
    titles = {1: ["value"], 2: ["value", "meaning"], 3: ["value", "name", "meaning"]}[max(map(len, rows), default=1)]
    return "\n".join([f"#### {enum.__name__}", "", _docstring(enum), "", _table(titles, rows)])


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows), ""])


def _default(item: msgspec.structs.FieldInfo) -> str:
    if item.default_factory is not msgspec.NODEFAULT or isinstance(item.default, Struct):
        return "; default empty"
    if item.default is msgspec.NODEFAULT:
        return ""
    return f"; default {'nil' if item.default is None else item.default}"


def _docstring(documented: type) -> str:
    lines = (documented.__doc__ or f"Answer to {REQUESTS[documented].__name__}.").strip().splitlines()
    return _markdown(" ".join(line.strip() for line in lines).replace("  ", "\n\n"))


def _markdown(plain: str) -> str:
    return plain.replace("``", "`").replace("|", "\\|")


def _type(kind: of.Type) -> str:
    """A type in words, with its range."""
    match kind:
        case of.Metadata():
            return _type(kind.type)
        case of.UnionType():
            return " or ".join(map(_type, kind.types))
        case of.ListType():
            return f"array{_lengths(kind, 'elements')} of {_type(kind.item_type)}"
        case of.DictType():
            return f"map of {_type(kind.key_type)} to {_type(kind.value_type)}"
        case of.StructType():
            return _link(kind.cls)
        case of.EnumType():
            return f"{'int' if issubclass(kind.cls, IntEnum) else 'str'}, one of {_link(kind.cls)}"
        case of.IntType() | of.FloatType():
            return f"{'int' if isinstance(kind, of.IntType) else 'float'}{_range(kind)}"
        case of.BytesType():
            return f"bytes{_lengths(kind, 'bytes')}"
        case of.StrType():
            return f"str{_lengths(kind, 'characters')}"
    return {of.NoneType: "nil", of.BoolType: "bool"}[type(kind)]


def _link(documented: type) -> str:
    return f"[{documented.__name__}](#{documented.__name__.lower()})"


def _range(kind: of.IntType | of.FloatType) -> str:
    high = kind.le if kind.lt is None else kind.lt - 1
    if high is None:
        return "" if kind.ge is None else f" ≥ {_number(kind.ge)}"
    return f" {_number(kind.ge or 0)} … {_number(high)}"


def _lengths(kind: of.ListType | of.BytesType | of.StrType, unit: str) -> str:
    match kind.min_length, kind.max_length:
        case None, None:
            return ""
        case low, None:
            return f" (at least {low} {unit})"
        case ((None | 0), high):
            return f" (at most {high} {unit})"
        case low, high:
            return f" ({low} {unit})" if low == high else f" ({low} … {high} {unit})"


def _number(value: float) -> str:
    for power in (63, 31, 32):
        if value in (2**power - 1, 2**power):
            return f"2^{power} - 1" if value < 2**power else f"2^{power}"
    return str(value)


if __name__ == "__main__":
    print(reference(), end="")
