"""A vLLM worker in the environment that Ray gives it. Only an engine's processes import it."""

from __future__ import annotations

import os
from typing import Any

from vllm.ray.ray_env import get_env_vars_to_copy
from vllm.v1.worker.cpu_worker import CPUWorker


class RayWorker(CPUWorker):
    """Lacks those of kvoffd's variables that vLLM's Ray executor does not copy to the workers that Ray starts."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        for name in os.environ.keys() - get_env_vars_to_copy():
            if name.startswith(("KVOFFD_", "XDG_")):
                del os.environ[name]
        assert "KVOFFD_DIRECTORY" not in os.environ
        os.chdir("/")
        super().__init__(*arguments, **named)
