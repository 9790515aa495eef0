"""The process behind ``tests.kit.engine``: one offline vLLM, driven over a socket. Usage: engine_main.py SOCKET"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any


def run(address: str, log: str, environ: dict[str, str], fork: bool) -> None:
    """Be the engine's process, in a session of its own, forked as it is or begun anew."""
    os.setsid()
    for descriptor, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        os.dup2(os.open(path, flags), descriptor)
    os.dup2(1, 2)
    if not fork:
        os.execve(sys.executable, [sys.executable, __file__, address], environ)
    os.environ.clear()
    os.environ.update(environ)
    fork_workers()
    sleep_between_looks()
    without_tiles()
    main(address)


def main(address: str) -> None:
    """Build the engine from the first message, then answer ``(command, arguments)`` until the other end is closed."""
    with Client(address, family="AF_UNIX") as connection:
        settings = connection.recv()
        try:
            serve(connection, build(settings))
        except EOFError:
            return


def fork_workers() -> None:
    """Have vLLM fork its engine core and workers, as it does on GPUs, instead of spawning them as it does on CPU.

    Each spawned process imports torch and vLLM again, which takes most of the 25 seconds of CPU that a start takes.
    """
    get_context = multiprocessing.get_context

    def get_forking_context(method: str | None = None) -> Any:
        return get_context("fork" if method == "spawn" else method)

    multiprocessing.get_context = get_forking_context


