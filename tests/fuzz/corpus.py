"""Valid inputs for the fuzzer to begin with, so that it gets past the first byte."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable
from functools import cache

from hypothesis import HealthCheck, given, settings
from msgspec import Struct

from kvoffd_proto import codec, events, lifeline, messages
from tests.fuzz.pages import snapshot
from tests.kit.made_up_messages import instances

few = settings(max_examples=4, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


@cache
def seeds(name: str) -> list[bytes]:
    """The seeds of the decoder of that name; at least one."""
    return {
        "request": lambda: made_up(messages.EXCHANGES, codec.encode),
        "reply": lambda: made_up(codec.REPLIES, codec.encode),
        "completions": lambda: made_up([messages.Completions], codec.encode),
        "lifeline_stream": _frames,
        "event_batch": lambda: made_up([events.EventBatch], codec.encode),
        "namespaces": lambda: [snapshot()],
    }.get(name, lambda: [bytes(range(64)), b"\0\1\2\3" * 40])()


def made_up(structs: Iterable[type[Struct]], encode: Callable[[typing.Any], bytes]) -> list[bytes]:
    """A few messages of each type, the same at each time."""
    found: list[bytes] = []
    for struct in structs:

        @few
        @given(instances(struct))
        def note(message: Struct) -> None:
            found.append(encode(message))

        note()
    return found


def _frames() -> list[bytes]:
    frames = [*typing.get_args(lifeline.FromDaemon), *typing.get_args(lifeline.FromClient)]
    encoded = made_up(frames, lifeline.encode_frame)
    return [*encoded, b"".join(encoded)]
