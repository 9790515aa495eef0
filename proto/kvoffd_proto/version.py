"""The version of the wire. Both ends must speak the same one; there is no negotiation."""

from __future__ import annotations

PROTOCOL_VERSION = 1
"""Raised whenever a message, a field or its meaning changes. Compared for equality."""
