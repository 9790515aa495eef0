"""``kvoffd-cli verify``: whether an engine gives the same answers to prompts that kvoffd loads as to those it computes.

Each prompt is computed under a ``cache_salt`` of its own, which neither vLLM nor kvoffd has seen, and again from vLLM's
own prefix cache, which shows how far the engine differs from itself. Then it is asked without the salt, once vLLM's own
cache is empty: it is loaded. With a second engine it is loaded under the salt, by the engine that has not seen it.
"""

from __future__ import annotations

import json
import random
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.cli.endpoint import LIKELIEST, Answer, Body, Endpoint
from kvoffd_client.cli.format import print_json, print_status, print_table, say
from kvoffd_client.cli.target import CliError, Directory, Json, open_admin
from kvoffd_client.errors import HttpError, KvoffdClientError
from kvoffd_proto.admin import ListPrompts, LoggedPrompt, NamespaceInfo
from kvoffd_proto.build import with_commit
from kvoffd_proto.namespace_differences import how_they_differ
from kvoffd_proto.prompts import request_sentence
from kvoffd_proto.stats import namespace_name
from kvoffd_proto.units import format_count, format_duration, printable

TIE_NATS = 0.02
"""Two tokens whose log probabilities are this close count as equal: another order of additions may swap them."""
MAX_NOISE_NATS = 0.25
"""An engine that differs from itself by more cannot be judged."""
ROUNDS = 4
"""Most times that a prompt is asked again: the first may only store it, and stores may be late."""
REPORTS_S = 5.0
"""Engines report once a second."""
STORED_S = (1.0, 10.0)
"""Seconds that the second engine has to store, by attempt."""
PUSH_S = 600.0
TELL_S = 2.0
"""Time between lines of progress while many short requests run."""
MAX_PROMPTS = 200
"""The daemon keeps an engine's last 1,000 reports."""
OWN_LINES = (400, 150, 45)
"""Lengths of the own prompts; a line is some ten tokens."""
STATUS = {"PASS": 0, "FAIL": 1, "NOT JUDGED": 3}
WORST_FIRST = "fault", "unclear", "tie", "same"
"""Judgements of one answer."""


def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="The engine, such as http://localhost:8000.")],
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="Your prompts: a line of text or JSON each.")
    ] = None,
    cold: Annotated[
        str, typer.Option("--cold", metavar="URL", help="A second engine, to compute what the first one loads.")
    ] = "",
    push_out: Annotated[
        bool, typer.Option("--push-out", help="Empty vLLM's cache by computing as much as it holds.")
    ] = False,
    directory: Directory = None,
    json: Json = False,
) -> int:
    """Check that loaded prompts are answered as computed ones.

    Resets vLLM's own prefix cache if the engine runs with VLLM_SERVER_DEV_MODE=1; else give --cold or --push-out. A
    JSON line is a request with messages or a prompt. The API key is in OPENAI_API_KEY.

    Exit status: 0 PASS, 1 FAIL, 2 an error, 3 not judged.
    """
    if cold and push_out:
        raise CliError("--cold and --push-out exclude each other; give one of them.")
    bodies = read_prompts(prompts) if prompts else []
    with open_admin(directory) as admin:
        run, ended_by = Run(Endpoint(url), Endpoint(cold) if cold else None, admin), 0
        try:
            with _term_interrupts() as signals:
                run.play(bodies, push_out)
                page = run.page()
        except KeyboardInterrupt:  # a second one ends it without the page
            ended_by = signals[0] if signals else signal.SIGINT
            page = run.page(interrupted=True)
        finally:
            print_status()
    if json:
        print_json(page)
    else:
        show(page)
    return STATUS[page["verdict"]] if not ended_by or page["verdict"] == "FAIL" else 128 + ended_by


@contextmanager
def _term_interrupts() -> Iterator[list[int]]:
    """Have SIGTERM raise KeyboardInterrupt, as Ctrl-C does, and yield a list that it is in then."""
    came = list[int]()

    def interrupt(number: int, frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)


