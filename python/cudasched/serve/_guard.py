"""Who is let in to `cudasched serve`, before anything else is done.

`Callers` decides for HTTP and gRPC alike: callers that come too often are refused, those with the token counted apart,
and then requests without a token. `Guard` is an ASGI application around the real one. `Guard` first refuses a host that
is no name of this server (DNS rebinding), then a page of another origin (CSRF). An admitted request has a bounded body
and bounded time. No answer of the guard has data of the clients.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Callers", "Guard", "Limits", "RateLimiter", "Refusal", "hosts_of"]

Scope = dict[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_WITH_PORT = re.compile(r"[^:]:\d+$")  # no bare address of IPv6, which is in brackets

_HEADERS = {
    b"cache-control": b"no-store",
    b"content-security-policy": (
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
}

# So much of a body that is too large is received and dropped before the refusal. A connection that is closed with
# unread bytes is reset, and its sender may never see the answer.
_RECEIVED_BYTES = 1 << 20


@dataclass(frozen=True)
class Limits:
    """One caller's limits.

    Attributes:
        body_bytes: Of a request.
        request_s: Until a request has been received. Operations for one with the token have time-outs of their own.
        per_s: Requests a second, of one address; infinite: no limit.
        burst: So many at once.
        wrong_tokens: So many at once, of one address; one more each `wrong_token_s`.
        wrong_token_s: See there.
    """

    body_bytes: int = 16 * 1024
    request_s: float = 30.0
    per_s: float = 20.0
    burst: int = 60
    wrong_tokens: int = 10
    wrong_token_s: float = 5.0


class RateLimiter:
    """Token buckets by address, of the last addresses that were seen. For any number of threads."""

    _MOST = 1024

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._burst, self._clock = per_s, float(burst), clock
        self._lock = threading.Lock()
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, address: str, take: float = 1.0) -> float:
        """Takes one; 0, or how long the address has to wait before it may come again.

        Args:
            address: Of the caller.
            take: 0: only asks.
        """
        with self._lock:
            now = self._clock()
            left, since = self._left.pop(address, (self._burst, now))
            left = min(self._burst, left + self._per_s * (now - since))
            enough = left >= 1.0
            self._left[address] = (left - take if enough else left, now)
            if len(self._left) > self._MOST:
                self._left.popitem(last=False)
            return 0.0 if enough else (1.0 - left) / self._per_s


def hosts_of(host: str, port: int, others: Iterable[str] = ()) -> frozenset[str]:
    """The hosts that a request may name: the server's address and port, by every name.

    Args:
        host: The address.
        port: The port.
        others: Further names, of a certificate for one; with another port, where one is forwarded.
    """
    names = [name.lower() for name in (host, *others, *(_LOOPBACK if host in _LOOPBACK else ()))]
    written = [f"[{name}]" if name.count(":") > 1 and "[" not in name else name for name in names]
    return frozenset(name if _WITH_PORT.search(name) else f"{name}:{port}" for name in written)


@dataclass(frozen=True)
class Refusal:
    """Why a caller is not let in.

    Attributes:
        message: For the caller.
        wait_s: The time until the caller may come again, where it comes too often; 0: it has no token.
    """

    message: str
    wait_s: float = 0.0


class Callers:
    """Who may use the server. For any number of threads.

    Requests with the token are counted apart from the others of their address. All users of a machine have its loopback
    address, and no client without the token may shut out those with the token.

    Args:
        token: The bearer token.
        limits: A caller's limits.
        refused: Told of each wrong token, with the caller's address; it is not told more often than
            `Limits.wrong_tokens` allow.
    """

    def __init__(
        self, token: str, limits: Limits | None = None, refused: Callable[[str], None] = lambda address: None
    ) -> None:
        self.limits = limits or Limits()
        self._expected = b"bearer " + token.encode()
        self._refused = refused
        self._requests = RateLimiter(self.limits.per_s, self.limits.burst) if self.limited else None
        self._wrong = RateLimiter(1.0 / self.limits.wrong_token_s, self.limits.wrong_tokens)

    @property
    def limited(self) -> bool:
        """Whether callers with the token may come too often."""
        return math.isfinite(self.limits.per_s)

    def knows(self, authorization: Sequence[bytes]) -> bool:
        """Whether a caller sent the token, and nothing else under that name."""
        if len(authorization) != 1:
            return False
        scheme, space, token = authorization[0].partition(b" ")
        return hmac.compare_digest(scheme.lower() + space + token, self._expected)  # a scheme's case has no meaning

    def refusal(self, address: str, authorization: Sequence[bytes], public: bool = False) -> Refusal | None:
        """Counts a request; None: it is let in.

        Args:
            address: Of the caller.
            authorization: The header of that name.
            public: The requested operation needs no token.
        """
        known = self.knows(authorization)
        if self._requests is not None:
            wait_s = self._requests.wait_s(f"{address} with the token" if known else address)
            if wait_s > 0:
                return Refusal("too many requests", wait_s)
        if known or public:
            return None
        wait_s = self._wrong.wait_s(address, take=0)
        if wait_s > 0:
            return Refusal("too many wrong tokens", wait_s)
        if authorization:
            self._wrong.wait_s(address)
            self._refused(address)
            return Refusal("that is not the token: the server says at its start which file it is in")
        return Refusal("a bearer token is needed: the server says at its start which file it is in")


class _TooLargeError(Exception):
    """The body."""


class Guard:
    """The application behind its guard.

    Args:
        application: The guarded application.
        callers: Decides which callers are admitted.
        hosts: As `hosts_of` says them.
        scheme: ``http`` or ``https``.
        public: Paths that need no token: they say nothing of the clients.
    """

    def __init__(
        self,
        application: Application,
        callers: Callers,
        *,
        hosts: frozenset[str],
        scheme: str = "http",
        public: frozenset[str] = frozenset(),
    ) -> None:
        self._application = application
        self._callers = callers
        # A client leaves the scheme's own port out.
        self._hosts = hosts | {host.removesuffix(":443" if scheme == "https" else ":80") for host in hosts}
        self._origins = frozenset(f"{scheme}://{host}" for host in self._hosts)
        self._limits = callers.limits
        self._received_bytes = max(_RECEIVED_BYTES, 2 * self._limits.body_bytes)
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name.lower() for name, _ in message["headers"]}
                added = [(name, value) for name, value in _HEADERS.items() if name not in own]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await _answer(sending, *refusal)
            return
        try:
            body = await self._in_time(receive)
        except _TooLargeError:
            await _answer(sending, 413, f"a request has at most {self._limits.body_bytes} bytes")
            return
        except TimeoutError:
            await _answer(sending, 408, f"the request took longer than {self._limits.request_s:g} s")
            return
        if body is None:
            return
        # The application gets the whole of a body, or hears nothing of the request.
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receiving() -> Message:
            return whole.pop() if whole else await receive()

        # The answer to HEAD is GET's, of which the server sends the head.
        wanted = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        await self._application(wanted, receiving, sending)

    async def _in_time(self, receive: Receive) -> bytes | None:
        """As `_received`, or TimeoutError; in the caller's task, unlike `asyncio.wait_for` before Python 3.12."""
        task, late = asyncio.current_task(), False
        assert task is not None

        def end() -> None:
            nonlocal late
            late = task.cancel()

        timer = asyncio.get_running_loop().call_later(self._limits.request_s, end)
        try:
            return await self._received(receive)
        except asyncio.CancelledError:
            if late:
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()

    async def _received(self, receive: Receive) -> bytes | None:
        """The body; None: the caller is gone."""
        parts: list[bytes] = []
        received = 0
        more = True
        while more and received <= self._received_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            more = message.get("more_body", False)
            received += len(part)
            if received <= self._limits.body_bytes:
                parts.append(part)
        if received > self._limits.body_bytes:
            raise _TooLargeError
        return b"".join(parts)

    def _refusal(self, scope: Scope) -> tuple[int, str] | tuple[int, str, float] | None:
        """Why the request is not let in: a status, a message, and after how long it may come again."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        address = str((scope.get("client") or ("",))[0])

        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or hosts[0].decode("latin-1").lower() not in self._hosts:
            return 421, "this server is not called by that name; --allowed-host allows another one"
        origins = headers.get(b"origin", [])
        if any(origin.decode("latin-1").lower() not in self._origins for origin in origins):
            return 403, "a page of another origin may not use this server"
        if not origins and headers.get(b"sec-fetch-site", [b"none"])[0] not in (b"none", b"same-origin"):
            return 403, "a page of another origin may not use this server"
        refusal = self._callers.refusal(address, headers.get(b"authorization", []), scope["path"] in self._public)
        if refusal is not None:
            return (429 if refusal.wait_s > 0 else 401), refusal.message, refusal.wait_s
        lengths = headers.get(b"content-length", [b"0"])
        if len(lengths) != 1 or not lengths[0].isdigit() or int(lengths[0][:12]) > self._received_bytes:
            return 413, f"a request has at most {self._limits.body_bytes} bytes"
        return None


async def _answer(send: Send, status: int, message: str, wait_s: float = 0.0) -> None:
    body = json.dumps({"detail": message, "error": message}).encode()  # FastAPI's name, and the inference protocol's
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if wait_s > 0:
        headers.append((b"retry-after", str(int(wait_s) + 1).encode()))
    if status in (408, 413):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
