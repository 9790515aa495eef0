"""Who a session is."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.registration import Registration
from kvoffd_proto.messages import Role


@dataclass(frozen=True)
class Identity:
    """Who the session is and what it opens."""

    directory: str
    role: Role
    name: str
    software: str
    namespace: NamespaceSpec | None = None
    registration: Registration | None = None
