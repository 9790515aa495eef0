"""A CPU that computes as a GPU does: behind the host, one step after the other.

The second model runner's steps run in a thread, the stream. The connector is called by the host, the worker's main
thread, where vLLM calls it, while steps before may still run; an event that is recorded there happens when the stream
has come to that place. ``control`` sets how late each forward pass begins.
"""

from __future__ import annotations

import copy
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import MethodType
from typing import Any


class Stream:
    """Work of one worker, in the order in which the host launched it.

    Attributes:
        position: is done when the stream has come to where the host is now.
        lag_s: how late each forward pass begins.
        events_at_once: whether events happen at once, as they would with no ordering: a planted fault.
        ahead: steps, since ``control``, that the host launched while the one before was still computed.
        host_s: seconds, of each step since then, that the host spent in the connector before the forward pass.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, initializer=self._begin)
        self._thread: threading.Thread | None = None
        self.position: Future[Any] = Future()
        self.position.set_result(None)
        self.lag_s = 0.0
        self.events_at_once = False
        self.ahead = 0
        self.host_s: list[float] = []

    def _begin(self) -> None:
        self._thread = threading.current_thread()

    def is_current(self) -> bool:
        """Whether the caller is work of the stream."""
        return threading.current_thread() is self._thread

    def launch(self, function: Any, *arguments: Any) -> Future[Any]:
        return self._executor.submit(function, *arguments)


class StreamEvent:
    """Recorded where the host is; as ``kvoffd_client.vllm.kv_memory.RecordedEvent`` is on a GPU."""

    def __init__(self) -> None:
        self._position = STREAM.position

    def synchronize(self) -> None:
        if not STREAM.events_at_once:
            wait([self._position])


STREAM = Stream()


class StreamsConnector:
    """The runner's connector on the stream, where it does nothing but wait for the host's calls of one step."""

    def __init__(self) -> None:
        self.reached: Future[None] = Future()
        self.launched: Future[None] = Future()

    def pre_forward(self, *_: Any) -> None:
        if self.reached.done():
            return  # a dummy run after the step
        self.reached.set_result(None)
        wait([self.launched])
        time.sleep(STREAM.lag_s)

    def no_forward(self, _: Any) -> Any:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        self.reached.set_result(None)
        return EMPTY_MODEL_RUNNER_OUTPUT

    def finish_forward(self) -> None:
        """Nothing: layers call no connector."""

    def set_disabled(self, disabled: bool) -> None:
        """Nothing: what comes next is a dummy run, which has no step."""

    def post_forward(self, *_: Any, **__: Any) -> None:
        """Nothing: the host has called it."""

    def finalize_step(self) -> None:
        """Nothing: of 0.33, after drafts."""


def control(worker: Any, lag_s: float = 0.0, events_at_once: bool = False) -> dict[str, Any]:
    """Set how the stream behaves from the next step on. Return ``ahead`` and ``host_s``, which begin anew."""
    counted = {"ahead": STREAM.ahead, "host_s": STREAM.host_s}
    STREAM.lag_s, STREAM.events_at_once, STREAM.ahead, STREAM.host_s = lag_s, events_at_once, 0, []
    return counted


def install() -> None:
    """Change vLLM's worker and runner, and the connector's worker half."""
    from vllm.v1.outputs import AsyncModelRunnerOutput
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from kvoffd_client.ordered_sender import OrderedSender
    from kvoffd_client.vllm.spec import KvoffdSpec

    execute, sample, drafts = CPUWorker.execute_model, CPUWorker.sample_tokens, CPUWorker.take_draft_token_ids
    write, get_worker = GPUModelRunner.update_requests, KvoffdSpec.get_worker

    class Output(AsyncModelRunnerOutput):
        """A step's output: the stream's, with what the host's calls of the connector gave."""

        def __init__(self, computed: Future[Any], of_connector: Any) -> None:
            self._computed, self._of_connector = computed, of_connector

        def get_output(self) -> Any:
            output = self._computed.result()
            if isinstance(output, AsyncModelRunnerOutput):
                output = output.get_output()
            output = copy.copy(output)
            output.kv_connector_output = self._of_connector
            return output

        def get_kv_connector_output(self) -> Any:
            """Asked by 0.33 where a step failed."""
            return self._of_connector

    class Host:
        """The connector's calls of one worker, in the host's thread."""

        def __init__(self, runner: Any) -> None:
            self.runner, self.connector = runner, runner.kv_connector
            self.update_requests = runner.update_requests  # with the connector's fence before it
            runner.update_requests = MethodType(GPUModelRunner.update_requests, runner)
            runner.steps_on_stream = True
            # vLLM sets a context for it that is the whole process's, while the stream has another.
            self.connector._start_load_kv = self.start_load_kv
            self.finished: set[str] = set()

        def start_load_kv(self) -> None:
            self.connector._pending_load_kwargs = None
            self.connector.kv_connector.start_load_kv(None)

        def execute(self, worker: Any, scheduler_output: Any) -> Any:
            began = time.monotonic()
            STREAM.ahead += not STREAM.position.done()
            self.update_requests(scheduler_output)
            step = StreamsConnector()

            def compute(before: Future[Any]) -> Any:
                before.result()  # after an error nothing is computed
                self.runner.kv_connector = step
                return execute(worker, scheduler_output)

            computed = STREAM.launch(compute, STREAM.position)
            # A step that fails first comes to no such place.
            computed.add_done_callback(lambda _: step.reached.done() or step.reached.set_result(None))
            STREAM.position = step.reached
            try:
                if scheduler_output.total_num_scheduled_tokens == 0:
                    output = self.connector.no_forward(scheduler_output)
                    STREAM.position = computed
                    return output
                self.connector.pre_forward(scheduler_output)
            finally:
                step.launched.set_result(None)
                STREAM.host_s.append(time.monotonic() - began)
            STREAM.position, self.finished = computed, scheduler_output.finished_req_ids
            if self.runner.is_pooling_model:
                return Output(computed, self.connector.post_forward(self.finished))
            return None

        def sample(self, worker: Any, grammar_output: Any) -> Output:
            def compute(before: Future[Any]) -> Any:
                before.result()
                return sample(worker, grammar_output)

            STREAM.position = computed = STREAM.launch(compute, STREAM.position)
            return Output(computed, self.connector.post_forward(self.finished))

    def host_of(worker: Any) -> Host | None:
        runner = worker.model_runner
        if isinstance(getattr(runner, "kv_connector", None), ActiveKVConnector):
            worker.host = Host(runner)
        return getattr(worker, "host", None)

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        host = host_of(self)
        return host.execute(self, scheduler_output) if host else execute(self, scheduler_output)

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        host = host_of(self)
        return host.sample(self, grammar_output) if host else sample(self, grammar_output)

    def take_draft_token_ids(self: Any) -> Any:
        return STREAM.launch(drafts, self).result()

    def update_requests(self: Any, scheduler_output: Any) -> None:
        if STREAM.is_current() or not hasattr(self, "steps_on_stream"):
            write(self, scheduler_output)

    def worker_with_events(self: Any, kv_caches: Any) -> Any:
        worker = get_worker(self, kv_caches)
        worker._sender = OrderedSender(StreamEvent)
        return worker

    CPUWorker.execute_model, CPUWorker.sample_tokens = execute_model, sample_tokens
    CPUWorker.take_draft_token_ids, CPUWorker.control_stream = take_draft_token_ids, control
    GPUModelRunner.update_requests, KvoffdSpec.get_worker = update_requests, worker_with_events
