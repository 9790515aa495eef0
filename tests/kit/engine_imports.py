"""What engines have in common when they are forked: vLLM's modules, imported once, and quietly."""

import gc
import os
import signal
from typing import Any

# A test that wants engines may be interrupted before it ends; multiprocessing's server looks for that later.
parent = os.getppid()
signal.signal(signal.SIGALRM, lambda *_: os.getppid() == parent or os._exit(0))
signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
for descriptor in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
# What is imported stays: the garbage collector need not look at it, now or in an engine, where that copies its pages.
gc.disable()
# What else the sampler would compile when an engine is first asked for log probabilities, for seconds.
os.environ["TORCH_COMPILE_DISABLE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # as in ENGINE_ENVIRON; torch reads it at its import

import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector  # noqa: E402
import vllm.entrypoints.launchers.cli_args  # noqa: E402
import vllm.entrypoints.llm  # noqa: E402
import vllm.model_executor.layers.quantization.online.base  # noqa: E402
import vllm.model_executor.models.llama  # noqa: E402
import vllm.v1.attention.backends.cpu_attn  # noqa: E402
import vllm.v1.engine.core  # noqa: E402
import vllm.v1.executor.multiproc_executor  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402, F401
from vllm.config.logging import LoggingConfig  # noqa: E402
from vllm.logger import configure_logging  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

# Each start would look at every module for these kernels, and at every logger: most of the CPU that it takes.
platform: Any = CpuPlatform
platform.register_triton_kernel_overrides()
platform.register_triton_kernel_overrides = classmethod(lambda cls: None)
configure_logging(LoggingConfig())

signal.setitimer(signal.ITIMER_REAL, 0)
signal.signal(signal.SIGALRM, signal.SIG_DFL)
gc.freeze()
gc.enable()