def read_prompts(path: Path) -> list[Body]:
    """Return the prompts of a file; see ``body_of``. Raises CliError."""
    found: list[Body] = []
    try:
        lines = path.read_text("utf-8").split("\n")
    except UnicodeDecodeError:
        raise CliError(f"{path} is not UTF-8 text.") from None
    for number, line in enumerate(lines, 1):
        try:
            found += [body_of(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise CliError(f"{path}, line {number}: {error}.") from None
    if not 0 < len(found) <= MAX_PROMPTS:
        raise CliError(f"{path} has {format_count(len(found))} prompts; give 1 to {MAX_PROMPTS}.")
    return found


def body_of(line: str) -> Body:
    """Return a line's prompt: a request as JSON, alone or as a batch file's body, else text. Raises ValueError."""
    if not line.lstrip().startswith("{"):
        return {"prompt": line}
    given = json.loads(line)
    body = given.get("body", given)
    if not isinstance(body, dict) or not (body.get("messages") or body.get("prompt")):
        raise ValueError("it has neither messages nor a prompt")
    return body


def own_prompt(lines: int) -> Body:
    """Return a prompt, always the same for a number of lines, so that a later run loads what an earlier one stored."""
    prices = random.Random(lines).choices(range(100_000), k=lines)
    return {"prompt": f"A list of {lines}:" + "".join(f"\nItem {at} costs {one}." for at, one in enumerate(prices))}


# --- comparing -------------------------------------------------------------------------------------


class OutputDifference(NamedTuple):
    """Difference of two answers, in nats.

    ``at``: the first place with another token, None if there is none. ``gap``: how much less likely the other token was
    there. ``farthest``: largest difference of a log probability before that. Both are infinite where the log
    probabilities of an answer are no numbers.
    """

    at: int | None
    gap: float
    farthest: float

    def within(self, nats: float) -> bool:
        """Return whether rounding explains it: the answers are the same, or two tokens tied at ``at``."""
        return max(self.gap, self.farthest) <= nats


def difference(wanted: Answer, given: Answer) -> OutputDifference:
    if not (wanted.has_numbers and given.has_numbers):
        return OutputDifference(0, inf, inf)
    farthest, length = 0.0, min(len(wanted.tokens), len(given.tokens))
    for at in range(length):
        if wanted.tokens[at] != given.tokens[at]:
            gap = wanted.logprobs[at] - wanted.likeliest[at].get(given.tokens[at], -inf)
            return OutputDifference(at, gap, farthest)
        farthest = max(farthest, abs(wanted.logprobs[at] - given.logprobs[at]))
    if len(wanted.tokens) == len(given.tokens):
        return OutputDifference(None, 0.0, farthest)
    return OutputDifference(length, inf, farthest)


@dataclass
class Case:
    """One prompt and its answers; ``loads``: those that should be loaded, by request id."""

    body: Body
    computed: Answer
    own: Answer
    loads: dict[str, Answer] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    """Loaded tokens by the request's id; requests that loaded none are absent."""

    def judge(self, nats: float) -> tuple[str, str]:
        """Return ``same``, ``tie``, ``fault`` or ``unclear``, and how the answers compare: the worst of the loads."""
        if not self.computed.has_numbers:
            return "unclear", "the computed answer has log probabilities that are not numbers"
        if not self.loaded:
            return "unclear", "nothing was loaded"
        judged = [self._judge_load(self.loads[request], nats) for request in self.loaded]
        return min(judged, key=lambda one: WORST_FIRST.index(one[0]))

    def _judge_load(self, answer: Answer, nats: float) -> tuple[str, str]:
        """Judge one loaded answer.

        A fault is what neither rounding explains, nor vLLM's own cache, whose answer may differ from the computed one.
        """
        found = difference(self.computed, answer)
        if found.within(nats) and found.at is None:
            return "same", f"same {len(answer.tokens)} tokens within {found.farthest:.5f} nats"
        if found.within(nats):
            return "tie", f"tie at token {found.at}: {found.gap:.3f} nats apart"
        if difference(self.own, answer).within(nats):
            return "tie", "as from vLLM's own cache, which differs from computing"
        if not difference(self.computed, self.own).within(nats):
            return "unclear", "vLLM's own cache differs from computing, too"
        if not answer.has_numbers:
            return "fault", "FAULT: log probabilities that are not numbers"
        if found.at is None or found.farthest > nats:
            return "fault", f"FAULT: {found.farthest:.3f} nats apart"
        if found.at == min(map(len, (answer.tokens, self.computed.tokens))):
            return "fault", f"FAULT: {len(answer.tokens)} tokens, not {len(self.computed.tokens)}"
        if found.gap == inf:
            return "fault", f"FAULT: token {found.at} is another, and not among the {LIKELIEST} likeliest"
        return "fault", f"FAULT: another token {found.at}, {found.gap:.3f} nats less likely"


# --- asking ----------------------------------------------------------------------------------------


class Run:
    """Requests to an engine and their answers. ``cold`` is the second engine, if any."""

    def __init__(self, engine: Endpoint, cold: Endpoint | None, admin: AdminClient) -> None:
        self.engine, self.cold, self.admin = engine, cold, admin
        self.began = datetime.now(UTC)
        self.model, self.root = engine.model()
        self.id = f"kvoffd-verify-{uuid.uuid4().hex[:8]}"
        """Beginning of the ids of all requests, by which the daemon's reports of them are found."""
        self.asked = 0
        """Requests so far."""
        self.how = ""
        """Words for the page that say how prompts are loaded."""
        self.problem = ""
        """Sentence that says why the daemon of this node reports no request of the engine; empty if it may."""
        self.daemon = self.release = "unknown"
        """Versions of the daemon and of vLLM."""
        self.prompts = 0
        """Number of prompts that were to be computed; ``cases`` has those that were."""
        self.cases: list[Case] = []
        self.reports: dict[str, LoggedPrompt] = {}
        """The daemon's reports by the request's id."""

    def play(self, bodies: Sequence[Body], push_out: bool) -> None:
        try:
            self.daemon = self.admin.stats().version
        except KvoffdClientError as error:
            self.problem = str(error)
        with suppress(HttpError, KeyError):
            self.release = str(self.engine.read("/version")["version"])
        self.prompts = len(bodies) or len(OWN_LINES)
        empty: Callable[[], None] | None = None
        if self.cold:
            self.how = f"by this engine; computed by {self.cold.url}"
        elif push_out:
            self.how, empty = f"after {self._cache_tokens():,} tokens of other prompts", self._push_out
        elif self.engine.can_reset():
            self.how, empty = "after POST /reset_prefix_cache", self.engine.reset
        else:
            raise CliError(
                f"{self.engine.url} has no /reset_prefix_cache, so vLLM would answer from its own prefix cache. Start "
                "it with VLLM_SERVER_DEV_MODE=1, or give --cold with a second engine that uses the same daemon, or "
                "--push-out, which computes as many tokens as its KV cache holds."
            )
        for body in bodies:
            self.cases.append(self._compute(body))
        for lines in () if bodies else OWN_LINES:
            self.cases.append(self._compute_own(lines))
        if empty is None:
            self._load_elsewhere()
            return
        for number in range(ROUNDS):
            self._tell("emptying vLLM's own prefix cache")
            empty()
            self._load()
            if number:  # the first round may only have stored
                self._count_loaded()
                if all(case.loaded for case in self.cases):
                    return

    def _compute(self, body: Body) -> Case:
        """Compute a prompt under a new salt, then ask vLLM's own cache."""
        engine, salt = self.cold or self.engine, {"cache_salt": uuid.uuid4().hex}
        # With one engine nobody asks for these blocks again.
        more = {} if self.cold else {"kv_transfer_params": {"max_offload_tokens": 0}}
        self._tell(f"computing prompt {len(self.cases) + 1} of {self.prompts}")
        computed, own = (self._ask(engine, {**body, **salt}, **more)[1] for _ in range(2))
        if computed.cached:
            raise CliError(
                f"{engine.url} did not compute all of a prompt with a new cache_salt, so something before vLLM removes "
                "the salt; give the engine's own address."
            )
        return Case({**body, **salt} if self.cold else body, computed, own)

    def _compute_own(self, lines: int) -> Case:
        """Compute an own prompt, shorter if it is too long for the model."""
        try:
            return self._compute(own_prompt(lines))
        except HttpError as error:
            if error.status == 404:
                raise CliError(f"{error} Give --prompts with messages, if it has chats only.") from None
            if error.status != 400 or lines < 4:
                raise
        return self._compute_own(lines // 2)

    def _load(self) -> None:
        for number, case in enumerate(self.cases, 1):
            self._tell(f"loading prompt {number} of {len(self.cases)}")
            request, answer = self._ask(self.engine, case.body)
            case.loads[request] = answer

    def _count_loaded(self, wait_s: float = REPORTS_S) -> None:
        self._read_reports([request for case in self.cases for request in case.loads], wait_s)
        for case in self.cases:
            for request, answer in case.loads.items():
                logged = self.reports.get(request)
                if loaded := logged.report.loaded_tokens if logged else answer.cached:
                    case.loaded[request] = loaded

    def _load_elsewhere(self) -> None:
        """Have the engine load what the second one computed."""
        for wait_s in STORED_S:
            if self.cases[0].loads:  # it has computed these itself by now: again under new salts
                bodies, self.cases = [case.body for case in self.cases], []
                for body in bodies:
                    self.cases.append(self._compute(body))
            self._tell("waiting until the blocks are stored")
            time.sleep(wait_s)
            self._load()
            self._count_loaded()
            if any(case.loaded for case in self.cases):
                return

    def _tell(self, text: str) -> None:
        """Show progress: as a status on a terminal, else as a line on stderr."""
        if sys.stderr.isatty():
            print_status(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def _ask(self, engine: Endpoint, body: Body, **fields: object) -> tuple[str, Answer]:
        """Return the request's id and its answer."""
        self.asked += 1
        request = f"{self.id}-{self.asked}"
        return request, engine.ask({"model": self.model, **body}, request, **fields)

    def _read_reports(self, requests: Sequence[str], wait_s: float) -> None:
        """Wait for the engine's reports to the daemon of this node, if it sends them there."""
        deadline = time.monotonic() + wait_s
        while not self.problem and not all(request in self.reports for request in requests):
            if time.monotonic() > deadline:
                self.problem = "The daemon of this node has no reports of it"
            time.sleep(0.1)
            try:
                for one in self.admin.ask(ListPrompts, self.id).prompts:
                    if found := re.search(rf"{self.id}-\d+", one.report.request):
                        self.reports[found[0]] = one
            except KvoffdClientError as error:
                self.problem = str(error)

    def _cache_tokens(self) -> int:
        """Return how many tokens the KV cache holds. Raises CliError."""
        tokens = 0
        for of_rank in re.findall(r"^vllm:cache_config_info\{(.*)\}", self.engine.metrics(), re.MULTILINE):
            sizes = dict(re.findall(r'(\w+)="(\d+)"', of_rank))
            tokens += int(sizes.get("block_size", 0)) * int(sizes.get("num_gpu_blocks", 0))
        if not tokens:
            raise CliError(f"{self.engine.url}/metrics does not say how large the KV cache is; give --cold.")
        return tokens

    def _push_out(self) -> None:
        """Have other prompts take all of vLLM's KV cache."""
        tokens, done, deadline, told = self._cache_tokens(), 0, time.monotonic() + PUSH_S, -inf
        longest = max(self.cases, key=lambda one: one.computed.prompt_tokens)
        while done < tokens:
            if time.monotonic() > deadline:
                raise CliError(f"Computing the {tokens:,} tokens of vLLM's KV cache takes more than {PUSH_S:.0f} s.")
            fields = {"max_tokens": 1, "kv_transfer_params": {"max_offload_tokens": 0}}
            if time.monotonic() >= told + TELL_S:
                told = time.monotonic()
                self._tell(f"pushing out: {done:,} of {tokens:,} tokens")
            body = {**longest.body, "cache_salt": uuid.uuid4().hex}
            done += max(1, self._ask(self.engine, body, **fields)[1].prompt_tokens)

    # --- the page ---------------------------------------------------------------------------------

    def page(self, interrupted: bool = False) -> dict[str, Any]:
        """Return what is printed, the lines above the table first. The engine is not asked again if interrupted."""
        if interrupted:
            self._count_loaded(0.0)
        distances = [difference(one.computed, one.own).farthest for one in self.cases]
        noise = max(filter(isfinite, distances), default=0.0)
        nats = max(TIE_NATS, 2 * min(noise, MAX_NOISE_NATS))
        judged = [case.judge(nats) for case in self.cases]
        loads = [request for case in self.cases for request in case.loads]
        logged = next((self.reports[request] for request in reversed(loads) if request in self.reports), None)
        verdict, sentence = self._verdict([word for word, _ in judged], counted=interrupted or logged is not None)
        if interrupted:
            rest = "" if verdict == "NOT JUDGED" else f" {sentence}"
            sentence = f"Interrupted; {len(self.cases)} of {self.prompts} prompts were computed.{rest}"
            verdict = verdict if verdict == "FAIL" else "NOT JUDGED"
        name = "unknown"
        if logged:
            name, others = self._namespaces_of(logged)
            if verdict == "NOT JUDGED":
                sentence += f" The last request: {request_sentence(logged)}{others}"
        by = "engine's reports" if logged else f"engine's usage ({self.problem.rstrip('.')})"
        return {
            "engine": f"{self.engine.url} at {self.began:%Y-%m-%d %H:%M:%S} UTC",
            "model": printable(self.model if self.root in ("", self.model) else f"{self.model} ({self.root})"),
            "versions": f"vLLM {printable(self.release)}, kvoffd-cli {with_commit(version('kvoffd'))}, "
            f"daemon {self.daemon}",
            "namespace": name,
            "computed": "under a new cache_salt, so no cache has it",
            "loaded": f"{self.how}; counted by the {by}",
            "tolerance": f"{nats:.3f} nats",
            "prompts": [
                {
                    "tokens": case.computed.prompt_tokens,
                    "loaded_tokens": max(case.loaded.values(), default=0),
                    "computed_ttft_seconds": case.computed.ttft_s,
                    "loaded_ttft_seconds": [*case.loads.values()][-1].ttft_s if case.loads else None,
                    "verdict": word,
                    "answers": words,
                }
                for case, (word, words) in zip(self.cases, judged, strict=True)
            ],
            "verdict": verdict,
            "sentence": sentence,
        }

    def _namespaces_of(self, logged: LoggedPrompt) -> tuple[str, str]:
        """Return the name of a request's namespace, and sentences on how those of other requests differ from it."""
        infos: dict[bytes, NamespaceInfo] = {}
        with suppress(KvoffdClientError):  # the daemon has ended since: the verdict stands
            infos = {one.namespace: one for one in self.admin.namespaces().namespaces}
        own, sentences = infos.get(logged.namespace), ""
        others = {one.namespace for one in self.reports.values()} - {logged.namespace}
        for other in others & infos.keys():
            differ = how_they_differ(own.description if own else "", infos[other].description)
            sentences += f" {self.cold.url if self.cold else 'It'} has another namespace: {differ}."
        return namespace_name(own.label if own else "", logged.namespace), sentences

    def _verdict(self, words: Sequence[str], *, counted: bool) -> tuple[str, str]:
        """Return the verdict and its sentence, for the judgements of all cases.

        ``counted``: no need to ask the engine whether kvoffd loaded, since the daemon has reports of it, or the run was
        interrupted.
        """
        count, faults, unclear = len(words), words.count("fault"), words.count("unclear")
        metrics = "" if counted else self.engine.metrics()
        if metrics and "vllm:kvoffd_connected" not in metrics:  # what was loaded, another connector has loaded
            return "NOT JUDGED", f"{self.engine.url} runs without kvoffd; start it with --kv-transfer-config."
        if metrics and not re.search(r"^vllm:kvoffd_connected(\{.*\})? [1-9]", metrics, re.MULTILINE):
            return "NOT JUDGED", f"{self.engine.url} is not connected to a kvoffd daemon; its log says why."
        if faults:
            return "FAIL", (
                f"{faults} of {count} prompts got another answer when loaded than when computed. `kvoffd-cli clear` "
                "drops the blocks; please report this page."
            )
        if without := sum(not case.computed.has_numbers for case in self.cases):
            return "NOT JUDGED", (
                f"The engine computed {without} of {count} prompts with log probabilities that are not numbers (NaN): "
                "kvoffd had no part in that."
            )
        if unclear < count:
            rest = f" {unclear} could not be judged." if unclear else ""
            return "PASS", f"{count - unclear} of {count} prompts got the same answer loaded as computed.{rest}"
        if any(case.loaded for case in self.cases):
            return "NOT JUDGED", "The engine's answers differ from each other without kvoffd as well."
        if counted:
            return "NOT JUDGED", "Nothing was loaded."
        return "NOT JUDGED", (
            "Nothing was loaded, or the engine does not say so without --enable-prompt-tokens-details. To see why, "
            "run this on its node with the daemon's --directory."
        )


def show(page: dict[str, Any]) -> None:
    for name, text in page.items():
        if name == "prompts":
            break
        say(f"{name + ':':10} {text}")
    rows = [
        (
            str(number),
            format_count(one["tokens"]),
            format_count(one["loaded_tokens"]),
            format_duration(one["computed_ttft_seconds"]),
            "-" if one["loaded_ttft_seconds"] is None else format_duration(one["loaded_ttft_seconds"]),
            one["answers"],
        )
        for number, one in enumerate(page["prompts"], 1)
    ]
    say("")
    print_table((">", ">tokens", ">loaded", ">cold TTFT", ">loaded TTFT", "answers"), rows)
    say("", f"{page['verdict']}: {page['sentence']}")
