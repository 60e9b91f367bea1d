"""A streaming client of OpenAI's API that notes when things happen, and nothing else."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from cardan.bench.chunks import AnswerFold, error_message
from cardan.bench.prompts import ENDPOINT_PATHS, Endpoint
from cardan.bench.record import RequestRecord
from cardan.bench.sse import EventParser
from cardan.core.types.errors import ConfigError

# Shorter than servers wait before they close an idle connection (uvicorn: 5 s), so that no request
# is sent on a connection that is just being closed.
_KEEPALIVE_SECONDS = 2.0
_QUERY_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Where requests go.

    Attributes:
        base_url: with or without ``/v1`` at its end.
        endpoint: ``completions`` or ``chat``.
        headers: sent with every request, credentials included: never part of a result.
    """

    base_url: str
    endpoint: Endpoint
    headers: Mapping[str, str]

    def url(self, path: str) -> str:
        """Full address of a path that begins with ``/v1``."""
        base = self.base_url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise ConfigError(
                f"base_url {self.base_url!r} must begin with http:// or https://, "
                "such as http://127.0.0.1:8000"
            )
        return base + path


@dataclass(frozen=True, slots=True)
class _Sending:
    """A request on its way out."""

    record: RequestRecord
    start: float


def _send_times() -> aiohttp.TraceConfig:
    """Notes in the record when a body is written, which is after the connection was made."""

    async def on_sent(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
        sending = context.trace_request_ctx
        if isinstance(sending, _Sending):
            sending.record.sent = asyncio.get_running_loop().time() - sending.start

    trace = aiohttp.TraceConfig()
    trace.on_request_chunk_sent.append(on_sent)
    return trace


class Client:
    """Sends requests of one run; an async context manager that owns its connections."""

    def __init__(self, address: ServerAddress, timeout: float, keep_text: bool = False) -> None:
        """``timeout``: seconds that a request may take from its sending to its end."""
        self._address = address
        self._url = address.url(ENDPOINT_PATHS[address.endpoint])
        self._timeout = timeout
        self._keep_text = keep_text
        self._session: aiohttp.ClientSession | None = None
        self.num_without_usage = 0  # complete answers whose tokens the server did not count

    async def __aenter__(self) -> Self:
        # How many run at once is the load's decision, so the pool has no limit of its own.
        # Names are looked up once: a lookup in the middle of a run would delay its request.
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_KEEPALIVE_SECONDS, ttl_dns_cache=None
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Accept-Encoding": "identity", **self._address.headers},
            trace_configs=[_send_times()],
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def models(self) -> list[str]:
        """Names of the models that the server serves.

        Raises:
            ConfigError: the server cannot be reached or does not say.
        """
        url = self._address.url("/v1/models")
        timeout = aiohttp.ClientTimeout(total=_QUERY_SECONDS)
        try:
            async with self._opened().get(url, timeout=timeout) as response:
                status, body = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConfigError(
                f"base_url: no server answers at {url} ({_describe(error)}); start one, such as "
                "cardan serve MODEL, or give its --base-url"
            ) from error
        if status != 200:
            raise ConfigError(
                f"base_url: {url} answers HTTP {status} {_body_message(body)}; name the --model, "
                "and an --api-key if one is needed"
            )
        try:
            names = [entry["id"] for entry in msgspec.json.decode(body)["data"]]
        except (msgspec.DecodeError, KeyError, TypeError):
            names = []
        if not names:
            raise ConfigError(f"base_url: {url} lists no models; name the --model")
        return [str(name) for name in names]

    async def send(self, body: bytes, record: RequestRecord, start: float) -> None:
        """Send one request and fill its record; what goes wrong is written there, not raised.

        A cancelled send leaves in the record what was seen until then.

        Args:
            body: JSON of a streamed request.
            record: ``sent`` (when the body was written to the open connection) and all that
                follows it are written.
            start: the loop's time at which the run began.
        """
        clock = asyncio.get_running_loop().time
        record.sent = clock() - start
        fold = AnswerFold(record, self._keep_text)
        try:
            async with asyncio.timeout(self._timeout):
                record.error = await self._stream(body, record, fold, start)
        except TimeoutError:
            record.error = f"timeout: no complete answer within {self._timeout:g} s"
        except (aiohttp.ClientError, OSError) as error:
            record.error = f"connection: {_describe(error)}"
        finally:
            fold.close()
            # A complete answer ended with its last chunk, not with what the stream closed with.
            if record.error is not None or not record.end:
                record.end = clock() - start
        if record.error is None and not fold.has_usage:
            self.num_without_usage += 1

    async def _stream(
        self, body: bytes, record: RequestRecord, fold: AnswerFold, start: float
    ) -> str | None:
        """Read one answer; returns what is wrong with it, if anything."""
        clock = asyncio.get_running_loop().time
        parser = EventParser()
        request = self._opened().post(
            self._url,
            data=body,
            headers={"Content-Type": "application/json"},
            trace_request_ctx=_Sending(record, start),
        )
        async with request as response:
            record.status = response.status
            if response.status != 200:
                return f"HTTP {response.status}: {_body_message(await response.read())}"
            if "text/event-stream" not in response.headers.get("Content-Type", ""):
                return "not streamed: the server answered with something else than an event stream"
            # Read to the very end: only then is the connection free for the next request.
            is_done, problem = False, None
            async for data in response.content.iter_any():
                now = clock() - start
                for event in parser.feed(data):
                    if event == b"[DONE]":
                        is_done = True
                    elif problem is None:
                        problem = fold.add(event, now)
        if problem is None and not (is_done or fold.is_finished):
            return "truncated: the stream ended before the answer did"
        return problem

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the client is used outside of its context")
        return self._session


def _body_message(body: bytes) -> str:
    """The message of an error's body."""
    try:
        parsed: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return error_message(body.decode("utf-8", "replace"))
    if isinstance(parsed, dict) and "error" in parsed:
        parsed = parsed["error"]
    return error_message(parsed)


def _describe(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__} {error}".split())
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        text += " (each request on its way needs one: raise ulimit -n, or give --max-concurrency)"
    return text
