"""Makes several calls, even if one of them raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def call_each(calls: Iterable[Callable[[], object]]) -> list[object]:
    """Make all calls, then raise the exception that one of them raised, or an ExceptionGroup of several. Return what
    they returned."""
    returned, errors = list[object](), list[Exception]()
    for call in calls:
        try:
            returned.append(call())
        except Exception as error:
            errors.append(error)
    if len(errors) > 1:
        raise ExceptionGroup("several calls failed", errors)
    if errors:
        raise errors[0]
    return returned
