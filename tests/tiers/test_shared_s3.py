"""The shared tier over S3: two servers and a double that breaks on purpose."""

from __future__ import annotations

import itertools
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, urlsplit

import pytest

from kvoffd.tiers.answers import NO_S
from kvoffd.tiers.header import Block, make_block_group
from kvoffd.tiers.names import generation_name
from kvoffd.tiers.store import Credentials, PutRequest
from kvoffd.tiers.tier import Result
from tests.kit.cases import case
from tests.kit.closing import ServerThread
from tests.kit.require import require
from tests.kit.s3_server import BUCKET, PLACES, START_S, S3Server
from tests.kit.waiting import wait_until
from tests.tiers.faulty_bucket import FaultyBucket
from tests.tiers.shared_conformance import FaultConformance, SharedConformance
from tests.tiers.shared_rig import ONE, SLOTS, Answer, SharedRig, key_of, name_of

pytest.importorskip("obstore")
from kvoffd.tiers import s3_store as s3
from kvoffd.tiers.s3_store import NO_KEYS, S3, open_bucket, open_s3

pytestmark = pytest.mark.usefixtures("short_pauses")
DONE = Result.DONE
POLLS = 3
"""Requests for a namespace's generation, or of a probe, that may come between."""
RCLONE = shutil.which("rclone", path=PLACES)


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr("kvoffd.tiers.s3_store.GENERATION_S", 0.5)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


class TestS3(SharedConformance):
    most_asked = 128  # moto answers one request at a time

    @pytest.fixture
    def url(self, server: S3Server) -> str:
        server.flush()
        return server.url


