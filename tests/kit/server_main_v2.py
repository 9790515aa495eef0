"""vLLM's OpenAI server with the second model runner (``runner_v2``): ``python -m tests.kit.server_main_v2 FLAGS``.

The processes that it spawns import this first, as multiprocessing has them import the main module.
"""

import runpy

from tests.kit import runner_v2

runner_v2.prepare()
runner_v2.install()

if __name__ == "__main__":
    runpy.run_module(runner_v2.SERVER, run_name="__main__")
