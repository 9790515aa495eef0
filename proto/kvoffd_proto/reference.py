"""Prints the wire's reference page: ``python -m kvoffd_proto.reference > proto/PROTOCOL.md``.

The prose is in ``PROTOCOL.template.md`` beside this module, with ``$Name`` where the Struct of that name is described.
Messages, fields, ranges and error sentences are put into it from the Structs themselves.
"""

from __future__ import annotations

import textwrap
import types
import typing
from enum import Enum, IntEnum
from pathlib import Path
from string import Template

import msgspec
from msgspec import Meta, Struct

from kvoffd_proto import admin as a
from kvoffd_proto import events, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto import stats as s
from kvoffd_proto.codec import encode
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import fields_of, metas_of
from kvoffd_proto.paths import SYSTEM_DIRECTORY, SocketPaths

TEMPLATE = Path(__file__).with_name("PROTOCOL.template.md")

MODULES = (m, a, s, lifeline, events)
REQUESTS = {exchange.answer: request for request, exchange in m.EXCHANGES.items()}
"""By what answers them: a reply that answers nothing else needs no sentence of its own."""


def reference() -> str:
    """The page, as Markdown."""
    sockets = SocketPaths(SYSTEM_DIRECTORY)
    return Template(TEMPLATE.read_text()).substitute(
        _descriptions() | _request_sections(),
        version=m.PROTOCOL_VERSION,
        directory=SYSTEM_DIRECTORY,
        sockets="\n".join(
            f"| `{getattr(sockets, name).name}` | {_docstring(getattr(SocketPaths, name))} |"
            for name in ("jobs", "events", "lifeline")
        ),
        length_bytes=lifeline.LENGTH_BYTES,
        max_frame_bytes=lifeline.MAX_FRAME_BYTES,
        exchanges=_exchange_table(),
        role_doc=_docstring(m.Role),
        roles="\n".join(f"| `{role.value}` |" for role in m.Role),
        level_doc=_docstring(a.HealthLevel),
        levels="\n".join(f"| `{level.value}` |" for level in a.HealthLevel),
        disk_doc=_docstring(s.DiskState),
        disk_states="\n".join(f"| `{state.value}` |" for state in s.DiskState),
        fault_doc=_docstring(s.DiskFault),
        faults="\n".join(f"| `{fault.value}` | {_markdown(fault.meaning)} |" for fault in s.DiskFault),
        absent=m.ABSENT,
        writing=m.WRITING,
        ready=m.READY,
        pending=m.PENDING,
        shared=m.SHARED,
        error_doc=_docstring(ErrorCode),
        errors="\n".join(f"| {code.value} | `{code.name}` | {_markdown(code.sentence)} |" for code in ErrorCode),
        examples=_examples(),
    )


def _descriptions() -> dict[str, str]:
    """The description of every Struct of the wire by its name. The template says which are described where."""
    return {
        kind.__name__: _struct(kind)
        for module in MODULES
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Struct)
    }


def _request_sections() -> dict[str, str]:
    """The requests of each section with their answers; an answer is described after the first request that has it."""
    described: set[type[Struct]] = {m.Completions, m.Done}
    found: dict[str, list[type[Struct]]] = {}
    for section, request, exchange in _exchanges():
        structs = found.setdefault(f"{section.name.lower()}_requests", [])
        structs.append(request)
        if exchange.answer not in described:
            described.add(exchange.answer)
            structs.append(exchange.answer)
    return {name: "\n".join(map(_struct, structs)) for name, structs in found.items()}


def _exchanges() -> list[tuple[m.Section, type[Struct], m.Exchange]]:
    """All requests, section by section in the order of the page."""
    return [
        (section, request, known)
        for section in m.Section
        for request, known in m.EXCHANGES.items()
        if known.section is section
    ]


def _exchange_table() -> str:
    lines = ["| request | roles | answer |", "|---|---|---|"]
    for _, request, exchange in _exchanges():
        roles = "any" if exchange.roles == m.ANY_ROLE else ", ".join(exchange.roles)
        where = ", in a completion" if exchange.answer is m.Completions else ""
        lines.append(f"| {_link(request)} | {roles} | {_link(exchange.answer)}{where} |")
    return "\n".join([*lines, ""])


