"""One Redis or Valkey server as a store: commands and replies of RESP2. ``redis_connection`` moves their bytes.

The clients on PyPI copy every value twice and reach a quarter of the network's speed; only five kinds of replies of the
protocol are needed (https://redis.io/docs/latest/develop/reference/protocol-spec/).
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

from kvoffd.tiers.header import HEADER_BYTES, Block, BlockGroup, decode_header, encode_header
from kvoffd.tiers.names import block_name, block_names, decode_generation, generation_name
from kvoffd.tiers.redis_connection import CONNECT_S, HEAD_BYTES, LINE_BYTES, REPLIES_BYTES, Demoted, RedisConnection
from kvoffd.tiers.redis_replies import ELSEWHERE, Refusal, RefusedReply, refusal_of
from kvoffd.tiers.store import (
    Credentials,
    GetRequest,
    PutRequest,
    Received,
    Servers,
    Store,
    StoreError,
    StoreFault,
    StoreUsage,
    name_of,
)
from kvoffd_proto.units import printable

MAX_COMING_BYTES = 2 << 20
"""Limit of requested values that have not come yet: more than the socket buffers hold costs a third of the speed
(measured). A larger value is requested alone."""
MAX_INFO_BYTES = 1 << 20
MAX_ELEMENTS = 16_384, 1024, 1024, 1024, 0
"""Limits of a list and of lists nested in it: a cluster's slot ranges, their fields, those of a server, its names."""
MAX_NAME_BYTES, MAX_NUMBER = 1024, 10**18
MAX_QUOTED_CHARACTERS = 200
TURN_MS, TURNS, TURN_PAUSE_S = 50, 4, 0.002
"""Time of a node's turn to raise a generation, turns for which another one waits, and the pause until it asks again."""
NEEDED_COMMANDS = (
    "~kvoffd/* +ping +get +exists +touch +expire +set +incrby +unlink, of a cluster +cluster|slots, "
    "and where the URL names a database +select"
)
_FIGURE = re.compile(r"^(maxmemory|used_memory|evicted_keys):([0-9]{1,18})\r?$", re.MULTILINE)


