"""What a handler of requests may return, and which function answers which request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

from msgspec import Struct

from kvoffd.server.sessions import Session
from kvoffd_proto import messages as m

if TYPE_CHECKING:
    from kvoffd.server.service import Service

StructT = TypeVar("StructT", bound=Struct)


@dataclass(eq=False)
class Pending:
    """A reply that must wait. Returned by a handler; the service asks ``poll`` until it is there."""

    poll: Callable[[bool], m.AnyReply | None] = lambda late: None
    """Returns the reply, or None where it is not there yet; raises an error to refuse the request. Its argument says
    that ``until`` has passed: then it must do one of the two others."""
    until: float = inf
    """Time of the daemon's clock."""
    request_id: int = field(default=0, init=False)
    session: Session | None = field(default=None, init=False)
    """Whose request it is. When it ends, nobody is left to be answered."""

    def bring(self, result: m.AnyReply | Exception) -> None:
        """This is the reply, or the reason why there is none."""

        def poll(late: bool) -> m.AnyReply:
            if isinstance(result, Exception):
                raise result
            return result

        self.poll = poll


def filled(kind: type[StructT], *sources: object, **given: object) -> StructT:
    """Return a struct: a field is ``given``, or else the attribute of the same name of the first source that has it.

    A counter with the name of its field needs no line here.

    Raises:
        AttributeError: a field is nowhere to be found.
    """
    for name in kind.__struct_fields__:
        if name not in given:
            for source in sources:
                if hasattr(source, name):
                    given[name] = getattr(source, name)
                    break
            else:
                raise AttributeError(f"Nothing that counts has {kind.__name__}.{name}.")
    return kind(**given)


RequestT = TypeVar("RequestT", bound=m.AnyRequest)
Answer: TypeAlias = m.AnyReply | Pending | None
"""None where the answer comes by other ways, as that of accepted jobs does."""
Handler: TypeAlias = Callable[["Service", Session, RequestT], Answer]

HANDLERS: dict[type[m.AnyRequest], tuple[m.Exchange, Handler[m.AnyRequest]]] = {}


def answers(kind: type[RequestT]) -> Callable[[Handler[RequestT]], Handler[RequestT]]:
    """Make the decorated function the handler of requests of this kind."""

    def register(handler: Handler[RequestT]) -> Handler[RequestT]:
        assert kind not in HANDLERS, kind
        # It is called with requests of its own kind only, which the type of the table cannot say.
        HANDLERS[kind] = m.EXCHANGES[kind], cast("Handler[m.AnyRequest]", handler)
        return handler

    return register
