"""vLLM is imported here, once: it warns of what is not ours to mend. Without it, or the routers, there is no test."""

from __future__ import annotations

import importlib.util
import warnings

from tests.routers.consumers import ENVIRONMENTS

collect_ignore: list[str] = []
if importlib.util.find_spec("vllm") is None or not ENVIRONMENTS.exists():
    collect_ignore.append("test_engines.py")
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.distributed.kv_events  # noqa: F401
