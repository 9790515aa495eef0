"""How many descriptors this process may have, and whether it runs out of them, which the CUDA driver does not say."""

from __future__ import annotations

import os
import resource

# A driver call may open a few files of its own.
_SPARE_DESCRIPTORS = 8
_LINUX_LIMITS = 1024, 4096


def descriptor_limits() -> tuple[int, int]:
    """The soft and the hard limit; those that Linux begins with where a seccomp filter lets nobody ask."""
    try:
        return resource.getrlimit(resource.RLIMIT_NOFILE)
    except OSError:
        return _LINUX_LIMITS


def missing_descriptors() -> str:
    """Return a sentence if this process can open hardly any file more, which the driver does not say; else nothing."""
    limit, _ = descriptor_limits()
    try:
        if len(os.listdir("/proc/self/fd")) < limit - _SPARE_DESCRIPTORS:
            return ""
    except OSError:  # not even that directory
        pass
    return (
        f"This process has nearly all of the {limit} files open that it may, and each chunk of GPU memory is one more: "
        "raise the limit (ulimit -n, LimitNOFILE=)."
    )
