"""vLLM's OpenAI server, with the second model runner if that is wanted: ``python -m tests.kit.server_main FLAGS``.

Its engine is forked, as vLLM does on GPUs: until it serves that takes 18 s of a CPU instead of 42. Every night it is
spawned, as vLLM does on a CPU. Spawned processes import this first, as multiprocessing has them import the main module.
"""

import runpy

from tests.kit import engine_main, runner_v2
from tests.kit.amount import TIMES

if runner_v2.wanted():
    runner_v2.prepare()
    runner_v2.install()

if __name__ == "__main__":
    if TIMES == 1:
        engine_main.fork_workers()
        engine_main.without_tiles()
    runpy.run_module(runner_v2.SERVER, run_name="__main__")
