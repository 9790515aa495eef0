"""Long prompts come back whole from disks and other nodes, and none waits for nothing; by the connector's defaults.

Most tests run with a model that computes nothing and takes a stated time (``light``), so that what loading and
computing cost does not depend on the machine. Nightly they run with a model that computes (``demo``).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit.daemon import DaemonProcess
from tests.kit.engine import (
    BLOCK_TOKENS,
    Completion,
    EngineProcess,
    cached,
    full_blocks,
    prompt,
    tokens,
    wait_connected,
)
from tests.kit.filled_tiers import fill_tiers, wait_serving
from tests.kit.model_double import DOUBLE, RATE, llama_8b
from tests.kit.models import make_demo_llama
from tests.kit.redis_server import RedisServer
from tests.kit.slow_link import SlowLink
from tests.kit.wire import books

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LIGHT, DEMO = "light", "demo"
KINDS = [LIGHT, pytest.param(DEMO, marks=pytest.mark.nightly)]
LAYERS = 4
TOKEN_BYTES = 16384
"""Of both models."""
LENGTHS = [6013, 5003, 4007]
PROMPTS = [prompt(seed, length) for seed, length in enumerate(LENGTHS, 1)]
WARM_UP = [520, 520]
"""Prompts that an engine computes first; the connector knows after two of them how fast it is."""
