"""The process behind ``support.engine``: one offline vLLM, driven over a socket. Usage: engine_main.py SOCKET"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Client, Connection
from typing import Any


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

    multiprocessing.get_context = get_forking_context  # type: ignore[assignment]


def build(settings: dict[str, Any]) -> Any:
    """An ``LLM`` of these settings."""
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    if settings.pop("fork"):
        fork_workers()
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
    prompts: list[list[int]],
    max_tokens: int,
    salt: str | None = None,
    transfer: list[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Greedy tokens of every prompt, with log probabilities. ``transfer`` has the kv_transfer_params of each."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            detokenize=False,
            logprobs=1,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        for params in transfer or [None] * len(prompts)
    ]
    inputs = [{"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {}) for prompt in prompts]
    results = []
    for output in llm.generate(inputs, sampling, use_tqdm=False):
        completion = output.outputs[0]
        results.append(
            {
                "tokens": list(completion.token_ids),
                "logprobs": [next(iter(step.values())).logprob for step in completion.logprobs],
                "cached": output.num_cached_tokens,
                "finish": completion.finish_reason,
                "transfer": output.kv_transfer_params,
            }
        )
    return results


def reset(llm: Any, connector: bool = False) -> bool:
    """Clear the engine's own prefix cache, and the connector's when asked."""
    return bool(llm.reset_prefix_cache(reset_connector=connector))


def flip_weights(llm: Any) -> None:
    """Turn every weight matrix upside down, in place; again to have it back. No method of vLLM's is called for it."""

    def flip(worker: Any) -> None:
        for parameter in worker.get_model().parameters():
            parameter.data.copy_(parameter.data.flip(0))

    llm.collective_rpc(flip)


def reload_weights(llm: Any, path: str) -> None:
    """Load the weights of another checkpoint in place, by vLLM's own method."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": path})


def metrics(llm: Any) -> dict[str, float]:
    """The engine's counters and gauges by name."""
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


def cached_by_source(llm: Any) -> dict[str, float]:
    """Prompt tokens that were not computed, by where they came from."""
    name = "vllm:prompt_tokens_cached_by_source"
    return {metric.labels["source"]: metric.value for metric in llm.get_metrics() if metric.name == name}


COMMANDS = {
    "cached_by_source": cached_by_source,
    "flip_weights": flip_weights,
    "generate": generate,
    "metrics": metrics,
    "reload_weights": reload_weights,
    "reset": reset,
}

if __name__ == "__main__":
    main(sys.argv[1])
