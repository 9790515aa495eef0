"""Whether this process runs out of descriptors, which the CUDA driver does not say of itself."""

from __future__ import annotations

import os
import resource

# A driver call may open a few files of its own.
_SPARE_DESCRIPTORS = 8


def missing_descriptors() -> str:
    """Return a sentence if this process can open hardly any file more, which the driver does not say; else nothing."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if len(os.listdir("/proc/self/fd")) < limit - _SPARE_DESCRIPTORS:
            return ""
    except OSError:  # not even that directory
        pass
    return (
        f"This process has nearly all of the {limit} files open that it may, and each chunk of GPU memory is one more: "
        "raise the limit (ulimit -n, LimitNOFILE=)."
    )