class RcloneServer(S3Server):
    """rclone's, over a directory. Unlike moto's it checks signatures: the key is ``user``, its secret ``secret``."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._flushed = 0

    @property
    def url(self) -> str:
        return super().url.replace("/a/prefix?", f"/a/prefix/{self._flushed}?")

    def start(self) -> Self:
        require("rclone", RCLONE, "there is no rclone; `make servers` installs it")
        assert RCLONE is not None
        (self._directory / BUCKET).mkdir()
        options = ["--config=", "--auth-key=user,secret", f"--addr=127.0.0.1:{self._port}"]
        command = [RCLONE, "serve", "s3", *options, str(self._directory)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self.listens, START_S)
        return self

    def flush(self) -> None:
        self._flushed += 1


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RcloneServer]:
    with RcloneServer(tmp_path_factory.mktemp("rclone")) as running:
        yield running


@pytest.mark.nightly
class TestRclone(SharedConformance):
    most_asked = 128

    @pytest.fixture
    def url(self, rclone: RcloneServer) -> str:
        rclone.flush()
        return rclone.url


@pytest.fixture
def bucket() -> Iterator[FaultyBucket]:
    with FaultyBucket() as running:
        yield running


@pytest.fixture
def rig(bucket: FaultyBucket) -> SharedRig:
    return SharedRig(bucket.url).reachable()


class TestDouble(FaultConformance):
    slow_s = 0.5
    refusals = (
        ((403, "QuotaExceeded"), "full", ""),
        ((507, "XMinioStorageFull"), "full", ""),
        ((403, "AccessDenied"), "credentials", "AccessDenied"),
        ((503, "SlowDown"), "busy", "SlowDown"),
        ((500, "InternalError"), "protocol", "InternalError"),
    )

    @pytest.fixture
    def double(self, bucket: FaultyBucket) -> FaultyBucket:
        return bucket


# --- the double, which breaks as no other can -------------------------------------------------------


CHUNKS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "one byte less": lambda value: iter([value[:-1]]),
    "one byte more": lambda value: iter([value, b"."]),
    "no end": lambda value: itertools.repeat(bytes(1 << 16), 4096),
}


@pytest.mark.parametrize(("there", "heads"), [("", 2), ("a", 5), ("e", 5), ("abcde", 5), ("ab", 5), ("c", 2)])
def test_the_ends_of_a_chain_are_asked_for_first(bucket: FaultyBucket, there: str, heads: int) -> None:
    """Where both are absent all of it is written, also what another node has written of it."""
    store = open_s3(bucket.url, Credentials("", ""))()
    store.connect()
    deadline = time.monotonic() + 10
    group = make_block_group(ONE, 0, 0, (6,))
    chain = {key: Block(group, key.encode(), (0,), (1,)) for key in "abcde"}
    view = memoryview(b"object")
    assert all(store.put([PutRequest(chain[key], [view]) for key in there], deadline)) or not there
    found = store.touch(list(chain.values()), deadline)
    assert found == [key in there and there != "c" for key in "abcde"]
    assert bucket.requests["HEAD"] == heads
    assert store.touch([chain["a"]], deadline) == ["a" in there]
    assert store.touch([], deadline) == []
    store.close()


def test_an_object_is_put_where_it_belongs_however_it_is_cut(
    bucket: FaultyBucket, rig: SharedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.store(block := rig.block(1, (2, 0, 401, 1)))
    cuts = itertools.product((7, 4096, 4300), (1, 3, 4095, 4096, 4099, 10_000))
    for size, least in ((1, 3), (1, 4096), *cuts):
        monkeypatch.setattr(s3, "RECEIVE_BYTES", least)
        bucket.chunks = lambda value, size=size: (value[at : at + size] for at in range(0, len(value), size))
        with case(size, least):
            assert rig.load(block) is DONE


@pytest.mark.parametrize("fault", CHUNKS)
def test_an_object_of_a_wrong_length_is_not_received_whole(bucket: FaultyBucket, rig: SharedRig, fault: str) -> None:
    (block,) = rig.store_some(1)
    sent = 0

    def chunks(value: bytes) -> Iterator[bytes]:
        nonlocal sent
        for chunk in CHUNKS[fault](value):
            sent += len(chunk)
            yield chunk

    bucket.chunks = chunks
    assert rig.ask_anew(block) == [Answer.YES]
    ended = rig.begin_read(block)
    rig.until(lambda: bool(ended))
    assert ended == [Result.CORRUPT]
    assert sent < 64 << 20
    assert "internal" not in rig.kinds
    assert rig.tier.counters.mismatches == 1


def test_a_generation_that_another_node_raised_is_not_lowered(bucket: FaultyBucket) -> None:
    one, other = (open_s3(bucket.url, Credentials("", ""))() for _ in range(2))
    until = time.monotonic() + 10.0
    for store, generation in ((one, 5), (other, 12)):
        store.connect()
        assert store.raise_generation(ONE, 0, generation, until) == generation
        assert one.generation(ONE, until) == 5, "it is looked at every 5 s"
    assert one.raise_generation(ONE, 5, 10, until) == 12
    assert bucket.values[f"/bucket/ge/{generation_name(ONE).decode()}"] == b"12"
    for store in (one, other):
        store.close()


def test_generations_of_many_namespaces_cost_one_request(bucket: FaultyBucket) -> None:
    """And a GET for each that was raised since, whose number the list does not have."""
    store, until = S3(open_bucket(bucket.url, Credentials("", ""))), time.monotonic() + 30.0
    store.connect()
    every = [bytes([number]) * 32 for number in range(s3.LISTED_FROM)]
    expected = [0] * len(every)

    def requests(asked: list[bytes]) -> dict[str, int]:
        store._generations.clear()  # as after ``GENERATION_S``
        bucket.requests.clear()
        assert store.generations(asked, until) == expected[: len(asked)]
        return +bucket.requests

    assert requests(every[:-1]) == {"GET": len(every) - 1}
    assert requests(every) == {"LIST": 1}
    for raised, number in ((3, b"7"), (12, b"8"), (3, b"9")):
        bucket.values[f"/bucket/ge/{generation_name(every[raised]).decode()}"] = number
        expected[raised] = int(number)
        assert requests(every) == {"LIST": 1, "GET": 1}
        assert requests(every) == {"LIST": 1}
    store.close()


def test_a_list_that_has_not_all_generations_hides_none(bucket: FaultyBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "MAX_LISTED", 5)
    store, until = S3(open_bucket(bucket.url, Credentials("", ""))), time.monotonic() + 30.0
    store.connect()
    every = [bytes([number]) * 32 for number in range(20)]
    for number, one in enumerate(every[:10]):
        bucket.values[f"/bucket/ge/{generation_name(one).decode()}"] = b"%d" % (1 + number)
    for _ in range(2):
        store._generations.clear()
        assert store.generations(every, until) == [*range(1, 11), *[0] * 10]
    store.close()


def test_a_generation_that_is_no_number_hides_no_other(bucket: FaultyBucket) -> None:
    store, until = open_s3(bucket.url, Credentials("", ""))(), time.monotonic() + 30.0
    store.connect()
    for count in (2, 20):
        every = [bytes([number]) * 32 for number in range(count)]
        bucket.values[f"/bucket/ge/{generation_name(every[1]).decode()}"] = b"x"
        found = store.generations(every, until)
        assert getattr(found.pop(1), "kind", "") == "generation"
        assert found == [0] * (count - 1)
    store.close()


def test_an_odd_prefix_is_listed_as_it_is_written(server: S3Server) -> None:
    """Else all generations would count as none."""
    server.flush()
    url = server.url.replace("/a/prefix?", "/a!b'(c)*.d-e_f/g?")
    one, other = (open_s3(url, Credentials("", ""))() for _ in range(2))
    every, until = [bytes([number]) * 32 for number in range(20)], time.monotonic() + 60.0
    for store in (one, other):
        store.connect()
    one.raise_generation(every[3], 0, 7, until)
    assert other.generations(every, until) == [0, 0, 0, 7, *[0] * 16]
    for store in (one, other):
        store.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ((403, "SignatureDoesNotMatch"), "credentials"),
        ((400, "ExpiredToken"), "credentials"),
        ((400, "AuthorizationHeaderMalformed"), "region"),
        ((301, "PermanentRedirect"), "region"),
        ((403, "RequestTimeTooSkewed"), "clock"),
        ((404, "NoSuchBucket"), "bucket"),
        ((503, "SlowDown"), "busy"),
        ((500, "InternalError"), "protocol"),
    ],
)
def test_errors_are_misses_with_a_reason(
    bucket: FaultyBucket, rig: SharedRig, error: tuple[int, str], kind: str
) -> None:
    rig.store(block := rig.block(1))
    bucket.errors = dict.fromkeys(("GET", "HEAD", "PUT"), error)
    while rig.tier.available():
        rig.ask_anew(block)
        rig.write(rig.block(2))
    rig.until(lambda: rig.kinds[kind] > 0 and error[1] in rig.tier.health.problem, 5.0)
    bucket.errors.clear()
    rig.until(lambda: rig.tier.available(), 6.0)
    rig.until(lambda: rig.ask_anew(block) == [Answer.YES])


URL = "s3://bucket?endpoint=http://127.0.0.1:9&region=us-east-1"
NO_ROLE = "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 4 ms"


def test_s3_keys_that_nobody_named_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "access_key_id" not in open_bucket(URL, Credentials()).client.config, "the environment goes first"
    assert open_bucket(URL, Credentials("own", "x")).client.config["access_key_id"] == "own"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert NO_KEYS not in S3(open_bucket(URL, Credentials("own", "x")))._error(TimeoutError()).sentence
    for error, kind in ((TimeoutError(), "timeout"), (Exception(NO_ROLE), "credentials")):
        error = S3(open_bucket(URL, Credentials()))._error(error)
        assert error.kind == kind
        assert error.sentence.endswith(NO_KEYS)


def test_a_bucket_that_redirects_in_a_circle_is_elsewhere() -> None:
    text = "Generic S3 error: Error performing GET http://a/b in 4 ms - HTTP error: error following redirect"
    error = S3(open_bucket(URL, Credentials("own", "x")))._error(Exception(text))
    assert error.kind == "region"
    assert "answers redirects without end: check its region" in error.sentence


@pytest.mark.parametrize("whole", [True, False], ids=["the request", "each object"])
def test_a_bucket_that_refuses_removals_is_read(
    bucket: FaultyBucket, rig: SharedRig, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    blocks = rig.store_some(5)
    if whole:
        bucket.errors["POST"] = (403, "AccessDenied")
    else:
        bucket.kept = "AccessDenied"
    bucket.spoil = lambda value: value[:-1] + b"."
    for number, block in enumerate(blocks[:4], 1):
        assert rig.load(block) is Result.CORRUPT
        rig.until(lambda number=number: rig.kinds["credentials"] == number)
        assert rig.tier.available()
    assert rig.kinds == {"mismatch": 4, "credentials": 4}
    assert rig.tier.breaker.opened == 0
    assert "AccessDenied: check the credentials, which are read at the start" in rig.tier.health.refusal
    assert "s3:DeleteObject" in rig.tier.health.refusal
    bucket.spoil = bytes
    assert rig.load(blocks[4]) is DONE
    assert len(bucket.values) == 5


def test_a_bucket_that_may_not_be_asked_names_the_rights(bucket: FaultyBucket, rig: SharedRig) -> None:
    (block,) = rig.store_some(1)
    bucket.errors["HEAD"] = (403, "AccessDenied")
    for _ in range(3):
        rig.until(lambda: rig.tier.available())
        assert rig.ask_anew(block) == [Answer.NO]
        assert not rig.tier.available(), "at once: it will be so the next time"
    assert set(rig.kinds) == {"credentials"}
    assert "s3:ListBucket" in rig.tier.health.problem
    bucket.errors.clear()
    rig.until(lambda: rig.tier.available())
    assert rig.ask_anew(block) == [Answer.YES]
    assert rig.load(block) is DONE


def test_a_prefix_costs_few_requests(bucket: FaultyBucket, rig: SharedRig) -> None:
    block = rig.block(0)
    blocks = [block._replace(key=key_of(n)) for n in range(1000)]
    for there, most in ((0, 2), (1, 40), (77, 40), (640, 40), (1000, 2)):
        rig.forget()
        bucket.values.update(
            (f"/bucket/{key_of(n).hex()[:2]}/{name_of(blocks[n], 0).decode()}", b"") for n in range(there)
        )
        bucket.requests.clear()
        assert rig.ask(*blocks, prefix=True).count(Answer.YES) == there
        assert bucket.requests["HEAD"] <= most
        assert bucket.requests["GET"] <= 1, "the generation, every few seconds"


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (("127.0.0.1:", "127.0.0.1:1/"), "(Connection refused)"),
        (("http://", "https://"), "If it has no TLS, name its endpoint http://"),
    ],
)
def test_why_a_bucket_cannot_be_reached_is_reported(
    bucket: FaultyBucket, change: tuple[str, str], because: str
) -> None:
    rig = SharedRig(bucket.url.replace(*change))
    rig.until(lambda: rig.kinds["unreachable"] > 0)
    assert because in rig.tier.health.problem


# --- a real server ----------------------------------------------------------------------------------


class TokenService(ServerThread):
    """Exchanges web identities for keys that end before obstore believes in them for long.

    Attributes:
        tokens: the web identities that it was shown.
    """

    def __init__(self, cert: str, key: str) -> None:
        self.tokens: list[str] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def do_POST(self) -> None:
                asked = parse_qs(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())
                asked |= parse_qs(urlsplit(self.path).query)
                service.tokens += asked["WebIdentityToken"]
                until = datetime.now(UTC) + timedelta(seconds=60)
                fields = {
                    "AccessKeyId": f"key{len(service.tokens)}",
                    "SecretAccessKey": "secret",
                    "SessionToken": "session",
                    "Expiration": f"{until:%Y-%m-%dT%H:%M:%SZ}",
                }
                text = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
                for name in ("Credentials", "AssumeRoleWithWebIdentityResult", "AssumeRoleWithWebIdentityResponse"):
                    text = f"<{name}>{text}</{name}>"
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        super().__init__(server)


def test_keys_of_a_web_identity_are_renewed(
    certificate: tuple[str, str, str], bucket: FaultyBucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As of a role of a Kubernetes service account, whose keys end after an hour and whose token is replaced too."""
    authority, cert, key = certificate
    (token := tmp_path / "token").write_text("first")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with TokenService(cert, key) as service:
        monkeypatch.setenv("SSL_CERT_FILE", authority)
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/role")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"https://localhost:{service.port}")
        rig = SharedRig(bucket.url, ask_deadline_s=3.0).reachable()
        rig.store(block := rig.block(1))
        before = len(service.tokens)
        token.write_text("second")
        rig.until(lambda: rig.ask_anew(block) == [Answer.YES] and "second" in service.tokens)
        assert set(service.tokens[:before]) == {"first"}
        rig.until(lambda: rig.ask_anew(block) == [Answer.YES] and f"key{len(service.tokens)}" in bucket.authorization)
        assert rig.load(block) is DONE
        assert not rig.kinds


