"""Whether the cache pays off, in a sentence: doctor, ``top`` and the page say the same."""

from __future__ import annotations

from typing import NamedTuple

from kvoffd_proto.stats import MISS_REASONS, DaemonStats, HitCurve, Window
from kvoffd_proto.units import format_count, format_size, percent, plural, printable

MIN_LOOKUPS = 100
"""Least number of lookups for statistics to be meaningful."""
MIN_WHEN_FULL = 10
"""The same for a pool that has evicted."""
FULL_POOL = 0.8
"""Readable share of a pool from which it counts as full."""
POINTS = 1.0
"""Percentage points of the hit ratio that justify a finding."""
PAYS_PERCENT = 1.0
"""Least percentage of needed tokens that must be loaded for the cache to pay off."""
OWN_SHARE = 0.9
"""Share of prompts' tokens in engines' own caches from which those caches suffice."""


FOR_SPACE = ("evicted", "rejected", "no_space")
"""Reasons of misses that more memory would end."""
TOO_LATE = ("tier_late", "tier_failed", "not_loaded")
"""Reasons of misses of keys that only a tier had: they did not come in time, or at all."""
PERHAPS_FOR_SPACE = ("after_gap", "forgotten", *TOO_LATE)
"""Reasons of misses that more memory may end: the block before was missing, the key was evicted too long ago to be
remembered, or a larger pool would have had it sooner than the tier."""


class Verdict(NamedTuple):
    """``paying_off`` is None if there were too few lookups."""

    paying_off: bool | None
    sentence: str


def judge(stats: DaemonStats) -> Verdict:
    """Judge by all traffic since the daemon's start."""
    traffic = stats.since_start
    if not enough_lookups(stats):
        lookups = f"{format_count(traffic.lookups)} lookup{plural(traffic.lookups)}" if traffic.lookups else "no lookup"
        return Verdict(None, f"Too early to say whether it pays off: {lookups} so far, {MIN_LOOKUPS} are needed.")
    pays = 100 * _loaded_share(traffic) >= PAYS_PERCENT
    if pays:
        # The tokens are unknown if the groups' ``tokens_per_block`` are.
        tokens, nbytes = traffic.loaded_tokens, traffic.loaded_bytes
        what = f"{format_count(tokens)} tokens" if tokens else format_size(nbytes)
        sentence = f"Paying off: engines loaded {what} instead of computing them."
        minute = stats.last_minute
        if minute.lookups and not minute.loaded_keys:
            sentence += f" Nothing of the last minute's {format_count(minute.lookups)} lookup{plural(minute.lookups)}."
    else:
        sentence = f"Not paying off: {_why_not(stats)}"
    return Verdict(pays, sentence + doubt(stats))


def enough_lookups(stats: DaemonStats) -> bool:
    """Return whether there were enough lookups to judge. A pool that has evicted, or rejected, is judged early."""
    traffic = stats.since_start  # a judgement must not be taken back once the pool is cleared
    lacked_space = traffic.evicted_blocks or traffic.rejected_keys
    return traffic.lookups >= (MIN_WHEN_FULL if lacked_space else MIN_LOOKUPS)


def doubt(stats: DaemonStats) -> str:
    """Return a sentence that says how sure a judgement by few lookups is; empty for enough of them."""
    traffic = stats.since_start
    points = doubt_points(traffic)
    return f" From only {traffic.lookups} lookups: give or take {points:.0f} percentage points." if points else ""


def doubt_points(traffic: Window) -> float:
    """Return half the width of the 95 % interval (Agresti and Coull) of the loaded share; 0 for enough lookups."""
    if traffic.lookups >= MIN_LOOKUPS:
        return 0.0
    count = traffic.lookups + 4
    share = (_loaded_share(traffic) * traffic.lookups + 2) / count
    return float(200 * (share * (1 - share) / count) ** 0.5)


def missed_for_space(traffic: Window) -> float:
    """Return the share of the keys asked for that were missed for want of space."""
    return sum(traffic.misses.get(reason, 0) for reason in FOR_SPACE) / max(1, traffic.asked_keys)


def most_gain(traffic: Window) -> float:
    """Return the most percentage points of needed keys that more memory could bring, by why they were missed."""
    missed = sum(traffic.misses.get(reason, 0) for reason in FOR_SPACE + PERHAPS_FOR_SPACE)
    return 100 * missed / max(1, traffic.asked_keys - traffic.not_needed_keys)


def own_suffices(traffic: Window) -> bool:
    """Return whether engines' own caches have nearly all."""
    own, every, _ = _in_own_caches(traffic)
    return own >= OWN_SHARE * every > 0


def _in_own_caches(traffic: Window) -> tuple[int, int, str]:
    """Return how much engines' own caches had, of how much, and of what: tokens, or keys if they report no prompts."""
    if total := traffic.all_prompt_tokens:
        return traffic.prompt_tokens.get("engine", 0), total, "the prompts' tokens"
    return traffic.not_needed_keys, traffic.asked_keys, "the keys asked for"


def needed_tokens(traffic: Window) -> int:
    """Return the tokens of prompts that engines neither had nor got elsewhere, as they report them; if they report no
    prompts, ``lacked_tokens``, which are at least those that were loaded."""
    if total := traffic.all_prompt_tokens:
        return total - traffic.prompt_tokens.get("engine", 0) - traffic.prompt_tokens.get("other", 0)
    return max(lacked_tokens(traffic), traffic.loaded_tokens)


def lacked_tokens(traffic: Window) -> int:
    """Return about how many tokens of lookups engines did not have in their own caches: in whole blocks, and by the
    share of the keys."""
    return round(traffic.asked_tokens * (1 - traffic.not_needed_keys / max(1, traffic.asked_keys)))


def repeats(curve: HitCurve | None) -> bool:
    """Return whether prompts repeat, as far as ten times the memory would find them."""
    return curve is None or not curve.asked_tokens or most_of(curve) >= POINTS


def most_of(curve: HitCurve | None) -> float:
    """Return the hit ratio of lru in percent with the largest pool that is estimated."""
    return 100 * max(curve.lru_hit_ratio.values(), default=0.0) if curve is not None else 0.0


def _loaded_share(traffic: Window) -> float:
    """Return the loaded share of the tokens that engines did not have; of the keys, if they report no prompts."""
    if traffic.all_prompt_tokens:
        return traffic.loaded_prompt_tokens / max(1, needed_tokens(traffic))
    return traffic.loaded_keys / max(1, traffic.asked_keys - traffic.not_needed_keys)


def _why_not(stats: DaemonStats) -> str:
    traffic = stats.since_start
    count, every, what = _in_own_caches(traffic)
    own = f"the engines' own caches had {percent(count, every)} of {what}"
    if own_suffices(traffic):
        return f"{own}."
    if not traffic.stored_blocks:
        return "engines stored nothing: their prompts are shorter than a block, or kv_role is kv_consumer."
    if not repeats(stats.curve):
        found = f"{most_of(stats.curve):.1f} % would be found with ten times the memory"
        return f"{own}, and the rest does not repeat: {found}." if count else f"prompts do not repeat: {found}."
    reason, keys = max(traffic.misses.items(), key=lambda item: item[1], default=("", 0))
    if not reason:
        return "no key was missed."
    why = MISS_REASONS.get(reason, printable(reason))
    return f"{percent(keys, traffic.asked_keys)} of the keys asked for were missed: {why}."
