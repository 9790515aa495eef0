"""Handlers of requests: methods of the part of the daemon that they serve, marked with the kind of request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeAlias, TypeVar

from msgspec import Struct

from kvoffd.server.session import Session
from kvoffd_proto import messages as m

StructT = TypeVar("StructT", bound=Struct)

ENGINE_WAIT_S = 1.5
"""Time until a reply to an engine is sent, be it an error; its client waits for 2 s."""
OPERATOR_WAIT_S = 8.0
"""The same for an operator, whose client waits for 10 s."""


@dataclass(eq=False)
class Pending:
    """A reply that is not available yet. The service calls ``poll`` until it is."""

    poll: Callable[[bool], m.AnyReply | None] = lambda late: None
    """Returns the reply, or None to wait longer; raises an error to refuse the request. Its argument says that
    ``until`` has passed: then it must not return None."""
    until: float = inf
    """Deadline, in the daemon's clock."""
    charge: Callable[[float], None] | None = None
    """Is told how many seconds the reply took, its encoding included."""
    request_id: int = field(default=0, init=False)
    session: Session | None = field(default=None, init=False)
    """Session of the request. When it ends, the reply is dropped."""

    def resolve(self, result: m.AnyReply | Exception) -> None:
        """Set the reply, or the error that refuses the request."""

        def poll(late: bool) -> m.AnyReply:
            if isinstance(result, Exception):
                raise result
            return result

        self.poll = poll


def filled(kind: type[StructT], *sources: object, **given: object) -> StructT:
    """Return a struct whose fields are ``given``, or else attributes of that name of the first source that has one.

    Callers name in a comment the fields that sources give.

    Raises:
        AttributeError: a field is missing.
    """
    for name in kind.__struct_fields__:
        if name not in given:
            for source in sources:
                if hasattr(source, name):
                    given[name] = getattr(source, name)
                    break
            else:
                raise AttributeError(f"No source has {kind.__name__}.{name}.")
    return kind(**given)


PartT = TypeVar("PartT")
RequestT = TypeVar("RequestT", bound=m.AnyRequest)
AnswerT = TypeVar("AnswerT", bound="Answer")
Answer: TypeAlias = m.AnyReply | Pending | None
"""Return value of a handler; None if there is no reply, as for jobs, whose results are published."""
Handler: TypeAlias = Callable[[Session, Any], Answer]
"""A bound method. It gets only requests of its own kind."""
Method: TypeAlias = Callable[[PartT, Session, RequestT], AnswerT]

_kinds: dict[Callable[..., Answer], type[m.AnyRequest]] = {}
"""Kind of request by marked method."""


def answers(kind: type[RequestT]) -> Callable[[Method[PartT, RequestT, AnswerT]], Method[PartT, RequestT, AnswerT]]:
    """Mark the decorated method as the handler of requests of this kind."""

    def mark(method: Method[PartT, RequestT, AnswerT]) -> Method[PartT, RequestT, AnswerT]:
        _kinds[method] = kind
        return method

    return mark


def handlers_of(parts: Iterable[object]) -> dict[type[m.AnyRequest], tuple[m.Exchange, Handler]]:
    """Return the marked methods of ``parts`` by kind of request. Each kind must have exactly one."""
    found: dict[type[m.AnyRequest], tuple[m.Exchange, Handler]] = {}
    for part in parts:
        for name, method in vars(type(part)).items():
            if (kind := _kinds.get(method) if callable(method) else None) is not None:
                assert kind not in found, f"two handlers of {kind.__name__}"
                found[kind] = m.EXCHANGES[kind], getattr(part, name)
    assert found.keys() == m.EXCHANGES.keys(), f"requests without a handler: {m.EXCHANGES.keys() - found.keys()}"
    return found
