"""Clients on raw sockets that leave at a chosen point."""

import asyncio
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

DONE = b"data: [DONE]\n\n"
# A client that waits longer has met a hang.
PATIENCE = 60.0
LONG_PROMPT = "one two three four five six seven eight nine ten " * 60


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> "Address":
        host, _, port = url.removeprefix("http://").partition(":")
        return cls(host, int(port))


class Peer:
    """One connection. ``drop`` ends it politely or by a reset."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        async with asyncio.timeout(PATIENCE):
            await self._loop.sock_sendall(self._sock, data)

    async def read(self, size: int = 65536) -> bytes:
        async with asyncio.timeout(PATIENCE):
            return await self._loop.sock_recv(self._sock, size)

    async def read_until(self, mark: bytes, count: int = 1) -> bytes:
        """Everything up to the ``count``-th mark, or to the end: of the connection, or of a stream,
        which a slow machine may send in fewer events than it has tokens."""
        data = b""
        while data.count(mark) < count and DONE not in data and (part := await self.read()):
            data += part
        return data

    async def read_all(self) -> bytes:
        data = b""
        while part := await self.read():
            data += part
        return data

    def half_close(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    def drop(self, *, by_reset: bool) -> None:
        if by_reset:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()


@asynccontextmanager
async def connect(
    address: Address, *, by_reset: bool = False, receive_buffer: int | None = None
) -> AsyncIterator[Peer]:
    """A connection that is dropped at the end of the block, whatever happened in it."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    peer = Peer(sock)
    try:
        async with asyncio.timeout(PATIENCE):
            await asyncio.get_running_loop().sock_connect(sock, (address.host, address.port))
        yield peer
    except (ConnectionResetError, BrokenPipeError):
        pass  # the server was first
    finally:
        peer.drop(by_reset=by_reset)


def post(path: str, fields: object, *headers: str) -> bytes:
    """A whole request."""
    body = json.dumps(fields).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def generation(rng: random.Random, *, stream: bool, **fields: object) -> bytes:
    settings = {"max_tokens": 200, "ignore_eos": True, "stream": stream, **fields}
    settings.setdefault("n", rng.choice([1, 1, 1, 3]))
    if rng.random() < 0.5:
        content = settings.pop("prompt", f"Number {rng.randrange(100)} of")
        messages = [{"role": "user", "content": content}]
        return post("/v1/chat/completions", {"messages": messages, **settings})
    settings.setdefault("prompt", rng.choice(["Hello", ["One", "Two"], f"{rng.random()} is"]))
    return post("/v1/completions", settings)


# -- where clients leave ---------------------------------------------------------------------------


async def _before_a_byte(peer: Peer, rng: random.Random) -> None:
    await asyncio.sleep(rng.random() * 0.02)


async def _in_the_headers(peer: Peer, rng: random.Random) -> None:
    request = generation(rng, stream=True)
    await peer.send(request[: rng.randrange(1, request.index(b"\r\n\r\n"))])
    await asyncio.sleep(rng.random() * 0.02)


async def _in_the_body(peer: Peer, rng: random.Random) -> None:
    request = generation(rng, stream=rng.random() < 0.5, prompt=LONG_PROMPT)
    await peer.send(request[: rng.randrange(request.index(b"\r\n\r\n") + 4, len(request))])
    await asyncio.sleep(rng.random() * 0.02)


async def _at_once(peer: Peer, rng: random.Random) -> None:
    await peer.send(generation(rng, stream=rng.random() < 0.5))


async def _in_the_prompt(peer: Peer, rng: random.Random) -> None:
    await peer.send(generation(rng, stream=True, prompt=f"{rng.random()} {LONG_PROMPT}"))
    await asyncio.sleep(rng.random() * 0.1)


async def _unstreamed(peer: Peer, rng: random.Random) -> None:
    await peer.send(generation(rng, stream=False))
    await asyncio.sleep(rng.random() * 0.5)


async def _after_some_chunks(peer: Peer, rng: random.Random) -> None:
    await peer.send(generation(rng, stream=True))
    await peer.read_until(b"data: ", rng.choice([1, 1, 2, 10, 40]))


async def _between_chunks(peer: Peer, rng: random.Random) -> None:
    await peer.send(generation(rng, stream=True))
    await peer.read_until(b"data: ")
    await asyncio.sleep(rng.random() * 0.1)


async def _after_the_end(peer: Peer, rng: random.Random) -> None:
    await peer.send(generation(rng, stream=True, max_tokens=4, n=1))
    data = await peer.read_until(DONE)
    assert DONE in data, data[-300:]


async def _half_closed(peer: Peer, rng: random.Random) -> None:
    await peer.send(generation(rng, stream=rng.random() < 0.5))
    peer.half_close()
    await peer.read_all()


async def _never_reading(peer: Peer, rng: random.Random) -> None:
    """Log-probabilities make events of more than a kilobyte, so that buffers are full soon."""
    fields = {"prompt": "Hi", "logprobs": 20, "n": 4}
    await peer.send(post("/v1/completions", {"max_tokens": 300, "stream": True, **fields}))
    await asyncio.sleep(0.3 + rng.random())


async def _pipelined(peer: Peer, rng: random.Random) -> None:
    await peer.send(b"".join(generation(rng, stream=True) for _ in range(rng.randrange(2, 4))))
    await peer.read_until(b"data: ")


Exit = Callable[[Peer, random.Random], Awaitable[None]]
EXITS: dict[str, Exit] = {
    "before a byte": _before_a_byte,
    "in the headers": _in_the_headers,
    "in the body": _in_the_body,
    "at once": _at_once,
    "in the prompt": _in_the_prompt,
    "unstreamed": _unstreamed,
    "after some chunks": _after_some_chunks,
    "between chunks": _between_chunks,
    "after the end": _after_the_end,
    "half-closed": _half_closed,
    "never reading": _never_reading,
    "pipelined": _pipelined,
}


async def visit(address: Address, name: str, rng: random.Random) -> None:
    """Come, and leave as `EXITS` says for ``name``."""
    buffer = 4096 if name == "never reading" else None
    by_reset = rng.random() < 0.5
    async with connect(address, by_reset=by_reset, receive_buffer=buffer) as peer:
        await EXITS[name](peer, rng)


async def visit_many(address: Address, count: int, concurrency: int, seed: int) -> None:
    """``count`` visits, every exit equally often, in random order."""
    rng = random.Random(seed)
    names = [name for index, name in zip(range(count), _cycle(list(EXITS)), strict=False)]
    rng.shuffle(names)
    gate = asyncio.Semaphore(concurrency)

    async def one(index: int, name: str) -> None:
        async with gate:
            await visit(address, name, random.Random(f"{seed} {index}"))

    async with asyncio.TaskGroup() as group:
        for index, name in enumerate(names):
            group.create_task(one(index, name))


def _cycle(names: list[str]):
    while True:
        yield from names
