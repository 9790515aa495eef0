"""Engines that are connected, the sessions of each in one row: for ``clients``, ``top``, doctor and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kvoffd_proto.admin import SessionInfo
from kvoffd_proto.messages import Role
from kvoffd_proto.stats import engine_name


@dataclass
class Engine:
    """The sessions of one engine: those of one namespace whose names differ only in the role."""

    name: str
    namespaces: list[bytes]
    labels: list[str]
    schedulers: int = 0
    workers: int = 0
    pids: list[int] = field(default_factory=list)
    software: str = ""
    idle_seconds: float = 0.0
    leases: int = 0
    pinned_bytes: int = 0
    jobs: int = 0
    registered_bytes: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    processes: dict[str, list[int]] = field(default_factory=dict)
    """Pids by role, in the order in which they connected."""
    problem: str = ""
    """Its report of why it stores and loads nothing; empty if it does."""


SUMMED = ("leases", "pinned_bytes", "jobs", "registered_bytes", "stored_bytes", "loaded_bytes")


def engines_of(found: Sequence[SessionInfo], labels: Mapping[bytes, str] = MappingProxyType({})) -> list[Engine]:
    """Return the engines among the sessions: a worker joins the scheduler of its name, if possible its process."""
    rows: list[Engine] = []
    for one in sorted(found, key=lambda one: one.role != Role.SCHEDULER):  # so that workers find theirs
        if one.role not in (Role.SCHEDULER, Role.WORKER):
            continue
        name = engine_name(one.name, one.role)
        same_name = [each for each in rows if (each.name, each.namespaces) == (name, one.namespaces)]
        if one.role == Role.WORKER and same_name:
            row = min(same_name, key=lambda each: (one.pid not in each.pids, each.workers))
        else:
            row = Engine(name, one.namespaces, [labels.get(each, "") for each in one.namespaces])
            row.software, row.idle_seconds = one.software, one.idle_seconds
            rows.append(row)
        row.schedulers += one.role == Role.SCHEDULER
        row.workers += one.role == Role.WORKER
        row.idle_seconds = min(row.idle_seconds, one.idle_seconds)
        row.problem = row.problem or one.problem
        if one.pid and one.pid not in row.pids:
            row.pids.append(one.pid)
        if one.pid and one.role and one.pid not in (own := row.processes.setdefault(str(one.role), [])):
            own.append(one.pid)
        for name in SUMMED:
            setattr(row, name, getattr(row, name) + getattr(one, name))
    return rows
