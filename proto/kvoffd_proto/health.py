"""How well the daemon works, and why."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from kvoffd_proto.wire import ANY_ROLE, Reply, Request, Section, Wire, doc, exchange


class HealthLevel(StrEnum):
    """How well the daemon works."""

    OK = "ok"
    DEGRADED = "degraded"
    DOWN = "down"


class HealthProblem(Wire, frozen=True):
    """Something that an operator should see to."""

    reason: Annotated[str, doc("What kind it is, one word for scripts; `kvoffd_health_problems` counts by it.")]
    sentence: Annotated[str, doc("What it is and what to do, a sentence or a few.")]


class HealthReply(Reply, frozen=True):
    level: Annotated[
        HealthLevel,
        doc(
            "``ok``; ``degraded``: sessions and jobs are taken, and what ``causes`` names makes the cache worse; "
            "``down``: no sessions and jobs are taken."
        ),
    ]
    causes: Annotated[list[HealthProblem], doc("Why the level is not ``ok``, the worst first.")]

    @property
    def healthy(self) -> bool:
        """Whether there is nothing for an operator to see to."""
        return self.level is HealthLevel.OK

    @property
    def ready(self) -> bool:
        """Whether the daemon takes sessions and jobs."""
        return self.level is not HealthLevel.DOWN

    @property
    def problems(self) -> list[str]:
        """Why it is not healthy, in sentences."""
        return [cause.sentence for cause in self.causes]


@exchange(Section.ADMINISTRATION, ANY_ROLE)
class Health(Request[HealthReply], frozen=True):
    """Asks whether the daemon works. The answer is a round trip through the loop that serves engines."""
