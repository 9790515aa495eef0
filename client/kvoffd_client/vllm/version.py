"""The vLLM releases this connector was tested with."""

from __future__ import annotations

SUPPORTED = ((0, 32), (0, 33))


def release_of(version: str) -> tuple[int, int] | None:
    """Major and minor number of a version string, None when it has none."""
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return None
    return int(parts[0]), int(parts[1])


def require_supported(version: str) -> None:
    """Raise ImportError with a sentence when this vLLM is none of the supported releases."""
    if release_of(version) in SUPPORTED:
        return
    works = " and ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED)
    raise ImportError(
        f"kvoffd's vLLM connector works with vLLM {works}, and this is vLLM {version}: "
        "install one of those, or a kvoffd release that names this one."
    )