class Redis(Store):
    """See ``Store``. Makes requests of commands, and checks their replies; ``RedisConnection`` moves the bytes.

    A method ``send_x`` begins an exchange, and the one named in its docstring receives the replies, so that a cluster
    can ask all its masters at once.
    """

    poll_s = 5.0
    most_window_keys = 8192
    keys_at_once = 1024
    blocks_at_once, bytes_at_once = 32, 4 << 20
    writers = 2

    def __init__(
        self,
        host: str,
        port: int,
        database: int,
        credentials: Credentials,
        *,
        tls: bool,
        ttl_s: int = 0,
        clustered: bool = False,
        demoted: Demoted | None = None,
    ) -> None:
        self._name = name_of((host, port))
        self.servers = Servers(self._name)
        self.connected_in_s = 0.0
        """Time that the last connecting took; 0 before it."""
        self._connection = RedisConnection((host, port), tls=tls, demoted=demoted or Demoted())
        self._database = database
        self._credentials = credentials
        self._ttl = b"%d" % ttl_s if ttl_s else b""
        """Seconds after which the server deletes keys that were not written or touched; empty for never."""
        self._unasked: deque[GetRequest] = deque()
        """Blocks to request once fewer bytes are coming."""
        self._coming_bytes = 0
        """Bytes of requested blocks that have not come yet."""
        self._absent: Collection[Refusal] = ELSEWHERE if clustered else ()
        """Refusals that mean an absent key, and no failure: those of a cluster's server that does not own it now."""
        self.elsewhere: dict[Refusal, StoreError] = {}
        """The latest of these of each kind. ``RedisCluster`` takes them after each exchange."""

    # --- the connection --------------------------------------------------------------------------

    def connect(self, connect_s: float = CONNECT_S) -> None:
        """See ``Store``. ``connect_s``: see ``RedisConnection.open``."""
        if self._connection.is_usable():
            return
        self.close()
        deadline = self._connection.open(connect_s)
        user, password = self._credentials
        if password:
            # A password from a variable need not be UTF-8.
            words = [word.encode(errors="surrogateescape") for word in (user, password) if word]
            self._command([b"AUTH", *words], deadline)
        if self._database:
            self._command([b"SELECT", b"%d" % self._database], deadline)
        resolved_at = deadline - connect_s
        self.connected_in_s = time.monotonic() - resolved_at

    def close(self) -> None:
        self._unasked.clear()
        self._connection.close()

    def interrupt(self) -> None:
        self._connection.interrupt()

    def ping(self, deadline: float) -> None:
        self.send_ping(deadline)
        self.ping_answer(deadline)

    def send_ping(self, deadline: float) -> None:
        """Send a ping, whose answer ``ping_answer`` receives."""
        self._send_words([b"PING"], deadline)

    def ping_answer(self, deadline: float) -> None:
        self._check(self._connection.line(deadline), b"+")

    def usage(self, deadline: float) -> StoreUsage | None:
        self._send_words([b"INFO"], deadline)
        found = dict(_FIGURE.findall(self._reply(deadline, b"$", MAX_INFO_BYTES)))
        if not {"maxmemory", "used_memory", "evicted_keys"} <= found.keys():
            return None
        return StoreUsage(*(int(found[name]) for name in ("maxmemory", "used_memory", "evicted_keys")))

    def generation(self, fingerprint: bytes, deadline: float) -> int:
        name = generation_name(fingerprint)
        self.send_questions([], deadline, [name])
        return self.generation_answer(name, deadline) or 0

    def generations(self, fingerprints: Sequence[bytes], deadline: float) -> list[int | StoreError]:
        # A GET for each in one message: MGET is none of the commands that a restricted user of release 0.2 has.
        names, found = list(map(generation_name, fingerprints)), list[int | StoreError]()
        while len(found) < len(names):
            self.connect()  # a value that is no number has closed the connection
            asked = names[len(found) :]
            self.send_questions([], deadline, asked)
            for name in asked:
                try:
                    found.append(self.generation_answer(name, deadline) or 0)
                except StoreError as error:
                    if error.kind is not StoreFault.GENERATION:
                        raise
                    found.append(error)
                    break
        return found

    def ask(self, group: BlockGroup, keys: Sequence[bytes], deadline: float, *, prefix: bool) -> tuple[int, list[bool]]:
        own_name = generation_name(group.fingerprint)
        self.send_questions(block_names(group, keys), deadline, [own_name])
        return self.generation_answer(own_name, deadline) or 0, self.answers(len(keys), deadline)

    def touch(self, blocks: Sequence[Block], deadline: float) -> list[bool]:
        self.send_touches([block_name(block.group, block.key) for block in blocks], deadline)
        return self.answers(len(blocks), deadline)

    def send_touches(self, names: Sequence[bytes], deadline: float) -> None:
        """Send touches, whose results ``answers`` receives. This restarts the time to live, and counts as a use."""
        command, *last = (b"EXPIRE", self._ttl) if self._ttl else (b"TOUCH",)
        self._connection.send([_repeated(command, names, *last)], deadline)

    def send_questions(self, names: Sequence[bytes], deadline: float, generations: Sequence[bytes] = ()) -> None:
        """Send questions about names of generations, each received by ``generation_answer``, and then about names of
        blocks, received by ``answers``."""
        self._connection.send([_repeated(b"GET", generations) + _repeated(b"EXISTS", names)], deadline)

    def generation_answer(self, name: bytes, deadline: float) -> int | None:
        """Receive the generation of this name, 0 for none; None if it is elsewhere in the cluster."""
        text = b""  # of no value
        match self._value_length(deadline):
            case RefusedReply(kind=Refusal.BUSY) as busy:  # without it, the other answers are useless
                self.close()
                raise busy.error
            case RefusedReply(kind=Refusal.WRONG_TYPE):
                text = b"of another type"  # is no number: ``decode_generation`` raises; so is what is long
            case RefusedReply():
                return None
            case int(length):
                is_short = length <= LINE_BYTES
                text = self._connection.take(length + 2, deadline)[:-2] if is_short else b"long"
        try:
            return decode_generation(text, f"The value of {name.decode()} at {self._name}")
        except StoreError:
            self.close()
            raise

    def get(self, requests: Sequence[GetRequest], patience_s: float) -> Iterator[Received | StoreError | None]:
        self.send_gets(requests, time.monotonic() + patience_s)
        for request in requests:
            received = self.value(request, time.monotonic() + patience_s)
            yield received
            if isinstance(received, Received) and received.block is None:  # the connection is closed
                return

    def send_gets(self, requests: Sequence[GetRequest], deadline: float) -> None:
        """Request blocks, each of which one call of ``value`` receives."""
        self._unasked, self._coming_bytes = deque(requests), 0
        self._connection.send(self._further_gets(), deadline)

    def _further_gets(self) -> list[bytes]:
        """Return the requests of further blocks, as many as MAX_COMING_BYTES allows, or one larger block alone; none
        while more than half of that is coming, so that each message has several."""
        names: list[bytes] = []
        while self._unasked and (names or self._coming_bytes <= MAX_COMING_BYTES // 2):
            request = self._unasked[0]
            if self._coming_bytes and self._coming_bytes + request.group.nbytes > MAX_COMING_BYTES:
                break
            self._unasked.popleft()
            self._coming_bytes += request.group.nbytes
            names += block_names(request.group, [request.key])
        return [_repeated(b"GET", names)]

    def value(self, request: GetRequest, deadline: float) -> Received | StoreError | None:
        """Receive one block, as ``get`` yields it; if it is no block, the connection is closed."""
        received: Received | StoreError | None = None  # of no value, or one that is elsewhere in the cluster
        match self._value_length(deadline):
            case RefusedReply(kind=Refusal.BUSY) as busy:
                received = busy.error
            case RefusedReply(kind=Refusal.WRONG_TYPE):
                self.close()
                return Received(None)
            case int(length):
                fits = length == HEADER_BYTES + request.group.nbytes
                if not fits or (block := decode_header(self._connection.take(HEADER_BYTES, deadline))) is None:
                    self.close()
                    return Received(None)
                received = Received(block, self._connection.fill(request.views, deadline))
                if self._connection.take(2, deadline) != b"\r\n":
                    raise self._connection.protocol_error("a value does not end where it should")
        self._coming_bytes -= request.group.nbytes
        self._connection.send(self._further_gets(), deadline, continues=True)
        return received

    def put(self, requests: Sequence[PutRequest], deadline: float) -> list[bool | None]:
        self.send_puts(requests, deadline)
        return self.put_results(len(requests), deadline)

    def send_puts(self, requests: Sequence[PutRequest], deadline: float) -> None:
        """Send blocks; ``put_results`` receives the answers."""
        parts: list[bytes | memoryview] = []
        head, end = (b"*5", b"\r\n$2\r\nEX\r\n" + _bulk(self._ttl)) if self._ttl else (b"*3", b"\r\n")
        for block, views in requests:
            name, nbytes = block_name(block.group, block.key), HEADER_BYTES + sum(map(len, views))
            parts.append(b"%s\r\n$3\r\nSET\r\n%s$%d\r\n" % (head, _bulk(name), nbytes))
            parts += [encode_header(block), *views, end]
        self._connection.send(parts, deadline)

    def put_results(self, count: int, deadline: float) -> list[bool | None]:
        """Receive ``count`` answers, as ``put`` returns them. Raises StoreError if a busy server refused all."""
        results = [self._put_result(deadline) for _ in range(count)]
        busy = [one for one in results if isinstance(one, StoreError)]
        if busy and len(busy) == count:
            self.close()
            raise busy[0]
        return [None if isinstance(one, StoreError) else one for one in results]

    def _put_result(self, deadline: float) -> bool | StoreError | None:
        """Receive one answer, as ``put`` returns it; the error if a busy server refused it."""
        line = self._connection.line(deadline)
        if (refused := self._refused(line, {Refusal.BUSY, Refusal.FULL})) is None:
            self._check(line, b"+")
            return True
        if refused.kind is Refusal.BUSY:
            return refused.error
        return False if refused.kind is Refusal.FULL else None  # None: its slot is elsewhere

    def remove(self, group: BlockGroup, keys: Sequence[bytes], deadline: float) -> None:
        self.remove_names(block_names(group, keys), deadline)

    def remove_names(self, names: Sequence[bytes], deadline: float) -> None:
        self._connection.send([_repeated(b"UNLINK", names)], deadline)
        self.answers(len(names), deadline)

    def cluster_slots(self, deadline: float) -> list[Any]:
        """Return the reply to CLUSTER SLOTS, of numbers, texts and lists of them: see ``masters_of``."""
        self._send_words([b"CLUSTER", b"SLOTS"], deadline)
        return cast(list[Any], self._reply(deadline, b"*"))

    def _reply(self, deadline: float, kinds: bytes = b":$*", most_bytes: int = MAX_NAME_BYTES, depth: int = 0) -> Any:
        """Receive a short reply of one of these kinds: a number, a text, or a list of them; null is an empty text."""
        line = self._connection.line(deadline, REPLIES_BYTES)
        kind, text = line[:1], line[1:]
        if line == b"$-1" and b"$" in kinds:
            return ""
        if not kind or kind not in kinds:
            self._check(line, kinds[:1])  # raises: it is of another kind
        most = {b":": MAX_NUMBER, b"$": most_bytes, b"*": MAX_ELEMENTS[min(depth, 4)]}[kind]
        if not re.fullmatch(rb"-?[0-9]{1,18}", text) or not (kind == b":" or 0 <= int(text) <= most):
            raise self._connection.protocol_error(f"{self._quoted(text)} is not a valid number or length")
        if kind == b":":
            return int(text)
        if kind == b"$":
            return self._connection.take(int(text) + 2, deadline)[:-2].decode(errors="replace")
        return [self._reply(deadline, depth=depth + 1) for _ in range(int(text))]

    def raise_generation(self, fingerprint: bytes, seen: int, generation: int, deadline: float) -> int:
        return self.raise_stored(generation_name(fingerprint), seen, generation, deadline)

    def raise_stored(self, name: bytes, seen: int, generation: int, deadline: float) -> int:
        """Raise the generation of this name, as ``raise_generation`` does.

        INCRBY never lowers it. But many nodes raise it at once after a failover to a replica without the last clear. If
        each added what it lacks, they would together pass ``MAX_AHEAD_S``: no node could follow. So they take turns.
        """
        if not seen:  # if several nodes find it missing, after a server lost it, only one may write it
            self._send_words([b"SET", name, b"%d" % generation, b"NX"], deadline)
            if (line := self._connection.line(deadline)) != b"$-1":
                self._check(line, b"+")
                return generation
        until = time.monotonic() + TURNS * TURN_MS / 1000
        while True:
            is_turn, seen = self._take_turn(name, deadline)
            if seen >= generation:  # another node's raise was enough
                return seen
            if is_turn or time.monotonic() >= until:
                break
            time.sleep(TURN_PAUSE_S)
        self._send_words([b"INCRBY", name, b"%d" % (generation - seen)], deadline)
        return int(self._reply(deadline, b":"))

    def _take_turn(self, name: bytes, deadline: float) -> tuple[bool, int]:
        """Take the turn to raise a generation, which ends by itself, unless another node has it. Return whether this
        node has it, and the generation."""
        words = b"SET", b"kvoffd/2/turn/{%s}" % name, b"1", b"PX", b"%d" % TURN_MS, b"NX"  # in a cluster in its slot
        self._connection.send([b"*6\r\n", *map(_bulk, words), _repeated(b"GET", [name])], deadline)
        if (line := self._connection.line(deadline)) != b"$-1":
            self._check(line, b"+")
        return line != b"$-1", self.generation_answer(name, deadline) or 0

    # --- RESP ------------------------------------------------------------------------------------

    def _send_words(self, words: Sequence[bytes], deadline: float) -> None:
        """Send one command."""
        self._connection.send([b"*%d\r\n" % len(words), *map(_bulk, words)], deadline)

    def _command(self, words: Sequence[bytes], deadline: float) -> None:
        """Send a command whose answer is OK."""
        self._send_words(words, deadline)
        self._check(self._connection.line(deadline), b"+")

    def _refused(self, line: bytes, expected: Collection[Refusal]) -> RefusedReply | None:
        """Return an error reply that is no failure: one that is expected, or that means an absent key. Else None."""
        kind = refusal_of(line)
        if kind is None or not (kind in expected or kind in self._absent):
            return None
        refused = RefusedReply(kind, self._error_of(kind, line))
        if kind in self._absent:
            self.elsewhere[kind] = refused.error
        return refused

    def _check(self, line: bytes, kind: bytes) -> bytes:
        """Return the rest of a reply's line of this kind. Raises StoreError for another, and closes the connection."""
        if line[:1] == kind:
            return line[1:]
        if (refusal := refusal_of(line)) is None:
            raise self._connection.protocol_error(f"{self._quoted(line)} is not a reply to the request")
        if refusal is Refusal.REPLICA:
            self._connection.mark_replica()
        self.close()
        raise self._error_of(refusal, line)

    def _error_of(self, refusal: Refusal, line: bytes) -> StoreError:
        name, text = self._name, self._quoted(line[1:])
        match refusal:
            case Refusal.BUSY:
                return StoreError(StoreFault.BUSY, f"{name} is busy and answers: {text.rstrip('.')}.")
            case Refusal.FORBIDDEN:
                why = f"{name} does not permit this user to do that ({text}); it needs {NEEDED_COMMANDS}."
                return StoreError(StoreFault.FORBIDDEN, why)
            case Refusal.REPLICA:
                cure = "The name is resolved again before the next write, as after a failover; else name its primary."
                return StoreError(StoreFault.REFUSED, f"{name} is a read-only replica ({text.rstrip('.')}). {cure}")
            case Refusal.LOGIN:
                why = f"{name} refuses the login ({text}); see shared_password_file, which is read at the start."
                return StoreError(StoreFault.CREDENTIALS, why)
            case Refusal.DOWN:
                why = "some slots have no master; repair it, or set cluster-require-full-coverage no."
                return StoreError(StoreFault.CLUSTER, f"The cluster of {name} is down ({text}): {why}")
            case Refusal.MOVED | Refusal.MOVING | Refusal.CROSS_SLOT:
                why = f"{name} is in a cluster: name it redis+cluster://, or it changed ({text})."
                return StoreError(StoreFault.CLUSTER, why)
        hint = " Name it redis://." if "cluster support disabled" in text else ""
        return StoreError(StoreFault.REFUSED, f"{name} answers: {text.rstrip('.')}.{hint}")

    def _quoted(self, line: bytes) -> str:
        """Return a server's text for the log, without the password, which an error about AUTH repeats in part."""
        text = line.decode(errors="surrogateescape").partition(", with args beginning with")[0]
        if self._credentials.password:
            text = text.replace(self._credentials.password, "***")
        return printable(text[:MAX_QUOTED_CHARACTERS])

    def answers(self, count: int, deadline: float) -> list[bool]:
        """Receive ``count`` numbers; return whether each is not 0. What a busy server refused counts as 0, unless that
        is all."""
        answers = self._connection.lines(count, deadline)
        absent, different = {b":0"}, set(answers)  # of thousands of answers few are different
        expected: Collection[Refusal] = {Refusal.BUSY} if any(line.startswith(b":") for line in different) else ()
        for line in different - {b":0", b":1"}:
            if self._refused(line, expected) is not None:
                absent.add(line)
            else:
                self._check(line, b":")
        return [line not in absent for line in answers]

    def _value_length(self, deadline: float) -> int | RefusedReply | None:
        """Return the length of the next value; None for no value; and why it is not sent, if it is of another type or
        elsewhere in the cluster, or the server is busy."""
        line = self._connection.line(deadline, HEAD_BYTES)
        if re.fullmatch(rb"\$[0-9]{1,18}", line):
            return int(line[1:])
        if line == b"$-1":
            return None
        if (refused := self._refused(line, {Refusal.BUSY, Refusal.WRONG_TYPE})) is not None:
            return refused
        text = self._check(line, b"$")
        raise self._connection.protocol_error(f"{self._quoted(text)} is not a length")


def _bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


def _repeated(command: bytes, names: Sequence[bytes], *last: bytes) -> bytes:
    """Encode a command for each name, with the arguments ``last``."""
    head = b"*%d\r\n$%d\r\n%s\r\n" % (2 + len(last), len(command), command)
    end = b"".join(map(_bulk, last))
    return b"".join([b"%s$%d\r\n%s\r\n%s" % (head, len(name), name, end) for name in names])
