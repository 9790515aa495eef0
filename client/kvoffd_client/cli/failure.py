"""What the command line refuses."""

from __future__ import annotations


class CliError(Exception):
    """The command cannot be done. The message is a sentence that says what to do next."""
