"""Pieces of text that need no terminal, for what must start fast."""

from __future__ import annotations


def printable(text: str) -> str:
    """Replace characters that could move the cursor or change colours: names come from clients."""
    return "".join(character if character.isprintable() else "?" for character in text)