def _examples() -> str:
    token = bytes(range(m.TOKEN_BYTES))
    one, seven = ((number).to_bytes(m.BLOCK_ID_BYTES, "little") for number in (1, 7))
    stores = m.Stores([5], [m.GroupBlocks(0, one, one, b"", b"k" * 8, seven)])
    examples: dict[str, bytes] = {
        "A Greeting on the lifeline, length first": lifeline.encode_frame(
            lifeline.Greeting(m.PROTOCOL_VERSION, 2**40, 3, token)
        ),
        "Hello": encode(m.Hello(1, m.PROTOCOL_VERSION, m.Role.WORKER, "me", "my 1.0")),
        "Store of one key of 8 bytes, from engine block 7": encode(
            m.Submit(2, b"r" * 16, stores, m.Loads([], [], [], []))
        ),
        "Its completion": encode(m.Completions(1, 2**30, [m.JobResult(5, True, 4096, 0.5)])),
        "Done": encode(m.Done(2, 1)),
    }
    rows = {title: textwrap.fill(frame.hex(" "), 95) for title, frame in examples.items()}
    return "\n\n".join(f"{title}:\n\n```\n{hexed}\n```" for title, hexed in rows.items())


def _struct(struct: type[Struct]) -> str:
    tag = struct.__struct_config__.tag
    if not struct.__struct_config__.array_like:
        shape = "a map of" if tag is None else f'a map with `"type": "{tag}"` and'
    elif tag is not None:
        shape = f'an array: `"{tag}"`, then'
    else:
        shape = "an array without a tag:"
    lines = [f"#### {struct.__name__}", "", _docstring(struct), ""]
    fields = fields_of(struct)
    if not fields:
        return "\n".join([*lines, f"Encoded as {shape} nothing else.", ""])
    lines += [f"Encoded as {shape}", "", "| # | field | type | meaning |", "|---|---|---|---|"]
    first = 0 if tag is None or not struct.__struct_config__.array_like else 1
    for number, (item, hint, description) in enumerate(fields, first):
        position = str(number) if struct.__struct_config__.array_like else ""
        lines.append(f"| {position} | `{item.name}` | {_type(hint)}{_default(item)} | {_markdown(description)} |")
    return "\n".join([*lines, ""])


def _default(item: msgspec.structs.FieldInfo) -> str:
    if item.default is not msgspec.NODEFAULT:
        return f"; default {'nil' if item.default is None else item.default}"
    return "; default empty" if item.default_factory is not msgspec.NODEFAULT else ""


def _docstring(documented: type) -> str:
    lines = (documented.__doc__ or f"Answer to {REQUESTS[documented].__name__}.").strip().splitlines()
    return _markdown(" ".join(line.strip() for line in lines).replace("  ", "\n\n"))


def _markdown(plain: str) -> str:
    return plain.replace("``", "`").replace("|", "\\|")


def _type(hint: object, metas: list[Meta] | None = None) -> str:
    """``hint`` in words, with its range."""
    if typing.get_origin(hint) is typing.Annotated:
        return _type(typing.get_args(hint)[0], [*(metas or []), *metas_of(hint)])
    metas = metas or []
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(argument, metas) for argument in arguments)
    if origin is list:
        return f"array{_lengths(metas, 'elements')} of {_type(arguments[0])}"
    if origin is dict:
        return f"map of {_type(arguments[0])} to {_type(arguments[1])}"
    assert isinstance(hint, type), hint
    if hint is type(None):
        return "nil"
    if issubclass(hint, Struct):
        return _link(hint)
    if issubclass(hint, Enum):
        return f"{'int' if issubclass(hint, IntEnum) else 'str'}, one of {_link(hint)}"
    if hint in (int, float):
        return f"{hint.__name__}{_range(metas)}"
    return f"{hint.__name__}{_lengths(metas, 'bytes' if hint is bytes else 'characters')}"


def _link(documented: type) -> str:
    return f"[{documented.__name__}](#{documented.__name__.lower()})"


def _bound(metas: list[Meta], name: str) -> int | None:
    return next((bound for meta in metas if (bound := getattr(meta, name)) is not None), None)


def _range(metas: list[Meta]) -> str:
    low, high, below = (_bound(metas, name) for name in ("ge", "le", "lt"))
    if high is None and below is not None:
        high = below - 1
    if high is None:
        return "" if low is None else f" ≥ {_number(low)}"
    return f" {_number(low or 0)} … {_number(high)}"


def _lengths(metas: list[Meta], unit: str) -> str:
    low, high = _bound(metas, "min_length"), _bound(metas, "max_length")
    if low is None and high is None:
        return ""
    if low == high:
        return f" ({low} {unit})"
    if high is None:
        return f" (at least {low} {unit})"
    return f" (at most {high} {unit})" if not low else f" ({low} … {high} {unit})"


def _number(value: int) -> str:
    for power in (63, 31, 32):
        if value in (2**power - 1, 2**power):
            return f"2^{power} - 1" if value < 2**power else f"2^{power}"
    return str(value)


if __name__ == "__main__":
    print(reference(), end="")
