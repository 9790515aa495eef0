"""What several files of tests share: one engine and one server, and a directory for whatever daemon a test likes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.kit.daemon import DaemonProcess
from tests.kit.engine import EngineProcess, wait_connected
from tests.kit.models import make_tiny_llama
from tests.kit.shapes import add_tokenizer
from tests.vllm.engine_server import EngineServer

EXTRA = {
    # A daemon that is silent costs a prompt as much.
    "lookup_deadline_ms": 2000,
    # What these tests are about is which bytes and tokens come back: a machine busy with others may be slow.
    "do_no_harm": False,
}
CONNECT_DEADLINE_S = 60.0


class EngineHome:
    """An engine and a server of one model, and no daemon at first.

    An engine survives what becomes of its daemon, so all files have the same one. A test that ends the engine leaves it
    so: ``engine`` is started when a test asks for it.

    Attributes:
        directory: of the sockets, to which both connect.
        model: the model's, a tiny Llama with a tokenizer.
        daemon: one whose copies can be made to fail; a test may start another in the directory once this one has ended.
    """

    def __init__(self, models: Path) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvoffd-home-", dir="/tmp"))
        self.model = add_tokenizer(make_tiny_llama(models / "model"))
        self.events_endpoint = f"ipc://{self.directory}/engine-events.sock"
        self.daemon = DaemonProcess("256MiB", self.directory, faults=True)
        self._engine = EngineProcess(
            self.model,
            self.directory,
            extra_config={**EXTRA, "hints": "all"},
            # What the engine's policy says of failed loads makes no difference.
            transfer={"kv_load_failure_policy": "fail"},
            events={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.events_endpoint},
            # vLLM sends functions to workers only where this is allowed.
            environ={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
            skip_tokenizer_init=False,
            enable_prompt_embeds=True,
            enable_lora=True,
            max_lora_rank=8,
            # Long prompts are computed in several steps.
            max_num_batched_tokens=256,
            max_num_seqs=8,
            scheduling_policy="priority",
        )
        template = "{% for one in messages %}{{ one.content }}{% endfor %}"
        self._server = EngineServer(self.model, self.directory, EXTRA, max_num_seqs="8", chat_template=template)

    @property
    def engine(self) -> EngineProcess:
        """The engine, running."""
        return self._engine if self._engine.running else self._engine.start()

    def ensure_daemon(self, *engines: EngineProcess | EngineServer) -> None:
        """A daemon runs, and these engines, by default the one, are connected to it."""
        if not self.daemon.running:
            self.daemon.start()
        for one in engines or (self.engine,):
            try:
                wait_connected(self.directory, 1, CONNECT_DEADLINE_S, lambda one=one: one.pids)  # type: ignore[misc]
            except AssertionError as error:
                error.add_note(f"Of its processes {one.pids} run; its log ends so:\n{one.log[-4000:]}")
                raise

    def ensure_no_daemon(self) -> None:
        if self.daemon.running:
            self.daemon.kill()

    def launch_server(self) -> None:
        """Have the server start, which takes long, beside the tests."""
        self._server.launch()

    @property
    def server(self) -> EngineServer:
        """The server, running."""
        return self._server.launch().wait_ready()

    def close(self) -> None:
        self._engine.close()
        self._server.close()
        self.daemon.close()
        shutil.rmtree(self.directory, ignore_errors=True)
