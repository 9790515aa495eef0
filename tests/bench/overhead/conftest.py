"""vLLM, torch and their friends warn while they are imported; that is not ours to fix, so it happens here, once."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.core.sched.scheduler  # noqa: F401
