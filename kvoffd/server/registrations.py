"""Registers the KV memory of workers, and ends registrations."""

from __future__ import annotations

import os

from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Namespace
from kvoffd.config import Config
from kvoffd.errors import BadGeometry, KvoffdError
from kvoffd.server.engine_memory import MemoryMapper
from kvoffd.server.handlers import Pending, answers
from kvoffd.server.jobs import Jobs
from kvoffd.server.session import Registration, Session
from kvoffd.server.sessions import SessionTable
from kvoffd.transfer.engine import EngineMemory
from kvoffd.transfer.plan import build_layouts
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import MAX_PAGES, Handle


class Registrations:
    """The requests of workers about their memory."""

    def __init__(self, config: Config, cache: Cache, memory: MemoryMapper, sessions: SessionTable, jobs: Jobs) -> None:
        self._max_registrations = config.limits.max_registrations
        self._cache, self._memory, self._sessions, self._jobs = cache, memory, sessions, jobs

    @answers(m.Register)
    def register(self, session: Session, message: m.Register) -> Pending:
        """Map a worker's memory, then reply. After an error the session keeps the attached descriptors."""
        namespace = session.namespaces[message.namespace]
        self._check(session, message, namespace)
        descriptors = _claim(session, message.segments)
        session.registering.add(message.registration_id)
        answer = Pending()

        def mapped(result: EngineMemory | Exception) -> None:
            session.registering.discard(message.registration_id)
            try:
                reply = self._registered(session, message, namespace, result)
            except Exception as error:
                _give_back(session, descriptors)
                answer.resolve(error)
                return
            for fd in descriptors.values():
                os.close(fd)
            answer.resolve(reply)

        try:
            self._memory.map(session.process.uid, message.segments, descriptors, mapped)
        except Exception as error:
            mapped(error)
        return answer

    @answers(m.Unregister)
    def unregister(self, session: Session, message: m.Unregister) -> Pending:
        """Stop the registration's jobs and unmap its memory, then reply."""
        registration = session.registrations[message.registration_id]
        del session.registrations[message.registration_id]
        self._sessions.share_credit()
        answer = Pending()
        self._jobs.abandon([copy for copy in self._jobs.of(session).values() if copy.registration is registration])
        registration.close_when_idle(lambda: answer.resolve(m.Done(message.request_id, 1)))
        return answer

    def _check(self, session: Session, message: m.Register, namespace: Namespace) -> None:
        if message.registration_id in session.registrations or message.registration_id in session.registering:
            raise BadGeometry("A registration with this id exists; use a new id.")
        held = len(session.registrations) + len(session.registering)
        if held >= self._max_registrations:
            raise KvoffdError(f"The session holds {held} registrations, its limit; end one.", ErrorCode.TOO_MANY)
        if message.rank >= namespace.world_size:
            last = namespace.world_size - 1
            raise BadGeometry(f"The namespace has no rank {message.rank}; use one from 0 to {last}.")
        if (pages := sum(map(len, message.groups))) > MAX_PAGES:
            raise BadGeometry(f"The registration has {pages} pages in its groups; the limit is {MAX_PAGES}.")
        if len(message.groups) != len(namespace.specs):
            raise BadGeometry(
                f"The registration has {len(message.groups)} groups, but its namespace {len(namespace.specs)}; send "
                "each."
            )

    def _registered(
        self, session: Session, message: m.Register, namespace: Namespace, memory: EngineMemory | Exception
    ) -> m.Registered:
        """Add the registration; on an error unmap its memory and raise."""
        if isinstance(memory, Exception):
            raise memory
        try:
            if session.ended:
                raise KvoffdError.of(ErrorCode.SESSION_ENDED)
            layouts = build_layouts(
                memory.spans, message.tensors, message.groups, message.blocks_per_key, on_gpu=memory.on_gpu
            )
            shard_bytes = [layout.shard_bytes for layout in layouts]
            shards = tuple(
                (message.blocks_per_key, tuple(page.page_bytes for page in pages)) for pages in message.groups
            )
            self._cache.namespaces.register_rank(namespace, message.rank, shard_bytes, memory.node, shards)
        except BaseException:
            memory.close(lambda: None)
            raise
        registration = Registration(memory, namespace, message.rank, layouts)
        session.registrations[message.registration_id] = registration
        self._sessions.share_credit()
        return m.Registered(message.request_id, message.registration_id, shard_bytes)


def _claim(session: Session, handles: list[Handle]) -> dict[int, int]:
    """Take the handles' descriptors from the session and return them by segment id. Raises KvoffdError."""
    ids: list[int] = []
    for handle in handles:
        if isinstance(handle, m.MemfdHandle):
            ids.append(handle.segment_id)
        elif isinstance(handle, m.CudaVmmHandle):
            ids += handle.segment_ids
    if len(set(ids)) < len(ids):
        raise BadGeometry("A segment is named twice; name it once and let tensors share it.")
    for segment_id in ids:
        if segment_id not in session.attached:
            why = f"No descriptor was attached as segment {segment_id}; attach it first."
            raise KvoffdError(why, ErrorCode.UNKNOWN_SEGMENT)
    return {segment_id: session.attached.pop(segment_id) for segment_id in ids}


def _give_back(session: Session, descriptors: dict[int, int]) -> None:
    """Undo a claim. Close a descriptor whose id was attached again since."""
    for segment_id, fd in descriptors.items():
        if session.ended or segment_id in session.attached:
            session.lifeline.close_descriptor(fd)
        else:
            session.attached[segment_id] = fd
