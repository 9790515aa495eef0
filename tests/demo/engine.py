"""A real vLLM engine as a process of its own, driven by lines of JSON.

Started with one argument, a JSON object of `LLM` arguments. Reads requests from stdin and answers each with one line
on stdout; everything vLLM itself prints goes to stderr. The first line,
`{"ready": true}`, comes when the model is loaded. Requests: `{"op": "generate", "prompt": [token ids], "max_tokens":
n}`, `{"op": "reset"}` (the engine forgets its own prefix cache), and end of file, which ends it in good order.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import LLM

RESET_DEADLINE_S = 30.0
RESET_POLL_S = 0.05


def generate(llm: LLM, prompt: list[int], max_tokens: int) -> dict[str, object]:
    """Run one prompt greedily. Time to first token is vLLM's own: from the request's arrival to its first token."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    before = external_hits(llm)
    output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
    if output.metrics is None:
        raise RuntimeError("vLLM gave no metrics for the request; its statistics must be on (disable_log_stats=False)")
    return {
        "ttft_ms": output.metrics.first_token_latency * 1000.0,
        "loaded_tokens": external_hits(llm) - before,
        "cached_tokens": output.num_cached_tokens or 0,
        "tokens": list(output.outputs[0].token_ids),
    }


def external_hits(llm: LLM) -> int:
    """Prompt tokens that came through the connector since the start, not from the engine's own prefix cache."""
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:external_prefix_cache_hits")


def reset(llm: LLM) -> dict[str, object]:
    """Drop the engine's own prefix cache. vLLM refuses while blocks are in use, so ask until the deadline."""
    deadline = time.monotonic() + RESET_DEADLINE_S
    while not llm.reset_prefix_cache():
        if time.monotonic() > deadline:
            raise RuntimeError(f"vLLM did not reset its prefix cache within {RESET_DEADLINE_S:.0f} s")
        time.sleep(RESET_POLL_S)
    return {"reset": True}


def serve(llm: LLM, requests: IO[str], replies: IO[str]) -> None:
    """Answer every request line until end of file."""
    for line in requests:
        request = json.loads(line)
        if request["op"] == "generate":
            reply = generate(llm, request["prompt"], request["max_tokens"])
        elif request["op"] == "reset":
            reply = reset(llm)
        else:
            raise ValueError(f"unknown request {request['op']!r}; generate and reset are known")
        print(json.dumps(reply), file=replies, flush=True)


def main() -> None:
    """Load the model, say so, serve."""
    # Ctrl-C goes to the whole terminal; who started this process decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM

    llm = LLM(**json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=replies, flush=True)
    serve(llm, sys.stdin, replies)


if __name__ == "__main__":
    main()
