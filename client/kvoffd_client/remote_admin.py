"""The administrator's client on another machine: TCP, encrypted and authenticated by CURVE."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvoffd_client.administration import Administration, R
from kvoffd_client.errors import DaemonUnavailable, RequestRefused, RequestTimeout
from kvoffd_client.options import ClientOptions
from kvoffd_client.socket_link import MAX_MESSAGE_BYTES
from kvoffd_proto.codec import CodecError, decode_reply, encode
from kvoffd_proto.curve import NO_TOKEN
from kvoffd_proto.messages import AnyReply, AnyRequest, Error, Hello, Role, Welcome
from kvoffd_proto.version import PROTOCOL_VERSION

DEFAULT_OPTIONS = ClientOptions(request_timeout_s=10.0)
"""Other machines may be far away."""


class RemoteAdminClient(Administration):
    """Administration over a daemon's ``admin_address``.

    Args:
        address: ``host:port``.
        server_key: the daemon's public key, 40 characters of Z85. Who has not its secret gets no request.
        secret_key: the administrator's own. Its public half must be in the daemon's ``admin_clients_file``.
        options: ``request_timeout_s`` bounds every call, the connecting in it included.

    Raises:
        ValueError: a key is none.
    """

    def __init__(
        self, address: str, server_key: str, secret_key: str, options: ClientOptions = DEFAULT_OPTIONS
    ) -> None:
        try:
            self._public_key = zmq.curve_public(secret_key.encode())
            zmq.curve_public(server_key.encode())  # it is as long as a secret key, and written alike
        except zmq.ZMQError as error:
            raise ValueError("A key has 40 characters, as `kvoffd-cli keygen` writes it.") from error
        self._address = address
        self._server_key = server_key.encode()
        self._secret_key = secret_key.encode()
        self._options = options
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] | None = None
        self._last_id = 0
        self._one_call = threading.Lock()

    def close(self) -> None:
        """Go away. Repeatable."""
        with self._one_call:
            self._let_go()
            self._context.term()

    def _ask(self, kind: type[R], make: Callable[[int, bytes], AnyRequest]) -> R:
        with self._one_call:
            if self._context.closed:
                raise DaemonUnavailable("The client is closed; make a new one.")
            deadline = time.monotonic() + self._options.request_timeout_s
            socket = self._connected(deadline)
            reply = self._exchange(socket, make, deadline)
        if not isinstance(reply, kind):
            raise DaemonUnavailable(f"The daemon at {self._address} answered with a {type(reply).__name__}.")
        return reply

    def _connected(self, deadline: float) -> zmq.Socket[bytes]:
        """The socket, after Hello: a daemon of another version says so."""
        if self._socket is not None:
            return self._socket
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket = socket
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._server_key)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret_key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public_key)
            self._connect(socket, deadline)
            hello = self._exchange(
                socket,
                lambda request_id, token: Hello(request_id, token, PROTOCOL_VERSION, Role.ADMIN, "admin", ""),
                deadline,
            )
            if not isinstance(hello, Welcome):
                raise DaemonUnavailable(f"The daemon at {self._address} answered Hello with a {type(hello).__name__}.")
        except BaseException:
            self._let_go()
            raise
        return socket

    def _connect(self, socket: zmq.Socket[bytes], deadline: float) -> None:
        """Connect. Raises DaemonUnavailable, which says where it failed."""
        wanted = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        monitor = socket.get_monitor_socket(wanted)
        problem = "nothing answers there"
        try:
            socket.connect(f"tcp://{self._address}")
            while monitor.poll(max(0, round((deadline - time.monotonic()) * 1000))):
                event = recv_monitor_message(monitor)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    return
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    problem = f"its admin_clients_file lacks this client's key, {self._public_key.decode()}"
                    break
                problem = "what listens there is no kvoffd, or has another key than the one given for it"
        except zmq.ZMQError as error:
            problem = f"{error}; an address is host:port"
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
        raise DaemonUnavailable(f"The kvoffd daemon at {self._address} cannot be reached: {problem}.")

    def _exchange(
        self, socket: zmq.Socket[bytes], make: Callable[[int, bytes], AnyRequest], deadline: float
    ) -> AnyReply:
        self._last_id += 1
        frame = encode(make(self._last_id, NO_TOKEN))
        sent = False
        while (left := deadline - time.monotonic()) > 0:
            ready = socket.poll(max(1, round(left * 1000)), zmq.POLLIN if sent else zmq.POLLOUT)
            if ready & zmq.POLLOUT:
                socket.send(frame, zmq.NOBLOCK)
                sent = True
            elif ready & zmq.POLLIN and (reply := self._receive(socket)).request_id == self._last_id:
                if isinstance(reply, Error):
                    raise RequestRefused(reply.code, reply.message)
                return reply
        self._let_go()
        raise RequestTimeout(f"The kvoffd daemon at {self._address} did not answer in time; try again later.")

    def _receive(self, socket: zmq.Socket[bytes]) -> AnyReply:
        frames = socket.recv_multipart(zmq.NOBLOCK)
        try:
            return decode_reply(frames[0] if len(frames) == 1 else b"")
        except CodecError as error:
            self._let_go()
            raise DaemonUnavailable(f"The daemon at {self._address} sent what is no reply: {error}.") from error

    def _let_go(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
