"""Sizes, durations, rates and counts as people write and read them.

It is in the proto package because both command lines need it, and neither may import the other's package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fractions import Fraction

MAX_SIZE_BYTES = 2**63 - 1
MAX_DURATION_S = 365 * 86400.0

_SIZE_UNITS: dict[str, int] = {
    "b": 1,
    **{f"{letter}b": 1000 ** (power + 1) for power, letter in enumerate("kmgt")},
    **{f"{letter}ib": 1024 ** (power + 1) for power, letter in enumerate("kmgt")},
    # Kubernetes writes 20Gi. "20G" is refused: some tools mean powers of 1000 by it, others of 1024.
    **{f"{letter}i": 1024 ** (power + 1) for power, letter in enumerate("kmgt")},
}
_DURATION_UNITS: dict[str, int | str] = {
    "us": "1/1000000", "µs": "1/1000000", "ms": "1/1000", "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400,
}  # fmt: skip
_SIZE_ADVICE = "write whole bytes or a number with a unit, such as 512MiB, 20GiB or 20GB"
_DURATION_ADVICE = "write seconds or a number with a unit, such as 500ms, 30s or 2m"
# At most 24 digits: Python refuses to convert thousands of them.
_QUANTITY = re.compile(r"\s*([+-]?)([0-9]{1,24}(?:\.[0-9]{1,24})?)\s*([A-Za-zµ]*)\s*")


class UnitError(ValueError):
    """The text is not a size or duration. The message has no capital and no full stop, to be put into a sentence."""


def parse_size(value: str | int) -> int:
    """Return the bytes that ``value`` means: ``"20GiB"``, ``"1.5 GiB"``, ``"20GB"``, ``"4096"`` or 4096.

    Raises:
        UnitError: not a size, negative, or larger than 2**63 - 1 bytes.
    """
    size_bytes = math.floor(_parse(value, (str, int), "size", _SIZE_UNITS, "b", _SIZE_ADVICE))
    if size_bytes > MAX_SIZE_BYTES:
        raise UnitError(f"{quoted(value)} is more than the largest possible size of 2**63 - 1 bytes")
    return size_bytes


def parse_duration(value: str | int | float) -> float:
    """Return the seconds that ``value`` means: ``"500ms"``, ``"30s"``, ``"2m"``, ``"1.5h"``, ``"30"`` or 30.

    Raises:
        UnitError: not a duration, negative, not finite, or longer than a year.
    """
    seconds = _parse(value, (str, int, float), "duration", _DURATION_UNITS, "s", _DURATION_ADVICE)
    if seconds > MAX_DURATION_S:
        raise UnitError(f"{quoted(value)} is longer than the longest allowed duration of a year")
    return float(seconds)


def _parse(
    value: object, kinds: tuple[type, ...], what: str, units: Mapping[str, int | str], default: str, advice: str
) -> Fraction:
    """Return ``value`` as a number, 0 or more, by ``units``; without a unit, by the ``default`` one."""
    from fractions import Fraction  # importing it is too slow for health probes

    known = isinstance(value, kinds) and not isinstance(value, bool)
    match = _QUANTITY.fullmatch(value if isinstance(value, str) else quoted(value)) if known else None
    if match is None:
        raise UnitError(f"{quoted(value)} is not a {what}; {advice}")
    sign, digits, unit = match.groups()
    if unit and unit.lower() not in units:
        raise UnitError(f"{quoted(value)} has the unknown unit {quoted(unit)}; {advice}")
    number = Fraction(f"{sign}{digits}") * Fraction(units[unit.lower() or default])
    if number < 0:
        raise UnitError(f"{quoted(value)} is negative; {advice}")
    return number


def printable(text: str) -> str:
    """Return a client's text for a log or a terminal, with control characters replaced by ``?``."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


def quoted(value: object) -> str:
    """Return the repr of ``value`` for use in a sentence, cut after 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # an int too long for Python to print
        text = "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:76]}..."


def is_host(text: str) -> bool:
    """Return whether a text can be a host's name or address."""
    try:
        text.encode("idna")  # as a resolver does
    except UnicodeError:
        return False
    return bool(text) and text.isprintable() and " " not in text


def exact_size(size_bytes: int) -> str:
    """Return ``size_bytes`` in the largest unit that divides it, as ``parse_size`` reads it: ``20GiB``, ``4097``."""
    for unit, factor in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def exact_duration(seconds: float) -> str:
    """Return ``seconds`` as ``parse_duration`` reads it: ``30s``, ``500ms``, ``2m``."""
    microseconds = round(seconds * 1_000_000)
    for unit, factor in (("h", 3_600_000_000), ("m", 60_000_000), ("s", 1_000_000), ("ms", 1000)):
        if microseconds and microseconds % factor == 0:
            return f"{microseconds // factor}{unit}"
    return f"{microseconds}us" if microseconds else "0s"


def format_size(size_bytes: float) -> str:
    """Return three significant digits and a binary unit: ``20.0 GiB``, ``512 MiB``, ``17 B``."""
    return _scaled(size_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_rate(bytes_per_second: float) -> str:
    """Return three significant digits and a binary unit, as for sizes: ``11.5 GiB/s``."""
    return f"{format_size(bytes_per_second)}/s"


def plural(count: int) -> str:
    """Return the plural ending of an English noun for ``count``."""
    return "" if count == 1 else "s"


def _scaled(amount: float, factor: int, units: tuple[str, ...]) -> str:
    value = float(amount)
    for unit in units[:-1]:
        # A value within 0.5 of the factor would be rounded to the factor: it belongs to the next unit.
        if abs(value) < factor - 0.5:
            return f"{value:.0f} {unit}" if unit == units[0] else f"{_three_digits(value)} {unit}"
        value /= factor
    return f"{_three_digits(value)} {units[-1]}"


def format_count(count: int) -> str:
    """Return grouped digits below ten million, then three significant digits: ``12,345``, ``12.3 M``."""
    if abs(count) < 10_000_000:
        return f"{count:,}"
    return _scaled(count, 1000, ("", "k", "M", "G", "T"))


def count_blocks(count: int) -> str:
    """Return a number of blocks: ``1 block``, ``12,345 blocks``."""
    return f"{format_count(count)} block{plural(count)}"


def percent(part: float, whole: float) -> str:
    """Return ``part`` of ``whole`` as a percentage, 0 or 100 only if exact; a dash if ``whole`` is 0."""
    if whole <= 0:
        return "-"
    share = 100 * part / whole
    if share <= 0:
        return "0 %"
    if share < 0.1:
        return "<0.1 %"
    if part < whole:
        share = min(share, 99.9)
    return "100 %" if share == 100 else f"{share:.1f} %"


def format_duration(seconds: float) -> str:
    """Return a duration for people: ``850 µs``, ``12.3 ms``, ``4.50 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds in (0, math.inf):
        return "∞ s" if seconds else "0 s"
    if seconds < 0.0009995:
        return f"{_three_digits(seconds * 1e6)} µs"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    for large, small, large_unit, small_unit in (
        (86400, 3600, "d", "h"),
        (3600, 60, "h", "min"),
        (60, 1, "min", "s"),
    ):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large} {large_unit} {rest} {small_unit}" if rest else f"{whole // large} {large_unit}"
    return f"{whole} s"


def _three_digits(value: float) -> str:
    for limit, places in ((9.995, 2), (99.95, 1)):
        if abs(value) < limit:
            return f"{value:.{places}f}"
    return f"{value:.0f}"
