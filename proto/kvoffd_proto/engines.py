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
    """All of ``processes``, each once."""
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


# Fields of ``SessionInfo`` whose sum the engine has.
SUMMED = ("leases", "pinned_bytes", "jobs", "registered_bytes", "stored_bytes", "loaded_bytes")


def engines_of(found: Sequence[SessionInfo], labels: Mapping[bytes, str] = MappingProxyType({})) -> list[Engine]:
    """Return the engines among the sessions: a worker joins the scheduler of its name, if possible its process."""
    engines: list[Engine] = []
    for one in sorted(found, key=lambda one: one.role != Role.SCHEDULER):  # so that workers find theirs
        if one.role not in (Role.SCHEDULER, Role.WORKER):
            continue
        name = engine_name(one.name, one.role)
        same_name = [each for each in engines if (each.name, each.namespaces) == (name, one.namespaces)]
        if one.role == Role.WORKER and same_name:
            engine = min(same_name, key=lambda each: (one.pid not in each.pids, each.workers))
        else:
            engine = Engine(name, one.namespaces, [labels.get(each, "") for each in one.namespaces])
            engine.software, engine.idle_seconds = one.software, one.idle_seconds
            engines.append(engine)
        engine.schedulers += one.role == Role.SCHEDULER
        engine.workers += one.role == Role.WORKER
        engine.idle_seconds = min(engine.idle_seconds, one.idle_seconds)
        engine.problem = engine.problem or one.problem
        if one.pid and one.pid not in engine.pids:
            engine.pids.append(one.pid)
        if one.pid and one.pid not in (of_role := engine.processes.setdefault(str(one.role), [])):
            of_role.append(one.pid)
        for field_name in SUMMED:
            setattr(engine, field_name, getattr(engine, field_name) + getattr(one, field_name))
    return engines
