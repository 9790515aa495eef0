"""The table of request handlers, and their return types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

from msgspec import Struct

from kvoffd.server.session import Session
from kvoffd_proto import messages as m

if TYPE_CHECKING:
    from kvoffd.server.service import Service

StructT = TypeVar("StructT", bound=Struct)


@dataclass(eq=False)
class Pending:
    """A reply that is not available yet. The service calls ``poll`` until it is."""

    poll: Callable[[bool], m.AnyReply | None] = lambda late: None
    """Returns the reply, or None to wait longer; raises an error to refuse the request. Its argument says that
    ``until`` has passed: then it must not return None."""
    until: float = inf
    """Deadline, in the daemon's clock."""
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


RequestT = TypeVar("RequestT", bound=m.AnyRequest)
Answer: TypeAlias = m.AnyReply | Pending | None
"""Return value of a handler; None if there is no reply, as for jobs, whose results are published."""
Handler: TypeAlias = Callable[["Service", Session, RequestT], Answer]

HANDLERS: dict[type[m.AnyRequest], tuple[m.Exchange, Handler[m.AnyRequest]]] = {}


def answers(kind: type[RequestT]) -> Callable[[Handler[RequestT]], Handler[RequestT]]:
    """Make the decorated function the handler of requests of this kind."""

    def register(handler: Handler[RequestT]) -> Handler[RequestT]:
        assert kind not in HANDLERS, kind
        # The table's type cannot express that a handler gets requests of its own kind only.
        HANDLERS[kind] = m.EXCHANGES[kind], cast("Handler[m.AnyRequest]", handler)
        return handler

    return register
