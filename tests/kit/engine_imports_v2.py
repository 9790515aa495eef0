"""As ``engine_imports``, for engines with vLLM's second model runner."""

from . import runner_v2

runner_v2.prepare()

from . import engine_imports  # noqa: E402, F401

runner_v2.install()
