"""What engines have in common when they are forked: vLLM's modules, imported once, and quietly."""

import os

# What else the sampler would compile when an engine is first asked for log probabilities, for seconds.
os.environ["TORCH_COMPILE_DISABLE"] = "1"
for descriptor in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)

import vllm.entrypoints.llm  # noqa: E402
import vllm.model_executor.models.llama  # noqa: E402
import vllm.v1.engine.core  # noqa: E402
import vllm.v1.executor.multiproc_executor  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402, F401