def sleep_between_looks() -> None:
    """Have the processes of a tensor parallel engine sleep between two looks at each other's messages.

    vLLM's call sched_yield() instead. With two of them on two CPUs Linux 6.18 gave a daemon in another session no CPU
    for 10 s and longer (run_delay in its schedstat). The engine rightly went on without it, and the test failed.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(0.0001)


def without_tiles() -> None:
    """Have vLLM see a CPU without AMX, so that engines do the same on every machine.

    With it vLLM 0.32 uses AMX for bfloat16 without asking the kernel, which is SIGILL where nobody else has asked. It
    knows no latent attention in float32 then.
    """
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False


def keep_prefix_cache() -> None:
    """Have vLLM keep its prefix cache with latent attention too, for which its CPU platform turns it off."""
    from vllm.platforms.cpu import CpuPlatform

    update: Any = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        update(cls, vllm_config)
        vllm_config.cache_config.enable_prefix_caching = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[assignment]


def build(settings: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    if settings.get("enable_prefix_caching"):
        keep_prefix_cache()
    if transfer := settings.pop("kv_transfer_config", None):
        settings["kv_transfer_config"] = KVTransferConfig(**transfer)
    if events := settings.pop("kv_events_config", None):
        settings["kv_events_config"] = KVEventsConfig(**events)
    return LLM(**settings)


def serve(connection: Connection[Any, Any], llm: Any) -> None:
    """Answer commands. An exception goes back as its text."""
    connection.send(("ready", None))
    while True:
        command, arguments = connection.recv()
        try:
            connection.send(("ok", COMMANDS[command](llm, **arguments)))
        except Exception as error:
            connection.send(("error", f"{type(error).__name__}: {error}"))


def generate(
    llm: Any,
    prompts: list[Any],
    max_tokens: int | list[int],
    salt: str | None = None,
    sampling: dict[str, Any] | None = None,
    transfer: list[dict[str, Any]] | None = None,
    adapter: tuple[str, int, str] | None = None,
    hints: dict[str, Any] | None = None,
    preempt: bool = False,
    abort_file: str | None = None,
) -> list[dict[str, Any]]:
    """Greedy tokens of every prompt, with their log probabilities. A prompt is token ids, or an input of vLLM's.

    ``max_tokens`` is of all, or of each.
    ``sampling`` overrides fields of SamplingParams; of several samples of a prompt the tokens come one after the other.
    ``transfer`` has the kv_transfer_params of each, ``adapter`` name, id and path of the LoRA adapter of all, and
    ``hints`` their ``kv_hints``. With ``preempt`` all are pre-empted once, when each has its first token. All but the
    last are aborted, and have no answer, once ``abort_file`` is there.
    """
    import msgspec
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.kv_hints import KvHintsEnvelope

    limits = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
    wanted = {"temperature": 0, "detokenize": False, "logprobs": 1, "ignore_eos": True}
    wanted.update(sampling or {})
    if "structured_outputs" in wanted:
        wanted["structured_outputs"] = StructuredOutputsParams(**wanted["structured_outputs"])
    inputs = [input_of(prompt) | ({"cache_salt": salt} if salt else {}) for prompt in prompts]
    every = [
        SamplingParams(
            **{"max_tokens": limit, **wanted}, extra_args={"kv_transfer_params": params} if params is not None else None
        )
        for limit, params in zip(limits, transfer or [None] * len(prompts), strict=True)
    ]
    lora_request = LoRARequest(*adapter) if adapter else None
    add = partial(type(llm.llm_engine).add_request, llm.llm_engine)
    envelope = msgspec.convert(hints, KvHintsEnvelope) if hints else None
    llm.llm_engine.add_request = partial(add, kv_hints=envelope)  # LLM.generate() has no argument for them
    llm.llm_engine.step = partial(type(llm.llm_engine).step, llm.llm_engine)
    if preempt:
        llm.llm_engine.step = preempting(llm.llm_engine)
    elif abort_file is not None:
        llm.llm_engine.step = aborting(llm.llm_engine, Path(abort_file))
    return [
        {
            "tokens": [token for sample in output.outputs for token in sample.token_ids],
            "logprobs": [next(iter(step.values())).logprob for sample in output.outputs for step in sample.logprobs],
            "likeliest": [
                {token: one.logprob for token, one in step.items()}
                for sample in output.outputs
                for step in sample.logprobs
            ],
            "cached": output.num_cached_tokens,
            "finish": output.outputs[0].finish_reason,
            "first_token_s": output.metrics.first_token_latency if output.metrics else 0.0,
            "queued_at": output.metrics.queued_ts if output.metrics else 0.0,
            "scheduled_at": output.metrics.scheduled_ts if output.metrics else 0.0,
            "first_token_at": output.metrics.first_token_ts if output.metrics else 0.0,
            "transfer": output.kv_transfer_params,
        }
        for output in llm.generate(inputs, every, use_tqdm=False, lora_request=lora_request)
    ]


def stream(llm: Any, parts: list[list[int]], max_tokens: int) -> list[tuple[list[int], int]]:
    """Greedy tokens after each part of a prompt that comes in parts (vLLM's streaming input), and its cached tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    tasks, name, found = engine.get_supported_tasks(), "", []
    for part in parts:
        inputs = {"prompt_token_ids": part}
        request = engine.input_processor.process_inputs("stream", inputs, sampling, tasks, resumable=True)
        if not name:
            engine.input_processor.assign_request_id(request)
            name = request.request_id
        request.request_id, request.external_req_id = name, "stream"
        engine.output_processor.add_request(request, None, None, 0)
        engine.engine_core.add_request(request)
        tokens: list[int] = []
        cached = 0
        while len(tokens) < max_tokens:
            for output in engine.step():
                tokens += output.outputs[0].token_ids
                cached = output.num_cached_tokens
        found.append((tokens, cached))
    engine.abort_request([name], internal=True)
    return found


def preempting(engine: Any) -> Callable[[], Any]:
    """Return the engine's ``step``, after which all requests are pre-empted once, when each has its first token."""
    left = [True]

    def step() -> Any:
        outputs = type(engine).step(engine)
        running = engine.output_processor.request_states.values()
        if left and running and not any(one.is_prefilling for one in running):
            left.clear()
            with suppress(Exception):  # vLLM refuses where stores hold blocks, once it has pre-empted them
                engine.reset_prefix_cache(reset_running_requests=True)
        return outputs

    return step


def aborting(engine: Any, file: Path) -> Callable[[], Any]:
    """Return the engine's ``step``, before which all requests but the last are aborted once this file is there."""

    def step() -> Any:
        *others, _ = engine.output_processor.request_states
        if others and file.exists():
            engine.abort_request(others, internal=True)
        return type(engine).step(engine)

    return step


def input_of(prompt: Any) -> dict[str, Any]:
    """vLLM's input for token ids, for an array of embeddings (tokens, hidden size), or what is one already."""
    if isinstance(prompt, dict):
        return prompt
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt}
    import torch

    return {"prompt_embeds": torch.from_numpy(prompt)}


