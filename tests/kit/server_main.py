"""vLLM's OpenAI server, with the second model runner if that is wanted: ``python -m tests.kit.server_main FLAGS``.

Its engine is spawned, as vLLM does on a CPU. Spawned processes import this first, as multiprocessing has them import
the main module. For each change ``forked_server`` takes its place: that imports vLLM no more.
"""

import runpy

from tests.kit import runner_v2

if runner_v2.wanted():
    runner_v2.prepare()
    runner_v2.install()

if __name__ == "__main__":
    runpy.run_module(runner_v2.SERVER, run_name="__main__")
