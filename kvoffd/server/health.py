"""The daemon's health: its level, and the problems that an operator should fix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvoffd.cache.cache import Cache
from kvoffd.config import Config
from kvoffd.observe.meters import MINUTE_S
from kvoffd.pool.pool import Pool
from kvoffd.server.handlers import answers
from kvoffd.server.persistence import StateFile
from kvoffd.server.session import Session
from kvoffd.server.sessions import SessionTable
from kvoffd.server.tier_supervisor import TierSupervisor
from kvoffd.server.traffic import TrafficCounts
from kvoffd.system.limits import open_descriptors
from kvoffd.transfer.cuda.gpus import Gpus
from kvoffd_proto import admin as a
from kvoffd_proto.cuda import descriptor_limits
from kvoffd_proto.stats import LATE_SHARE, MIN_LATE, NO_SPACE_CAUSES, Window, namespace_id
from kvoffd_proto.units import format_count, format_duration, format_size, plural

PINNED_SHARE = 0.85
"""Share of the usable pool at which pinned bytes leave too little for stores. Less than leases may pin."""
DESCRIPTORS_SHARE = 0.8
"""Share of the limit of open files that is a problem. Sessions may attach up to half of the limit."""


@dataclass(eq=False)
class HealthWatch:
    """Judges the parts of the daemon, each time that it is asked."""

    config: Config
    cache: Cache
    pool: Pool
    gpus: Gpus
    sessions: SessionTable
    tier_supervisor: TierSupervisor
    state_file: StateFile
    traffic: TrafficCounts
    sockets_problem: str = ""
    """Reason why engines cannot connect, set by the daemon's main loop."""

    @answers(a.Health)
    def health(self, session: Session, message: a.Health) -> a.HealthReply:
        return self.reply(message.request_id)

    def reply(self, request_id: int = 0) -> a.HealthReply:
        """Return the reply to a health request, which needs no session. A reply also proves that the loop runs."""
        level, causes = self.judge(self.traffic.in_last(MINUTE_S, self.traffic.total()))
        return a.HealthReply(request_id, level, causes)

    def judge(self, recent: Window) -> tuple[a.HealthLevel, list[a.HealthProblem]]:
        """Return the level and its causes, the worst first. ``recent``: traffic of the last minute."""
        causes = [a.HealthProblem(reason, sentence) for reason, sentence in self._problems(recent)]
        if self.sessions.stopping:
            return a.HealthLevel.DOWN, [a.HealthProblem("stopping", "The daemon is stopping."), *causes]
        if self.sockets_problem:
            return a.HealthLevel.DOWN, causes
        return (a.HealthLevel.DEGRADED if causes else a.HealthLevel.OK), causes

    def _problems(self, recent: Window) -> Iterator[tuple[str, str]]:
        """Yield a word for each problem's kind, and a sentence that says what to do."""
        if self.sockets_problem:
            yield "sockets_lost", self.sockets_problem
        for sentence in self.gpus.problems:
            yield "gpu", sentence
        if lost := self.cache.life.quarantined_slots:
            yield (
                "pool_corrupt",
                f"{lost} slot{plural(lost)} of the pool did not match the checksum. The blocks were dropped and the "
                "slots are not used any more; check the machine's memory (dmesg, edac-util). A new pool uses all of "
                "its memory again.",
            )
        if self.pool.removed:
            yield (
                "pool_file_removed",
                f"The pool file {self.config.pool_file} was removed. Blocks are served until the daemon stops; the "
                "next one starts empty, with a new file. Keep cleaners of temporary files away from it.",
            )
        yield from self.tier_supervisor.problems
        usage, over = self.cache.life.usage, format_duration(recent.seconds)
        usable_bytes = max(1, self.cache.slots.pool_bytes - usage.quarantined)
        if usage.pinned >= PINNED_SHARE * usable_bytes:
            yield (
                "pool_pinned",
                f"{format_size(usage.pinned)} of {format_size(usable_bytes)} of the pool are pinned"
                f"{self._most_pinned()}: stores find no space. `kvoffd-cli clients` shows what each session pins. "
                "Enlarge the pool, or end the sessions that pin blocks without loading them.",
            )
        if dropped := recent.no_space_keys:
            cause = max(recent.no_space_causes, key=recent.no_space_causes.__getitem__)
            whose, advice = "", "Enlarge the pool."
            if cause == "pinned":
                whose, advice = self._most_pinned(), "`kvoffd-cli clients` shows what each session pins."
            elif cause == "quota":
                whose, advice = self._full_quota(), "`kvoffd-cli namespaces quota` raises it."
            elif cause == "unregistered":
                whose = self._missing_ranks()
                advice = "Nothing is stored without them: the logs of the daemon and of the engine's workers say why."
            yield (
                "stores_without_space",
                f"In the last {over}, {format_count(dropped)} block{plural(dropped)} that engines offered were not "
                f"stored: {NO_SPACE_CAUSES[cause]}{whose}. {advice}",
            )
        # Engines report late ones afterwards, perhaps some that came before the window, or never came.
        late, lookups = recent.late_lookups, max(recent.lookups, recent.late_lookups)
        if late >= MIN_LATE and late > LATE_SHARE * lookups:
            yield (
                "lookups_late",
                f"In the last {over}, {format_count(late)} of {format_count(lookups)} lookups took longer than "
                "computing the prompts, so engines computed them. The daemon or the engines get too little CPU: give "
                "the daemon a core of its own (CPUAffinity= in its systemd unit), or run less on this machine.",
            )
        if self.sessions.engine_sessions >= (most := self.config.max_sessions):
            yield (
                "sessions_taken",
                f"All {most} sessions are taken: further engines are refused, and run without the cache. `kvoffd-cli "
                "clients` lists them; close some, or raise max_sessions.",
            )
        open_files, most_files = open_descriptors(), descriptor_limits()[0]
        if open_files > DESCRIPTORS_SHARE * most_files:
            yield (
                "descriptors",
                f"{format_count(open_files)} of the {format_count(most_files)} files that the daemon may open are "
                "open. Near the limit clients are refused. A client keeps many connections open, or registers memory "
                "in many pieces: `ss -xp` and `kvoffd-cli clients` show which. End it, or raise the limit "
                "(LimitNOFILE= in the systemd unit, ulimit -n).",
            )
        if problem := self.state_file.broken_reason:
            yield (
                "state_unwritable",
                f"{problem}. `clear`, resets and quotas report errors, and a kill may undo them.",
            )

    def _full_quota(self) -> str:
        """Return the namespace whose quota refused the most blocks in the last minute, as a part of a sentence."""
        quotas = self.cache.quotas
        limited = [one for one in self.cache.namespaces.values() if one.fingerprint in quotas]
        if (one := self.traffic.most_refused("quota", limited)) is None:  # it is forgotten, or has no quota now
            return ""
        return f" ({one.label} {namespace_id(one.fingerprint)}, at most {format_size(quotas[one.fingerprint])})"

    def _missing_ranks(self) -> str:
        """Return the ranks of the namespace whose stores lacked them the most, as a part of a sentence."""
        lacking = [one for one in self.cache.namespaces.values() if None in one.shard_bytes]
        if (one := self.traffic.most_refused("unregistered", lacking)) is None:  # it has registered since
            return ""
        missing = [str(rank) for rank, sizes in enumerate(one.shard_bytes) if sizes is None]
        ranks = f"rank{plural(len(missing))} {', '.join(missing)}"
        return f" ({one.label} {namespace_id(one.fingerprint)} lacks {ranks})"

    def _most_pinned(self) -> str:
        """Return the session that pins the most, as a part of a sentence."""
        found = [(self.cache.leases.of(one.id).nbytes, one.id, one.name or one.role or "new") for one in self.sessions]
        nbytes, number, name = max(found, default=(0, 0, ""))
        return f", {format_size(nbytes)} by session {number} ({name})" if nbytes else ""
