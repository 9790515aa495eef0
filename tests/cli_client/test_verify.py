"""``kvoffd-cli verify`` against a made-up endpoint: what is compared, and what is said of servers that do not fit."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from kvoffd_client.cli import endpoint, verify
from kvoffd_client.cli.endpoint import Answer
from kvoffd_client.cli.verify import Case, OutputDifference, difference
from tests.kit.closing import ServerThread, ThreadsServer
from tests.kit.command import Done, run_cli_here

CONNECTED = "vllm:kvoffd_connected 1.0\n"
PROGRESS = re.compile("(computing|loading) prompt|emptying|waiting until|pushing out")
CONFIGURED = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="10"} 1.0\n'


def answer(*tokens: str, first: float = -0.5, other: float = -9.0, cached: int | None = 0) -> Answer:
    """Tokens, of which the first has this log probability, and the token ``x`` instead that of ``other``."""
    logprobs = [first] + [-0.5] * (len(tokens) - 1)
    likeliest = [{token: logprob, "x": other} for token, logprob in zip(tokens, logprobs, strict=True)]
    return Answer([*tokens], logprobs, likeliest, 100, cached)


def case(computed: Answer, own: Answer, loaded: Answer) -> Case:
    return Case({}, computed, own, {"1": loaded}, {"1": 64})


def test_what_differs_and_by_how_much() -> None:
    ab = answer("a", "b")
    assert difference(ab, answer("a", "b")) == OutputDifference(None, 0.0, 0.0)
    assert difference(ab, answer("a", "b", first=-0.75)) == OutputDifference(None, 0.0, 0.25)
    assert difference(answer("a", "b", other=-0.625), answer("a", "x")) == OutputDifference(1, 0.125, 0.0)
    assert difference(ab, answer("a", "unlikely")) == OutputDifference(1, inf, 0.0)
    assert difference(ab, answer("a")) == OutputDifference(1, inf, 0.0)


@pytest.mark.parametrize(
    ("verdict", "computed", "own", "loaded"),
    [
        ("same", answer("a", "b"), answer("a", "b"), answer("a", "b", first=-0.51)),
        ("fault", answer("a", "b"), answer("a", "b"), answer("a", "b", first=-0.53)),
        ("tie", answer("a", "b", other=-0.51), answer("a", "b"), answer("a", "x")),
        ("fault", answer("a", "b", other=-0.53), answer("a", "b", other=-0.53), answer("a", "x")),
        ("fault", answer("a", "b", other=-0.51), answer("a", "b"), answer("a", "x", first=-0.53)),
        ("tie", answer("a", "b"), answer("a", "x"), answer("a", "x")),
        ("unclear", answer("a", "b"), answer("a", "c"), answer("a", "x")),
        ("unclear", answer("a", first=nan), answer("a", first=nan), answer("a", first=nan)),
        ("unclear", answer("a", other=nan), answer("a"), answer("a")),
        ("unclear", answer("a"), answer("a", first=nan), answer("a", first=nan)),
        ("fault", answer("a"), answer("a"), answer("a", first=nan)),
        ("fault", answer("a"), answer("a"), answer("a", first=-inf)),
        ("same", answer("a"), answer("a", first=nan), answer("a", other=-inf)),
    ],
)
def test_a_tie_is_told_from_a_fault(verdict: str, computed: Answer, own: Answer, loaded: Answer) -> None:
    assert case(computed, own, loaded).judge(0.02)[0] == verdict


def test_a_fault_says_what_differs() -> None:
    def words(loaded: Answer) -> str:
        return case(answer("a", "b"), answer("a", "b"), loaded).judge(0.02)[1]

    assert words(answer("a")) == "FAULT: 1 tokens, not 2"
    assert words(answer("a", "unlikely")) == "FAULT: token 1 is another, and not among the 5 likeliest"
    assert words(answer("a", "x")) == "FAULT: another token 1, 8.500 nats less likely"
    assert words(answer("a", "b", first=-0.75)) == "FAULT: 0.250 nats apart"


def test_a_prompt_of_which_nothing_was_loaded_is_not_judged() -> None:
    assert Case({}, answer("a"), answer("a"), {"1": answer("b")}).judge(0.02) == ("unclear", "nothing was loaded")


class Vllm(BaseHTTPRequestHandler):
    """An engine that answers ``a b``, and remembers what it was asked.

    Attributes:
        asked: path and body of each request.
        held: prompts in its own cache, with their salts; those in kvoffd are in ``stored``.
        breaks: writes an answer in place of the usual one.
    """

    asked: list[tuple[str, dict[str, Any]]]
    held: set[str]
    stored: set[str]
    breaks: Callable[[Vllm, dict[str, Any]], bool]
    metrics = CONNECTED
    dev = True
    usage = True
    connector = True

    def do_GET(self) -> None:
        pages = {
            "/v1/models": {"data": [{"id": "llama", "root": "/models/llama"}]},
            "/version": {"version": "0.32.0"},
        }
        if self.path == "/metrics":
            self.send(200, self.metrics)
        elif self.path == "/reset_prefix_cache":
            self.send(405 if self.dev else 404, "")
        else:
            self.send(200 if self.path in pages else 404, json.dumps(pages.get(self.path, {})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        self.asked.append((self.path, body))
        if type(self).breaks(self, body):
            return
        if self.path == "/reset_prefix_cache":
            self.held.clear()
            self.send(200, json.dumps({"success": True}))
            return
        key = json.dumps([body.get("prompt"), body.get("messages"), body.get("cache_salt")])
        cached = 64 * (key in self.held or (self.connector and key in self.stored))
        self.held.add(key)
        if body.get("kv_transfer_params") != {"max_offload_tokens": 0}:
            self.stored.add(key)
        self.answer(cached, "chat" in self.path, "b")

    def answer(self, cached: int, chat: bool, second: str, logprob: float | None = -0.5) -> None:
        tokens = ["a", second]
        likely = [{"token": one, "logprob": logprob} for one in tokens]
        every = [{**one, "top_logprobs": [one]} for one in likely]
        top = [{one: logprob} for one in tokens]
        lists = {"tokens": tokens, "token_logprobs": [logprob] * 2, "top_logprobs": top}
        usage = {"prompt_tokens": 100, **({"prompt_tokens_details": {"cached_tokens": cached}} if self.usage else {})}
        chunks = [{"choices": [{"logprobs": {"content": every} if chat else lists}]}, {"choices": [], "usage": usage}]
        self.send(200, "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n")

    def send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Vllm]:
    class Engine(Vllm):
        asked, held, stored = [], set(), set()
        breaks = staticmethod(lambda *_: False)

    monkeypatch.setattr(verify, "STORED_S", (0.0, 0.0))
    return Engine


@pytest.fixture
def run(engine: type[Vllm], tmp_path: Path) -> Iterator[Callable[..., Done]]:
    with ServerThread(ThreadsServer(engine)) as server:

        def run(*options: str) -> Done:
            url = f"http://127.0.0.1:{server.port}"
            options = tuple(url if one == "URL" else one for one in options)
            done = run_cli_here("verify", url, "--directory", str(tmp_path), *options)
            told = [line for line in done.stderr.splitlines(keepends=True) if not PROGRESS.match(line)]
            return Done(done.returncode, done.stdout, "".join(told))

        yield run


def flat(text: str) -> str:
    return " ".join(text.split())


def fails(status: int, error: object) -> Callable[[Vllm, dict[str, Any]], bool]:
    def fail(server: Vllm, _: dict[str, Any]) -> bool:
        server.send(status, json.dumps({"error": error}))
        return True

    return fail


def test_prompts_of_a_file_are_computed_without_sampling_and_loaded(
    engine: type[Vllm], run: Callable[..., Done], tmp_path: Path
) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 1, "stop": ["a"], "cache_salt": "theirs"}
    batch = {"custom_id": "1", "url": "/v1/completions", "body": {"prompt": [1, 2, 3], "model": "adapter"}}
    (tmp_path / "prompts").write_text(f"A text.\n\n{json.dumps(chat)}\n{json.dumps(batch)}\n")
    done = run("--prompts", str(tmp_path / "prompts"))
    assert (done.status, done.err) == (0, "")
    assert "PASS: 3 of 3 prompts got the same answer loaded as computed." in done.out
    assert "model:     llama (/models/llama)" in done.out
    assert "vLLM 0.32.0" in done.out
    assert "after POST /reset_prefix_cache; counted by the engine's usage (There is no kvoffd daemon" in flat(done.out)
    asked = [(path, body) for path, body in engine.asked if path.startswith("/v1/")]
    assert all(
        (body["temperature"], body["repetition_penalty"], body["ignore_eos"]) == (0, 1, True) for _, body in asked
    )
    assert {body["model"] for _, body in asked} == {"llama", "adapter"}
    assert not any("stop" in body for _, body in asked)
    computed, loaded = asked[:6], asked[6:]
    assert [path.split("/")[2] for path, _ in loaded] == ["completions", "chat", "completions"] * 2
    assert [body.get("cache_salt") for _, body in loaded] == [None, "theirs", None] * 2
    assert len({body["cache_salt"] for _, body in computed}) == 3
    assert all(body["kv_transfer_params"] == {"max_offload_tokens": 0} for _, body in computed)


def test_own_prompts_get_shorter_until_the_model_takes_them(engine: type[Vllm], run: Callable[..., Done]) -> None:
    too_long = fails(400, {"message": "This model's maximum context length is 2000 tokens."})
    engine.breaks = lambda server, body: len(body.get("prompt", "")) > 2000 and too_long(server, body)
    done = run("--json")
    assert done.status == 0
    assert json.loads(done.out)["verdict"] == "PASS"
    assert len({body["prompt"] for path, body in engine.asked if path == "/v1/completions"}) == 7, "four were refused"


@pytest.mark.parametrize("option", ["--cold", "--push-out"])
def test_a_server_without_development_mode(option: str, engine: type[Vllm], run: Callable[..., Done]) -> None:
    engine.dev = False
    assert "has no /reset_prefix_cache" in run().sentence
    if option == "--push-out":
        assert "does not say how large the KV cache is" in run(option).sentence
        engine.metrics = CONNECTED + CONFIGURED
        engine.asked.clear()

        def forget(server: Vllm, body: dict[str, Any]) -> bool:
            if body["max_tokens"] == 1:
                server.held.clear()
            return False

        engine.breaks = forget
        done = run(option)
        assert "loaded: after 160 tokens of other prompts" in flat(done.out)
        assert sum(body["max_tokens"] == 1 for _, body in engine.asked) == 4, "100 tokens each, before both rounds"
    else:
        done = run(option, "URL")
        assert "by this engine; computed by http://127" in flat(done.out)
        assert len(salts := [body["cache_salt"] for _, body in engine.asked]) == 9
        assert len(set(salts)) == 3
    assert done.status == 0, done


def test_nothing_loaded_is_no_verdict(engine: type[Vllm], run: Callable[..., Done]) -> None:
    engine.connector = False
    done = run()
    assert done.status == 3
    assert "NOT JUDGED: Nothing was loaded, or" in done.out
    engine.metrics = "vllm:num_requests_running 0\n"
    assert "NOT JUDGED: http://127.0.0.1" in (out := flat(run().out))
    assert "runs without kvoffd; start it with --kv-transfer-config." in out
    engine.connector, engine.usage, engine.metrics = True, False, CONNECTED
    assert "--enable-prompt-tokens-details" in run().out


def broken_off(server: Vllm, _: dict[str, Any]) -> bool:
    server.send(200, 'data: {"choices": []}\n\n')
    return True


def not_vllm(server: Vllm, _: dict[str, Any]) -> bool:
    server.send(200, 'data: {"choices": [{"text": "hi"}]}\n\ndata: [DONE]\n\n')
    return True


def error_inside(server: Vllm, _: dict[str, Any]) -> bool:
    server.send(200, 'data: {"error": {"message": "EngineCore died"}}\n\ndata: [DONE]\n\n')
    return True


def no_stream(server: Vllm, _: dict[str, Any]) -> bool:
    server.send(200, '{"choices": [{"text": "hi"}]}')
    return True


def without_salts(server: Vllm, _: dict[str, Any]) -> bool:
    server.answer(64, False, "b")
    return True


def streams(*chunks: object) -> Callable[[Vllm, dict[str, Any]], bool]:
    def stream(server: Vllm, _: dict[str, Any]) -> bool:
        lines = [one if isinstance(one, str) else json.dumps(one) for one in chunks]
        server.send(200, "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]))
        return True

    return stream


def choice(**logprobs: object) -> dict[str, Any]:
    return {"choices": [{"logprobs": logprobs}]}


LISTS = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}]}


@pytest.mark.parametrize(
    ("breaks", "sentence"),
    [
        (streams([1]), "does not answer as it should: Expected `object`, got `array`."),
        (streams("hi"), "does not answer as it should: Expecting value: line 1 column 2 (char 1)."),
        (
            streams("[" * 100_000),
            "does not answer as it should: maximum recursion depth exceeded while decoding a",
        ),
        (streams({"choices": [7]}), "Expected `object`, got `int` - at `$.choices[0]`."),
        (streams(choice(**LISTS | {"tokens": [7]})), "Expected `str`, got `int` - at `$.choices[0].logprobs.tokens"),
        (streams(choice(**LISTS | {"token_logprobs": ["x"]})), "Expected `float | null`, got `str` - at"),
        (streams(choice(**LISTS | {"token_logprobs": []})), "it has 1 tokens with 0 log probabilities and 1 lists"),
        (streams(choice(**LISTS | {"top_logprobs": [None]})), "Expected `object`, got `null` - at"),
        (streams(choice(**LISTS | {"top_logprobs": None})), "with 1 log probabilities and 0 lists of others."),
        (streams(choice(content=[{"token": "a"}])), "Object missing required field `logprob`"),
        (streams(choice(content=[{"token": "a", "logprob": -0.5}])), "missing required field `top_logprobs`"),
        (streams(choice(**LISTS), {"usage": {"prompt_tokens": "9"}}), "Expected `int`, got `str` - at `$.usage"),
        (streams(choice(**LISTS), {"usage": {}}), "Object missing required field `prompt_tokens`"),
        (streams("x" * (endpoint.MAX_BYTES + 1)), "a line has more than 16777216 bytes."),
    ],
)
def test_an_answer_of_another_form_is_one_sentence(
    breaks: Callable[[Vllm, dict[str, Any]], bool], sentence: str, engine: type[Vllm], run: Callable[..., Done]
) -> None:
    engine.breaks = breaks
    assert sentence in run().sentence


@pytest.mark.parametrize("page", ["/v1/models", "/version", "/reset_prefix_cache"])
@pytest.mark.parametrize("text", ["", "null", "[]", '"hi"', "7", "<html>", '{"data": [[]]}'])
def test_a_page_of_another_form_is_one_sentence(
    page: str, text: str, engine: type[Vllm], run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    if page == "/reset_prefix_cache":
        monkeypatch.setattr(endpoint, "RESET_S", 0.0)

        def reset(server: Vllm, body: dict[str, Any]) -> bool:
            if body:
                return False
            server.send(200, text)
            return True

        engine.breaks = reset
    else:
        answer_pages = engine.do_GET

        def get(server: Vllm) -> None:
            server.send(200, text) if server.path == page else answer_pages(server)

        engine.do_GET = get  # type: ignore[method-assign]
    done = run()
    if page == "/version":
        assert done.status == 0
        assert "vLLM unknown, " in done.out
    else:
        assert done.sentence.startswith("kvoffd-cli: ")


@pytest.mark.parametrize("number", [nan, None, inf])
def test_log_probabilities_that_are_no_numbers_never_pass(
    number: float | None, engine: type[Vllm], run: Callable[..., Done]
) -> None:
    def always(server: Vllm, body: dict[str, Any]) -> bool:
        if body:
            server.answer(64 * ("cache_salt" not in body), False, "b", number)
        return bool(body)

    def loaded(server: Vllm, body: dict[str, Any]) -> bool:
        return "cache_salt" not in body and always(server, body)

    engine.breaks = always
    done = run()
    assert done.status == 3
    assert "NOT JUDGED: The engine computed 3 of 3 prompts with log probabilities that are not" in flat(done.out)
    engine.breaks = loaded
    done = run()
    assert done.status == 1
    assert "FAULT: log probabilities that are not numbers" in done.out
    assert json.loads(run("--json").out)["verdict"] == "FAIL"


def test_loads_of_another_connector_are_not_judged(engine: type[Vllm], run: Callable[..., Done]) -> None:
    engine.metrics = "vllm:num_requests_running 0\n"
    done = run()
    assert done.status == 3
    assert "runs without kvoffd; start it with --kv-transfer-config." in flat(done.out)
    engine.metrics = 'vllm:kvoffd_connected{engine="0"} 0.0\n'
    done = run()
    assert done.status == 3
    assert "is not connected to a kvoffd daemon; its log says why." in flat(done.out)


def test_the_kv_cache_of_all_ranks_is_pushed_out(engine: type[Vllm], run: Callable[..., Done]) -> None:
    engine.metrics = CONNECTED + CONFIGURED + CONFIGURED.replace('engine="0"', 'engine="1"')
    assert "after 320 tokens of other prompts" in flat(run("--push-out").out)
    engine.metrics = CONNECTED + CONFIGURED.replace('blocks="10"', 'blocks="0"')
    assert "does not say how large the KV cache is" in run("--push-out").sentence


@pytest.mark.parametrize(
    ("breaks", "sentence"),
    [
        (
            fails(401, "Unauthorized"),
            "answers 401 Unauthorized: Unauthorized; give the server's key in OPENAI_API_KEY.",
        ),
        (
            fails(404, {"message": "Not Found"}),
            "404 Not Found: Not Found. Give --prompts with messages, if it has chats only.",
        ),
        (fails(400, {"message": "no logprobs\n"}), "answers 400 Bad Request: no logprobs."),
        (broken_off, "broke off an answer: the connection was closed; see whether the engine runs, and its log."),
        (error_inside, "ended an answer with an error: EngineCore died."),
        (no_stream, "did not stream an answer; is it vLLM?"),
        (not_vllm, "answered without log probabilities of its tokens; is it vLLM?"),
        (without_salts, "so something before vLLM removes the salt; give the engine's own address."),
    ],
)
def test_a_server_that_does_not_fit_is_one_sentence(
    breaks: Callable[[Vllm, dict[str, Any]], bool], sentence: str, engine: type[Vllm], run: Callable[..., Done]
) -> None:
    engine.breaks = breaks
    assert run().sentence.endswith(f"{sentence}\n")


def test_a_busy_engine_is_waited_for_and_said(
    engine: type[Vllm], run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, False, True])

    def busy(server: Vllm, body: dict[str, Any]) -> bool:
        if body or next(answers, True):
            return False
        server.send(200, '{"success": false}')
        return True

    engine.breaks = busy
    assert run().status == 0
    answers = iter([False] * 1000)
    monkeypatch.setattr(endpoint, "RESET_S", 0.0)
    assert "cannot be reset while" in run().sentence


def test_the_key_is_sent(engine: type[Vllm], run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    keys = set()

    def note(server: Vllm, _: dict[str, Any]) -> bool:
        keys.add(server.headers["Authorization"])
        return False

    engine.breaks = note
    assert run().status == 0
    assert keys == {"Bearer secret"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("\n", "has 0 prompts; give 1 to 200"),
        ("hi\n" * 201, "has 201 prompts; give 1 to 200"),
        ('hi\n{"prompt": ', "line 2: "),
        ('{"input": "hi"}', "line 1: it has neither messages nor a prompt"),
        ('{"body": []}', "line 1: it has neither messages nor a prompt"),
        ('{"a":' * 100_000, "line 1: maximum recursion depth exceeded"),
        ("\udcff", "is not UTF-8 text"),
    ],
)
def test_a_file_that_has_no_prompts(text: str, sentence: str, run: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "prompts").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert sentence in run("--prompts", str(tmp_path / "prompts")).sentence


def test_options_that_exclude_each_other() -> None:
    done = run_cli_here("verify", "host", "--cold", "other", "--push-out")
    assert re.search("--cold and --push-out exclude each other", done.stderr)


def test_progress_is_a_line_for_each_prompt(engine: type[Vllm], tmp_path: Path) -> None:
    with ServerThread(ThreadsServer(engine)) as server:
        done = run_cli_here("verify", f"http://127.0.0.1:{server.port}", "--directory", str(tmp_path))
    told = [line.strip() for line in done.stderr.splitlines()]
    assert told[:4] == [*(f"computing prompt {at} of 3" for at in (1, 2, 3)), "emptying vLLM's own prefix cache"]
    assert "loading prompt 3 of 3" in told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("loads", [0, 5])
def test_a_signal_ends_it_with_what_was_found(
    engine: type[Vllm], run: Callable[..., Done], number: int, loads: int
) -> None:
    """While the second prompt is computed, or after two of three were loaded in the second round."""
    asked = [0]

    def interrupt(server: Vllm, body: dict[str, Any]) -> bool:
        asked[0] += server.path.startswith("/v1/")
        if asked[0] != (6 + loads if loads else 3) + 1:
            return False
        os.kill(os.getpid(), number)
        return True

    engine.breaks = staticmethod(interrupt)
    before = signal.getsignal(signal.SIGTERM)
    done = run()
    assert signal.getsignal(signal.SIGTERM) is before
    assert done.status == 128 + number
    assert "kvoffd-cli: " not in done.err, "the server may say there that its client went away"
    if loads:
        assert "NOT JUDGED: Interrupted; 3 of 3 prompts were computed. " in flat(done.out)
        assert "2 of 3 prompts got the same answer loaded as computed. 1 could not be judged." in flat(done.out)
    else:
        assert "NOT JUDGED: Interrupted; 1 of 3 prompts were computed." in flat(done.out)


def test_a_fault_that_was_found_before_a_signal_fails(engine: type[Vllm], run: Callable[..., Done]) -> None:
    asked = [0]

    def interrupt(server: Vllm, body: dict[str, Any]) -> bool:
        loads = server.path.startswith("/v1/") and asked[0] >= 6
        asked[0] += server.path.startswith("/v1/")
        if asked[0] == 12:
            os.kill(os.getpid(), signal.SIGINT)
        elif loads:
            server.answer(64, False, "c")
        return loads

    engine.breaks = staticmethod(interrupt)
    done = run()
    assert (done.status, "FAIL: Interrupted; 3 of 3" in done.out) == (1, True)
