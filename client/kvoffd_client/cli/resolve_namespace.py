"""Which namespace an operator means."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffd_client.cli.failure import CliError
from kvoffd_client.cli.text import printable, short_fingerprint
from kvoffd_proto.messages import NamespaceInfo

MIN_PREFIX_DIGITS = 4
"""Fewer hex digits are too easily a slip of the hand."""


def choose_namespace(namespaces: Sequence[NamespaceInfo], wanted: str) -> NamespaceInfo:
    """Return the one namespace whose label is ``wanted`` or whose fingerprint begins with it. Raises CliError."""
    digits = wanted.lower()
    found = [
        namespace
        for namespace in namespaces
        if namespace.label == wanted
        or (len(digits) >= MIN_PREFIX_DIGITS and namespace.namespace.hex().startswith(digits))
    ]
    if len(found) == 1:
        return found[0]
    shown = printable(wanted)
    if not found:
        raise CliError(
            f"No open namespace has the label {shown!r} or a fingerprint that begins with it (at least "
            f"{MIN_PREFIX_DIGITS} digits); `kvoffd-cli namespaces` lists them."
        )
    names = ", ".join(f"{short_fingerprint(item.namespace)} ({printable(item.label)})" for item in found)
    raise CliError(f"{shown!r} could be any of {names}; give more digits of the fingerprint.")
