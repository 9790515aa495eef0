"""Prints the wire's reference page: ``python -m kvoffd_proto.reference > proto/PROTOCOL.md``.

Messages, fields, ranges and error sentences are taken from the Structs themselves; ``reference_text`` holds the prose
between them.
"""

from __future__ import annotations

import types
import typing
from enum import Enum, IntEnum
from pathlib import Path

import msgspec
from msgspec import Meta, Struct

from kvoffd_proto import blocks, events, handles, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto import reference_text as text
from kvoffd_proto.codec import encode
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.sockets import SYSTEM_DIRECTORY, SocketPaths
from kvoffd_proto.version import PROTOCOL_VERSION

COMMON_REPLIES = (m.Done, m.Error)
PARTS = (
    m.GroupSpec,
    m.GroupKeys,
    m.GroupTransfer,
    m.JobResult,
    handles.TensorLayout,
    handles.PageRef,
    handles.LayerSpec,
    blocks.ShardSpec,
    blocks.PageSpec,
    blocks.BlockInfo,
    blocks.HeldShard,
    blocks.PutShard,
    m.Limits,
    m.PoolStats,
    m.IntegrityStats,
    blocks.BlockAccessStats,
    m.DirectionStats,
    m.BelowStats,
    m.DiskStats,
    m.LatencyStats,
    m.NamespaceStats,
    m.SessionInfo,
    m.NamespaceInfo,
)
HANDLES = (handles.MemfdHandle, handles.CudaIpcHandle, handles.CudaVmmHandle)
LIFELINE_FROM_DAEMON = (
    lifeline.Greeting,
    lifeline.Refused,
    lifeline.Attached,
    lifeline.AttachRefused,
    lifeline.PoolOpened,
    lifeline.PoolRefused,
)
LIFELINE_FROM_CLIENT = (lifeline.Attach, lifeline.OpenPool)
EVENTS = (events.BlockStored, events.BlockRemoved, events.AllBlocksCleared)


def documented() -> list[type[Struct]]:
    """Every Struct that the page describes."""
    return [
        *LIFELINE_FROM_DAEMON,
        *LIFELINE_FROM_CLIENT,
        *m.EXCHANGES,
        *m.REPLIES,
        m.Completions,
        *PARTS,
        *HANDLES,
        events.EventBatch,
        *EVENTS,
    ]


def reference() -> str:
    """The page, as Markdown."""
    parts = [_introduction(), text.RULES, _lifeline_section(), "## Requests and replies\n", _exchange_table()]
    described: set[type[Struct]] = {m.Completions, *COMMON_REPLIES}
    for section in m.Section:
        parts.append(f"### {section}\n")
        parts += [text.BLOCKS] if section is m.Section.BLOCKS else []
        for request, exchange in _exchanges_of(section):
            parts.append(_struct(request))
            if exchange.answer not in described:
                described.add(exchange.answer)
                parts.append(_struct(exchange.answer))
    parts += ["### Replies of several requests\n", *(_struct(reply) for reply in COMMON_REPLIES)]
    parts += [text.COMPLETIONS, _struct(m.Completions)]
    parts += ["## Parts\n", "Arrays inside messages.\n", *(_struct(part) for part in PARTS)]
    parts += ["## Handles\n", text.HANDLES, *(_struct(handle) for handle in HANDLES)]
    parts += [text.EVENTS, _struct(events.EventBatch), *(_struct(event) for event in EVENTS)]
    parts += [_values(), _errors(), _examples()]
    return "\n".join(parts)


def _exchanges_of(section: m.Section) -> list[tuple[type[Struct], m.Exchange]]:
    return [(request, known) for request, known in m.EXCHANGES.items() if known.section is section]


# --- structs -------------------------------------------------------------------------------------


def fields_of(struct: type[Struct]) -> list[tuple[msgspec.structs.FieldInfo, object, str]]:
    """The fields of ``struct`` in wire order: field, type with its Metas, description (empty where there is none)."""
    hints = typing.get_type_hints(struct, include_extras=True)
    found = []
    for item in msgspec.structs.fields(struct):
        hint = hints[item.name]
        descriptions = [meta.description for meta in _metas(hint) if meta.description]
        found.append((item, hint, descriptions[-1] if descriptions else ""))
    return found


def _struct(struct: type[Struct]) -> str:
    tag = struct.__struct_config__.tag
    if not struct.__struct_config__.array_like:
        shape = f'a map with `"type": "{tag}"` and'
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
    lines = (documented.__doc__ or "").strip().splitlines()
    return _markdown(" ".join(line.strip() for line in lines).replace("  ", "\n\n"))


def _markdown(plain: str) -> str:
    return plain.replace("``", "`").replace("|", "\\|")


# --- types ---------------------------------------------------------------------------------------


def _metas(hint: object) -> list[Meta]:
    return [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Meta)]


