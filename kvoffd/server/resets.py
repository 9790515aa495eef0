"""Drops all blocks of a namespace: at an engine's reset, an operator's clear, or another node's for all nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Namespace
from kvoffd.errors import KvoffdError
from kvoffd.server.handlers import ENGINE_WAIT_S, OPERATOR_WAIT_S, Pending, answers
from kvoffd.server.known_namespaces import KnownNamespaces
from kvoffd.server.persistence import State
from kvoffd.server.session import Session
from kvoffd.server.tier_supervisor import TierSupervisor
from kvoffd.system.rare_warnings import USUAL, RareWarnings
from kvoffd.tiers.fleet_clears import Raise
from kvoffd.tiers.peer_caller import Calls
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.stats import namespace_id

logger = logging.getLogger(__name__)
_resets = RareWarnings(logger, logging.INFO, USUAL)

RESET_NOT_SAVED = "After a kill or a reboot the namespace's blocks may come back from disks and shared stores."
NO_ANSWER = "it has not answered yet."
CLEARED_NOT_SAVED = "After a kill or a reboot cleared blocks may come back from disks."


class NamespaceResets:
    """The requests that drop a namespace's blocks, and resets of other nodes that this one follows."""

    def __init__(
        self,
        cache: Cache,
        state: State,
        tier_supervisor: TierSupervisor,
        namespaces: KnownNamespaces,
        clock: Callable[[], float],
    ) -> None:
        self._cache, self._state, self._tier_supervisor = cache, state, tier_supervisor
        self._namespaces, self._clock = namespaces, clock

    @answers(m.Reset)
    def reset(self, session: Session, message: m.Reset) -> m.Done | Pending:
        """Drop all blocks of a namespace that the session has open, and stop sharing it."""
        namespace, in_memory = session.namespaces[message.namespace], ""
        if namespace.of_bench:
            return m.Done(message.request_id, self.drop(namespace.fingerprint))
        generation = self._state.generations.stop_sharing(namespace.fingerprint)
        reply = m.Done(message.request_id, self._remove(namespace.fingerprint, [namespace], generation))
        if self._tier_supervisor.shares:
            name = namespace.fingerprint.hex()
            _resets.warn(
                "An engine reset the namespace %r; its blocks are no longer shared with other nodes. `kvoffd-cli clear "
                "%s --all-nodes` shares it again.",
                namespace.label,
                name,
            )
            in_memory = (
                f"It is done, but a reboot would undo it: {self._state.file.path}, the record that the namespace is "
                f"not shared any more, is in memory. Run `kvoffd-cli clear {name} --all-nodes`, or set "
                "STATE_DIRECTORY to a directory on a disk."
            )
        return self._state.reply_once_saved(reply, self._clock() + ENGINE_WAIT_S, RESET_NOT_SAVED, in_memory)

    @answers(a.Clear)
    def clear(self, session: Session, message: a.Clear) -> Pending:
        """Drop the blocks of one namespace, or of all, and forget empty namespaces that no session has open."""
        if message.namespace is not None:
            self._cache.namespaces.required(message.namespace)  # raises if there is none
        count = self.drop(message.namespace)
        self._namespaces.forget_idle()
        whose = "all namespaces" if message.namespace is None else f"namespace {namespace_id(message.namespace)}"
        logger.info("Session %d (%s) cleared %s: %d blocks.", session.id, session.process, whose, count)
        until = self._clock() + OPERATOR_WAIT_S
        return self._state.reply_once_saved(m.Done(message.request_id, count), until, CLEARED_NOT_SAVED)

    @answers(a.ResetFleet)
    def reset_fleet(self, session: Session, message: a.ResetFleet) -> Pending:
        """Void a namespace's blocks on all nodes; the reply's count is the number of blocks of this one."""
        if not self._tier_supervisor.shares:
            why = "This daemon has no shared store and no peers, so no other nodes to clear; leave out --all-nodes."
            raise KvoffdError(why, ErrorCode.BAD_ARGUMENT)
        raises, calls = self._tier_supervisor.void_everywhere(message.namespace)
        # Here at once, and not at the next tick, with what others voided.
        count = self.follow_fleet().get(message.namespace, 0)
        until = self._clock() + OPERATOR_WAIT_S
        saved = self._state.reply_once_saved(m.Done(message.request_id, count), until, CLEARED_NOT_SAVED)

        def poll(late: bool) -> m.AnyReply | None:
            if not late and not (calls.ended and all(one.ended for one in raises.values())):
                return None
            if problems := self._unreached(raises, calls):
                why = f"The reset did not reach every shared store and peer: {' '.join(problems)}"
                raise KvoffdError(why, ErrorCode.NOT_READY)
            return saved.poll(late)

        what = f"namespace {namespace_id(message.namespace)}"
        logger.info(
            "Session %d (%s) cleared %s on all nodes: %d blocks here.", session.id, session.process, what, count
        )
        return Pending(poll, until)

    def _unreached(self, raises: Mapping[str, Raise], calls: Calls) -> list[str]:
        """Return a sentence about each store, peer, name and network with nodes that a reset of all did not reach."""
        networks = self._tier_supervisor.peers.networks
        problems = {name: one.problem or ("" if one.ended else NO_ANSWER) for name, one in raises.items()}
        # A node behind a name may have been called and be connected too: ``unreached`` knows both.
        found = [f"{name}: {why}" for name, why in problems.items() if why and name not in calls.tiers]
        found += calls.unreached(problems)
        found += [f"{one}: its nodes hear of it once they exchange blocks; clear there too." for one in networks]
        if not (raises or networks or calls.nodes):
            found.append(
                "nobody was told: this node names no store and no peer, and only lends; clear on one that does."
            )
        return found

    def follow_fleet(self) -> dict[bytes, int]:
        """Drop the blocks of namespaces that were voided for all nodes; return how many each had."""
        dropped = dict[bytes, int]()
        for fingerprint in list(self._state.generations.voided):
            dropped[fingerprint] = self.drop(fingerprint)
            self._state.generations.followed(fingerprint)
        if dropped:
            self._tier_supervisor.tell_peers(list(dropped))
        return dropped

    def drop(self, fingerprint: bytes | None) -> int:
        """Void all blocks of a namespace, open or not, or of all, in the pool and on disks; return how many there were.

        That holds for later daemons once the state file is saved: see ``State.reply_once_saved``. Shared stores keep
        their objects, whose generation is their own. Of a bench nothing is in the state file: no tier gets its blocks,
        and each run has a namespace of its own.
        """
        chosen = [one for one in self._cache.namespaces.values() if fingerprint in (None, one.fingerprint)]
        is_bench = fingerprint is not None and any(one.of_bench for one in chosen)
        generation = None if is_bench else self._state.generations.void_here(fingerprint)
        return self._remove(fingerprint, chosen, generation)

    def _remove(self, fingerprint: bytes | None, open_ones: Sequence[Namespace], generation: int | None) -> int:
        """Remove the blocks of a namespace, or of all, that its new ``generation`` has made void. Returns how many."""
        tiering = self._tier_supervisor.tiering
        count = tiering.remove_all(fingerprint) if tiering is not None else 0
        return count + self._cache.reset(*open_ones, generation=generation)
