"""Carries out doctor's advice on a made-up day, in a second run and in ``trace replay``, and says what came of it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvoffd_proto.findings import Finding
from kvoffd_proto.units import parse_size
from tests.kit.command import run_cli

from .days import BLOCK_TOKENS, DAYS, PAGE_BYTES, Day, Maker, moved_date
from .run import Came, run

POINTS = 2.0
"""Percentage points of the prompts' tokens within which what came is what was promised."""
MORE = 4
"""Times the pool that is tried where doctor advises nothing."""
ADVICE = (
    "pool_too_small", "pool_too_large", "lru_is_better", "thrash", "starving", "crowding", "disk_too_small",
    "disk_writes", "tier_late", "prompts_differ",
)  # fmt: skip
"""Kinds of findings whose fix changes what is computed, or must not."""
AT_LEAST = ("crowding",)
"""Those that promise this much or more."""


@dataclass(frozen=True)
class Tried:
    """What was done on a day, and what came: percentage points of the prompts' tokens that were computed no more.

    Attributes:
        advice: doctor's finding; empty if it had none.
        fix: what was done.
        promised: None if doctor promised nothing.
        came: in the second run.
        replayed: in ``trace replay``; None where that cannot do it.
    """

    day: str
    computed_percent: float
    advice: str
    fix: str
    promised: float | None
    came: float
    replayed: float | None

    @property
    def is_kept(self) -> bool:
        """Whether what was promised came; without advice, whether nothing helped."""
        came = [one for one in (self.came, self.replayed) if one is not None]
        if self.promised is None:
            return not self.advice and max(came) <= POINTS
        if self.advice in AT_LEAST:
            return all(one >= self.promised - POINTS for one in came)
        return all(abs(one - self.promised) <= POINTS for one in came)


def try_day(name: str, size: int, place: Path) -> list[Tried]:
    """Run a day, and then for each advice once more; without any, with what might help. ``place`` is for files."""
    day, trace = DAYS[name](Maker(size)), place / "first.jsonl.gz"
    came = run(day, place / "disk", trace)
    advice = [one for one in came.findings if one.check in ADVICE and one.gain is not None]
    tried = [_carry_out(one, name, size, day, came, trace, place / f"{at}") for at, one in enumerate(advice)]
    return tried or _in_vain(day, came, trace, place)


def _carry_out(advice: Finding, name: str, size: int, day: Day, came: Came, trace: Path, place: Path) -> Tried:
    place.mkdir()
    if advice.check == "prompts_differ":
        second = moved_date(Maker(size))
        after = run(second, place / "disk", place / "trace.jsonl.gz")
        replayed = _found(place / "trace.jsonl.gz", second) - _found(trace, day)
    elif advice.fix.startswith("kvoffd-cli "):
        after = run(day, place / "disk", commands=[shlex.split(advice.fix)[1:]])
        replayed = None
    else:
        ((setting, value),) = re.findall(r'^(\w+) = "([^"]+)"', advice.fix)
        second = _with(day, setting, value)
        after = run(second, place / "disk")
        replayed = None if setting.endswith("deadline") else _found(trace, second) - _found(trace, day)
    return _tried(day, came, advice.check, advice.fix, advice.gain, after, replayed)


def _in_vain(day: Day, came: Came, trace: Path, place: Path) -> list[Tried]:
    other = "learned" if _policy(day) == "lru" else "lru"
    tried = []
    for what, second in (
        (f"{MORE} times the pool", replace(day, pool_blocks=MORE * day.pool_blocks)),
        (other, _with(day, "eviction_policy", other)),
    ):
        after = run(second, place / what)
        tried.append(_tried(day, came, "", what, None, after, _found(trace, second) - _found(trace, day)))
    return tried


def _tried(
    day: Day, before: Came, check: str, fix: str, promised: float | None, after: Came, replayed: float | None
) -> Tried:
    all_tokens = sum(prompt.tokens for together in day.rounds for _, prompt in together)
    keys = sum(len(prompt.blocks) for together in day.rounds for _, prompt in together)
    if replayed is not None:  # percentage points of the keys, as replay counts
        replayed *= keys * BLOCK_TOKENS / all_tokens
    came = before.computed_percent - after.computed_percent
    return Tried(day.name, before.computed_percent, check, fix.partition(";")[0], promised, came, replayed)


def _policy(day: Day) -> str:
    return day.settings.get("eviction_policy", "learned")


def _with(day: Day, setting: str, value: str) -> Day:
    if setting == "pool_size":
        return replace(day, pool_blocks=parse_size(value) // (day.block_bytes + PAGE_BYTES))
    return replace(day, settings=day.settings | {setting: value})


def _found(trace: Path, day: Day) -> float:
    """Percentage of the keys that a daemon with this day's settings would find, by ``trace replay``."""
    words = ["--blocks", str(day.pool_blocks), "--policy", _policy(day)]
    if day.store and day.store_bytes_per_second is None:  # a disk that has all
        words += ["--disk", "1000x", "--disk-write", "always"]
    elif "disk" in day.settings:
        words += ["--disk", day.settings["disk"], "--disk-write", day.settings["disk_write"]]
    done = run_cli("trace", "replay", str(trace), *words, "--json")
    assert not done.returncode, done.stderr
    (row,) = json.loads(done.stdout)["results"]
    return float(row["hit_percent"])


def rows(tried: Sequence[Tried]) -> list[list[str]]:
    """Rows of a table."""

    def points(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    return [
        [
            one.day, f"{one.computed_percent:.1f} %", one.advice or "none", f"`{one.fix}`", points(one.promised),
            points(one.came), points(one.replayed), "yes" if one.is_kept else "no",
        ]
        for one in tried
    ]  # fmt: skip
