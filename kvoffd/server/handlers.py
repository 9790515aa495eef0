"""What a handler of requests may return, and which function answers which request."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

from msgspec import Struct

from kvoffd.server.sessions import Session
from kvoffd_proto import messages as m

if TYPE_CHECKING:
    from kvoffd.server.service import Service

StructT = TypeVar("StructT", bound=Struct)


class Pending:
    """A reply that must wait. Returned by a handler; the service asks ``poll`` until it is there.

    Args:
        poll: returns the reply, or None where it is not there yet; raises an error to refuse the request. Its argument
            says that ``until`` has passed: then it must do one of the two others. None where a callback calls
            ``bring``.
        until: time of the daemon's clock.
    """

    def __init__(self, poll: Callable[[bool], m.AnyReply | None] | None = None, until: float = inf) -> None:
        self._poll = poll
        self._result: m.AnyReply | Exception | None = None
        self.until = until
        self.request_id = 0
        self.session: Session | None = None
        """Whose request it is. When it ends, nobody is left to be answered."""

    def bring(self, result: m.AnyReply | Exception) -> None:
        """This is the reply, or the reason why there is none."""
        self._result = result

    def poll(self, late: bool) -> m.AnyReply | None:
        if self._poll is not None:
            return self._poll(late)
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


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
