"""Takes the README's two pictures, the page and ``kvoffd-cli top``, of a daemon that a real vLLM uses.

``python -m tests.tools.pictures [DIRECTORY]``: three minutes on two cores; needs chromium and tmux (``make servers``).
"""

from __future__ import annotations

import base64
import random
import re
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.cli.tmux import Tmux
from tests.kit.command import CLI
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import EngineProcess, prompt
from tests.kit.models import make_demo_llama
from tests.kit.ports import free_port
from tests.observe.chromium import Chromium

SECONDS = 120.0
CHATS, FIRST_TOKENS, TURN_TOKENS, MAX_TOKENS = 10, 1200, 300, 2600
COLUMNS, ROWS = 100, 26
OUT = Path(__file__).parents[2] / "deploy" / "pictures"


def chat(engine: EngineProcess, until: float) -> None:
    """Let some users talk: a chat grows by a turn at a time, and begins anew when it is long."""
    chance, chats, number = random.Random(1), [list[int]() for _ in range(CHATS)], 0
    while time.monotonic() < until:
        user = min(chance.randrange(CHATS), chance.randrange(CHATS))  # some talk more than others
        number += 1
        grows = 0 < len(chats[user]) < MAX_TOKENS
        chats[user] = [*chats[user], *prompt(number, TURN_TOKENS)] if grows else prompt(number, FIRST_TOKENS)
        engine.generate([chats[user]], max_tokens=4)


def take(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvoffd-pictures-") as own:
        disk = Path(own, "disk")
        disk.mkdir()
        flags = {"http_address": f"127.0.0.1:{port}", "disk": f"{disk}=1GiB"}
        with DaemonProcess("160MiB", **flags) as daemon, Tmux(COLUMNS, ROWS) as terminal, Chromium() as browser:
            with EngineProcess(make_demo_llama(Path(own, "demo-llama")), daemon.directory, num_blocks=130) as engine:
                browser.open(f"http://127.0.0.1:{port}/")
                terminal.run(CLI, "top", "--directory", str(daemon.directory))
                chat(engine, time.monotonic() + SECONDS)
                (out / "page.png").write_bytes(base64.b64decode(browser.ask("Page.captureScreenshot")["data"]))
                screen = Text.from_ansi(terminal.screen(colours=True))
    console = Console(record=True, width=COLUMNS, file=sys.stderr, force_terminal=True, color_system="truecolor")
    console.print(screen)
    drawn = console.export_svg(title="kvoffd-cli top")
    (out / "top.svg").write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL))  # of another site
    print(f"{out}: page.png, top.svg")


if __name__ == "__main__":
    take(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)