def _type(hint: object, metas: list[Meta] | None = None) -> str:
    """``hint`` in words, with its range."""
    if typing.get_origin(hint) is typing.Annotated:
        return _type(typing.get_args(hint)[0], [*(metas or []), *_metas(hint)])
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
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    if issubclass(hint, Enum):
        return f"{'int' if issubclass(hint, IntEnum) else 'str'}, one of [{hint.__name__}](#{hint.__name__.lower()})"
    if hint in (int, float):
        return f"{hint.__name__}{_range(metas)}"
    return f"{hint.__name__}{_lengths(metas, 'bytes' if hint is bytes else 'characters')}"


def _bound(metas: list[Meta], name: str) -> int | None:
    for meta in metas:
        found: int | None = getattr(meta, name)
        if found is not None:
            return found
    return None


def _range(metas: list[Meta]) -> str:
    low, high, below = (_bound(metas, name) for name in ("ge", "le", "lt"))
    if high is None and below is not None:
        high = below - 1
    if low is None and high is None:
        return ""
    if high is None:
        return f" ≥ {_number(low or 0)}"
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
        if value == 2**power - 1:
            return f"2^{power} - 1"
        if value == 2**power:
            return f"2^{power}"
    return str(value)


# --- tables --------------------------------------------------------------------------------------


def _exchange_table() -> str:
    lines = ["| request | roles | answer |", "|---|---|---|"]
    for section in m.Section:
        for request, exchange in _exchanges_of(section):
            name, reply = request.__name__, exchange.answer.__name__
            roles = "any" if exchange.roles == m.ANY_ROLE else ", ".join(exchange.roles)
            answer = f"[{reply}](#{reply.lower()})" + (", in a completion" if exchange.answer is m.Completions else "")
            lines.append(f"| [{name}](#{name.lower()}) | {roles} | {answer} |")
    return "\n".join([*lines, "", text.REQUESTS])


def _values() -> str:
    roles = "\n".join(f"| `{role.value}` |" for role in m.Role)
    return (
        f"## Values\n\n#### Role\n\n{_docstring(m.Role)}\n\n| value |\n|---|\n{roles}\n\n#### States of a key\n\n"
        "| value | name | meaning |\n|---|---|---|\n"
        f"| {m.ABSENT} | absent | Not in the pool. |\n"
        f"| {m.WRITING} | writing | In the pool, but a shard of it is still to be written; it cannot be loaded yet. |\n"
        f"| {m.READY} | ready | Can be loaded; pinned by the lookup's lease. |\n"
        f"| {m.PENDING} | pending | In a tier below the pool and on its way up; ask again. |\n"
    )


def _errors() -> str:
    lines = ["#### ErrorCode", "", _docstring(ErrorCode), "", "| code | name | sentence |", "|---|---|---|"]
    lines += [f"| {code.value} | `{code.name}` | {_markdown(code.sentence)} |" for code in ErrorCode]
    return "\n".join([*lines, ""])


def _examples() -> str:
    token = bytes(range(m.TOKEN_BYTES))
    group = m.GroupTransfer(0, b"k" * 8, (7).to_bytes(m.BLOCK_ID_BYTES, "little"))
    examples: list[tuple[str, bytes]] = [
        (
            "A Greeting on the lifeline, length first",
            lifeline.encode_frame(lifeline.Greeting(PROTOCOL_VERSION, 2**40, 3, token)),
        ),
        ("Hello", encode(m.Hello(1, token, PROTOCOL_VERSION, m.Role.WORKER, "me", "my 1.0"))),
        ("Store of one key of 8 bytes, from engine block 7", encode(m.Store(2, token, b"r" * 16, 5, [group]))),
        ("Its completion", encode(m.Completions(2**40, 3, 1, 2**30, [m.JobResult(5, True, 4096, 0.5)]))),
        ("Done", encode(m.Done(2, 2**40, 1))),
    ]
    lines = ["## Examples", "", "Frames in hex, to test an encoder against.", ""]
    for title, frame in examples:
        rows = [frame[start : start + 32].hex(" ") for start in range(0, len(frame), 32)]
        lines += [f"{title}:", "", "```", *rows, "```", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


# --- the parts with prose -------------------------------------------------------------------------


def _introduction() -> str:
    sockets = SocketPaths(Path(SYSTEM_DIRECTORY))
    described = (
        (SocketPaths.jobs, sockets.jobs),
        (SocketPaths.events, sockets.events),
        (SocketPaths.lifeline, sockets.lifeline),
    )
    table = "\n".join(f"| `{path.name}` | {(entry.__doc__ or '').strip()} |" for entry, path in described)
    return text.INTRODUCTION.format(version=PROTOCOL_VERSION, directory=SYSTEM_DIRECTORY, table=table)


def _lifeline_section() -> str:
    opening = text.LIFELINE.format(length=lifeline.LENGTH_BYTES, maximum=lifeline.MAX_FRAME_BYTES)
    return "\n".join([opening, *(_struct(frame) for frame in LIFELINE_FROM_DAEMON + LIFELINE_FROM_CLIENT)])


if __name__ == "__main__":
    print(reference(), end="")
