"""vLLM is imported here, once: it warns of what is not ours to mend."""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed; `make venv` installs it")
    import vllm.distributed.kv_events
    import vllm.v1.kv_offload.base
    import vllm.v1.request  # noqa: F401