def abort(llm: Any, prompt: list[int], steps: int) -> None:
    """Begin a request and abort it after so many steps of the engine."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    sampling = SamplingParams(max_tokens=200, temperature=0, detokenize=False, ignore_eos=True)
    internal = engine.add_request("aborted", {"prompt_token_ids": prompt}, sampling)
    for _ in range(steps):
        engine.step()
    engine.abort_request([internal], internal=True)


def abort_each(
    llm: Any, prompts: list[list[int]], at_once: int, most_s: float, transfer: list[dict[str, Any]] | None = None
) -> None:
    """Begin requests, ``at_once`` of them at a time, and abort each after a random time of up to ``most_s``.

    ``transfer`` has the kv_transfer_params of each.
    """
    from random import Random

    from vllm import SamplingParams

    engine, rng = llm.llm_engine, Random(len(prompts))
    params = transfer or [None] * len(prompts)
    for first in range(0, len(prompts), at_once):
        begun = []
        for at in range(first, min(first + at_once, len(prompts))):
            extra = {"kv_transfer_params": params[at]} if params[at] is not None else None
            sampling = SamplingParams(
                max_tokens=200, temperature=0, detokenize=False, ignore_eos=True, extra_args=extra
            )
            begun.append(engine.add_request(f"abort-{at}", {"prompt_token_ids": prompts[at]}, sampling))
        rng.shuffle(begun)
        for internal in begun:
            time.sleep(rng.uniform(0, most_s))
            engine.abort_request([internal], internal=True)


def embed(llm: Any, prompts: list[list[int]]) -> list[tuple[list[float], int]]:
    """The embedding of every prompt, by a pooling model, and how many of its tokens were not computed."""
    outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
    return [(list(output.outputs.embedding), output.num_cached_tokens) for output in outputs]


def load_adapter(llm: Any, adapter: tuple[str, int, str]) -> None:
    """Load a LoRA adapter in place, as a server does. Its requests say nothing of that."""
    from vllm.lora.request import LoRARequest

    llm.llm_engine.add_lora(LoRARequest(*adapter, load_inplace=True))


def nap(llm: Any, level: int) -> None:
    llm.sleep(level)
    llm.wake_up()


def reset(llm: Any, connector: bool = False) -> bool:
    """Clear the engine's own prefix cache, and the connector's when asked."""
    return bool(llm.reset_prefix_cache(reset_connector=connector))


def flip_weights(llm: Any) -> None:
    """Turn every weight matrix upside down, in place; again to have it back. No method of vLLM's is called for it."""

    def flip(worker: Any) -> None:
        for parameter in worker.get_model().parameters():
            parameter.data.copy_(parameter.data.flip(0))

    llm.collective_rpc(flip)


def kv_pages(llm: Any) -> list[list[list[list[bytes]]]]:
    """Digests of the pages of the KV cache by worker, group, layer and block, from the workers' own memory."""

    def read(worker: Any) -> list[list[list[bytes]]]:
        from hashlib import sha256

        from vllm.distributed.kv_transfer import get_kv_transfer_group

        client = get_kv_transfer_group().connector_worker.worker._client
        registration, found = client._registration, []
        for pages in registration.groups:
            layers = []
            for page in pages:
                place = registration.tensors[page.tensor]
                view = registration.memories[place.segment].view
                starts = [place.offset_bytes + block * place.stride_bytes for block in range(place.num_blocks)]
                layers.append([sha256(view[at : at + page.page_bytes]).digest() for at in starts])
            found.append(layers)
        return found

    answers: list[list[list[list[bytes]]]] = llm.collective_rpc(read)
    return answers


def reload_weights(llm: Any, path: str) -> None:
    """Load the weights of another checkpoint in place, by vLLM's own method."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": path})


def metrics(llm: Any) -> dict[str, float]:
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


def control_stream(llm: Any, **settings: Any) -> dict[str, Any]:
    """Set how the workers' emulated streams behave. What is returned is the first worker's."""
    answers: list[dict[str, Any]] = llm.collective_rpc("control_stream", kwargs=settings)
    return answers[0]


def tokens_by_source(llm: Any, *, cached: bool) -> dict[str, float]:
    """Prompt tokens by where they came from: all by vLLM's coarse sources, or the cached ones by finer ones."""
    name = f"vllm:prompt_tokens_{'cached_' * cached}by_source"
    return {metric.labels["source"]: metric.value for metric in llm.get_metrics() if metric.name == name}


COMMANDS = {
    "abort": abort,
    "abort_each": abort_each,
    "control_stream": control_stream,
    "embed": embed,
    "flip_weights": flip_weights,
    "generate": generate,
    "kv_pages": kv_pages,
    "load_adapter": load_adapter,
    "metrics": metrics,
    "nap": nap,
    "reload_weights": reload_weights,
    "reset": reset,
    "stream": stream,
    "tokens_by_source": tokens_by_source,
}

if __name__ in ("__main__", "__mp_main__"):  # a new process of an engine, as vLLM spawns them for its core and workers
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.kit import runner_v2

    if runner_v2.wanted():
        runner_v2.prepare()
        runner_v2.install()

if __name__ == "__main__":
    main(sys.argv[1])
