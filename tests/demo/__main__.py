"""`make demo`: a real vLLM on CPU loses its own cache and gets its prompts back from kvoffd.

Everything is written to .demo/ (model, logs, result.json); the sockets are in a directory of their own under the
system's temporary one, since their paths must be short. All processes are gone at the end, however it ends.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import IO

from tests.demo.scenario import INTERRUPTS, Outcome, Scenario, loadable_tokens
from tests.demo.screen import Screen
from tests.kit.models import make_demo_llama

HOME = Path(".demo")
INTERRUPTED = 130
CLI_TIMEOUT_S = 30.0


def play(screen: Screen, children: ExitStack) -> Outcome:
    """Run the demo and show what came out. Closing ``children`` stops all that was started."""
    logs = HOME / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    (HOME / "result.json").unlink(missing_ok=True)
    logs.mkdir(parents=True)
    sockets = Path(tempfile.mkdtemp(prefix="kvoffd-demo-"))
    children.callback(shutil.rmtree, sockets, ignore_errors=True)
    with screen.step("writing a small Llama with random weights"):
        model = make_demo_llama(HOME / "model")
    scenario = Scenario(model.absolute(), sockets, logs, screen.step, children)
    scenario.start_daemon()
    outcome = scenario.run()
    (HOME / "result.json").write_text(json.dumps(outcome.as_json(), indent=2) + "\n")
    screen.show(outcome)
    print("$ kvoffd-cli stats", flush=True)
    ask(sockets, "stats")
    for name, directory in scenario.daemons.items():
        # Engines that did not share differ in their namespaces' descriptions.
        for command in ("stats", "namespaces"):
            with (logs / f"{name}-{command}.json").open("w") as file:
                ask(directory, command, "--json", output=file)
    scenario.stop_engines()
    return outcome


def ask(directory: Path, *words: str, output: IO[str] | None = None) -> None:
    """Have kvoffd-cli ask the daemon in ``directory``, and print the answer or write it to ``output``."""
    # Without kvoffd's variables, which are meant for the user's own daemon.
    environ = {name: text for name, text in os.environ.items() if not name.startswith("KVOFFD_")}
    command = [Path(sys.executable).with_name("kvoffd-cli"), *words, "--directory", str(directory)]
    subprocess.run(command, check=True, env=environ, timeout=CLI_TIMEOUT_S, stdout=output)


def judge(outcome: Outcome) -> str | None:
    """A sentence when kvoffd did not do what the demo is to show."""
    if not outcome.tokens_equal:
        return "The tokens differ from those of the cold run; please report it, with the directory .demo/logs."
    missed = [
        f"{one.title}: {one.loaded_tokens:,} of {loadable_tokens():,}"
        + (f" ({one.late_lookups} of its lookups had no answer in time)" if one.late_lookups else "")
        for one in outcome.passes[1:]
        if one.loaded_tokens < loadable_tokens()
    ]
    if missed:
        return (
            "Not all tokens came from kvoffd. " + "; ".join(missed) + ".\nOn a machine that is busy with other things "
            "engines may rightly compute instead: try again when it is quiet. Otherwise please report it, with the "
            "directory .demo/logs."
        )
    return None


def main() -> int:
    """Play, clean up, return the exit status: 0 when everything was as promised."""
    screen = Screen()
    # The client logs what it survives, such as a daemon that is not up yet; here the screen tells what matters.
    logging.getLogger("kvoffd_client").addHandler(logging.NullHandler())
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with ExitStack() as children:
            try:
                outcome = play(screen, children)
            finally:
                # A second Ctrl-C must not interrupt the cleaning up, which ends in seconds.
                for number in INTERRUPTS:
                    signal.signal(number, signal.SIG_IGN)
    except AssertionError as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; everything that was started has been stopped.", file=sys.stderr)
        return INTERRUPTED
    if (complaint := judge(outcome)) is not None:
        print(f"\n{complaint}", file=sys.stderr)
        return 1
    print(f"\nAll numbers are in {HOME / 'result.json'}; all processes have been stopped.")
    return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