def test_over_tls_the_server_is_verified(certificate: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    authority, cert, key = certificate
    with S3Server(("-c", cert, "-k", key), "https") as server:
        wait_until(server.listens, 20.0)
        rig = SharedRig(server.url)
        rig.until(lambda: rig.kinds["tls"] > 0)
        monkeypatch.setenv("SSL_CERT_FILE", authority)
        rig = SharedRig(server.url)
        rig.until(lambda: rig.kinds["bucket"] > 0, 10.0)


@pytest.mark.parametrize("part", [0.01, 0.03, 0.1])
def test_a_bucket_that_wants_fewer_requests_is_asked_again_for_what_it_refused_alone(
    bucket: FaultyBucket, part: float
) -> None:
    rig = SharedRig(bucket.url, ask_deadline_s=3.0).reachable()
    blocks = rig.store_some(60)
    bucket.delay_s, bucket.refused_part = 0.05, part
    bucket.requests.clear()
    found = read = 0
    for number in range(12):
        answers = rig.ask_anew(*blocks, prefix=number % 2 == 0)
        found += answers.count(Answer.YES)
    rig.ask_anew(*blocks)
    gets, refused = bucket.requests["GET"], bucket.refused["GET"]
    for begin in range(0, len(blocks), SLOTS // 2):
        some = blocks[begin : begin + SLOTS // 2]
        ends = [rig.begin_read(block, slot=at) for at, block in enumerate(some, SLOTS // 2)]
        rig.until(partial(all, ends))
        read += sum(end == [DONE] for end in ends)
    assert found >= 0.95 * 12 * len(blocks)
    assert read >= 0.95 * len(blocks)
    gets, refused = bucket.requests["GET"] - gets, bucket.refused["GET"] - refused
    assert gets <= len(blocks) + refused + POLLS, "nothing is read twice"
    assert rig.tier.breaker.opened == 0
    assert sum(bucket.refused.values()) > 0, "or it proves nothing"


def test_a_request_that_is_not_answered_in_time_costs_its_own_key(bucket: FaultyBucket) -> None:
    rig = SharedRig(bucket.url, ask_deadline_s=2.0).reachable()
    blocks = rig.store_some(5)

    def asked(prefix: bool = False) -> tuple[list[Answer], int]:
        """The answers, and how often the bucket as a whole was too late for them."""
        late = rig.kinds["timeout"]
        return rig.ask_anew(*blocks, prefix=prefix), rig.kinds["timeout"] - late

    # Again where the machine is so busy that other requests are late too.
    bucket.late_paths = {next(path for path in bucket.values if blocks[3].key.hex() in path)}
    rig.until(lambda: asked() == ([Answer.YES, Answer.YES, Answer.YES, Answer.NO, Answer.YES], 0))
    rig.until(lambda: (found := asked(prefix=True))[0][0] is Answer.YES and found[1] == 0)
    bucket.late_paths = {path for path in bucket.values if "generation" not in path}
    assert asked() == ([Answer.NO] * 5, 1)
    bucket.late_paths = set()
    rig.until(lambda: asked() == ([Answer.YES] * 5, 0))


def test_a_window_costs_few_requests_however_often_it_is_looked_up(bucket: FaultyBucket) -> None:
    rig = SharedRig(bucket.url, ask_deadline_s=60.0).reachable()
    keys = [key_of(number) for number in range(3 * S3.most_window_keys)]
    bucket.requests.clear()
    for _ in range(3):
        rig.question(keys, prefix=False)
        rig.until(lambda: not rig.tier._answers.asked_keys)
    assert bucket.requests["HEAD"] == S3.most_window_keys


def test_what_an_overloaded_bucket_answers_of_a_question_counts(bucket: FaultyBucket, rig: SharedRig) -> None:
    blocks = rig.store_some(5)
    paths = {block.key: next(path for path in bucket.values if block.key.hex() in path) for block in blocks}
    bucket.busy_paths = {paths[blocks[3].key]}
    assert rig.ask_anew(*blocks) == [Answer.YES, Answer.YES, Answer.YES, Answer.NO, Answer.YES]
    assert rig.ask_anew(*blocks, prefix=True)[:3] == [Answer.YES] * 3
    bucket.busy_paths = set()
    assert rig.ask_anew(*blocks) == [Answer.YES] * 5
    bucket.busy_paths = {paths[blocks[3].key]}
    ends = [rig.begin_read(block, slot=8 + at) for at, block in enumerate(blocks)]
    rig.until(lambda: all(ends))
    assert ends == [[DONE], [DONE], [DONE], [Result.FAILED], [DONE]]
    bucket.busy_paths = set()
    rig.until(lambda: rig.ask(blocks[3]) == [Answer.YES], 5 * NO_S)
    assert rig.tier.available()
    assert rig.tier.breaker.opened == 0
