"""A headless Chromium, driven by the DevTools protocol over two pipes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from types import TracebackType
from typing import Any

WIDTH, HEIGHT = 1280, 800
PROGRAM = shutil.which("chromium")
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")


def inner_text(element: str) -> str:
    """The JavaScript expression of the text that an element shows; empty if there is none of this id."""
    return f"(document.getElementById({element!r})?.innerText ?? '')"


class Chromium:
    """One page of a browser, of ``WIDTH`` x ``HEIGHT`` pixels."""

    def __init__(self) -> None:
        assert PROGRAM is not None
        self._profile = tempfile.mkdtemp(prefix="kvoffd-chromium-")
        commands, self._commands = os.pipe()
        answers, answers_of_browser = os.pipe()

        def place() -> None:
            """Chromium reads from descriptor 3 and writes to 4."""
            high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (commands, answers_of_browser)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        command = [PROGRAM, *_OPTIONS, f"--user-data-dir={self._profile}", f"--window-size={WIDTH},{HEIGHT}"]
        self._process = subprocess.Popen(
            command, preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(commands)
        os.close(answers_of_browser)
        self._answers = os.fdopen(answers, "rb")
        self._received, self._number, self._session = b"", 0, ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What a command returns; events are passed over."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._received:
                data = self._answers.read1(1 << 16)  # type: ignore[attr-defined]
                assert data, "the browser ended"
                self._received += data
            one, _, self._received = self._received.partition(b"\0")
            if (found := json.loads(one)).get("id") == self._number:
                assert "error" not in found, found
                return dict(found["result"])

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is in the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self, element: str) -> str:
        return str(self.value(inner_text(element)))

    def dark(self, on: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            code = {"Enter": 13, "Tab": 9}[key]
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: TracebackType | type | BaseException | None) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._commands)
        self._answers.close()
        shutil.rmtree(self._profile, ignore_errors=True)
