"""A mix of requests at a chosen rate, and what became of each."""

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
from clients import DONE, LONG_PROMPT, Address, Peer, connect, post
from server_process import Server

STORY = "Once upon a time there was a small robot that"
# Name -> how often, and the request. All greedy, so that each has one right answer.
MIX: Mapping[str, tuple[int, dict]] = {
    "short": (8, {"prompt": "Say yes", "max_tokens": 8}),
    "long prompt": (2, {"prompt": LONG_PROMPT, "max_tokens": 8}),
    "long answer": (3, {"prompt": STORY, "max_tokens": 120}),
    "two samples": (2, {"prompt": "Two roads", "max_tokens": 20, "n": 2}),
    "gone": (3, {"prompt": STORY, "max_tokens": 100}),
}
COMMON = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


@dataclass
class Visit:
    """One request. ``outcome``: answered, refused, gone (the client left), or what is wrong."""

    kind: str
    start: float
    outcome: str = "open"
    first_byte: float | None = None
    end: float | None = None
    num_tokens: int = 0


@dataclass
class Traffic:
    """Sends requests to ``server`` and compares what comes back with ``expected``."""

    server: Server
    expected: Mapping[str, list[int]]
    rng: random.Random
    visits: list[Visit] = field(default_factory=list)

    async def at_rate(self, rate: float, seconds: float) -> None:
        """Open loop: arrivals do not wait for answers. Returns when all have ended."""
        begin = time.monotonic()
        async with asyncio.TaskGroup() as group:
            due = begin
            while due < begin + seconds:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(self.visit(self.choose()))
                due += self.rng.expovariate(rate)

    async def by_workers(self, count: int, seconds: float) -> None:
        """Closed loop: each of ``count`` clients sends when its last request has ended."""
        end = time.monotonic() + seconds

        async def work() -> None:
            while time.monotonic() < end:
                await self.visit(self.choose())

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())

    def choose(self) -> str:
        return self.rng.choices(list(MIX), [weight for weight, _fields in MIX.values()])[0]

    async def visit(self, kind: str) -> None:
        visit = Visit(kind, time.monotonic())
        self.visits.append(visit)
        is_stream = self.rng.random() < 0.5
        fields = {**MIX[kind][1], **COMMON, "stream": is_stream}
        fields["priority"] = self.rng.choice([0, 0, 0, 1, -1])
        leaves_after = self.rng.random() * 0.5
        async with connect(Address.of(self.server.url), by_reset=is_stream) as peer:
            await peer.send(post("/v1/completions", fields, "Connection: close"))
            if kind == "gone":
                await asyncio.sleep(leaves_after)
                visit.outcome = "gone"
            else:
                await self._read(peer, visit, is_stream)
        visit.end = time.monotonic()

    async def _read(self, peer: Peer, visit: Visit, is_stream: bool) -> None:
        data = await peer.read()
        visit.first_byte = time.monotonic()
        data += await peer.read_all()
        head, _, body = data.partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 503 "):
            assert b"retry-after: 1" in head.lower(), head
            assert json.loads(body)["error"]["code"] == 503
            visit.outcome = "refused"
            return
        if not head.startswith(b"HTTP/1.1 200 "):
            visit.outcome = f"unexpected {data[:300]!r}"
            return
        samples = read_stream(body) if is_stream else read_whole(body)
        visit.num_tokens = sum(map(len, samples))
        num_samples = MIX[visit.kind][1].get("n", 1)
        is_right = samples == [self.expected[visit.kind]] * num_samples
        visit.outcome = "answered" if is_right else f"wrong {data[-300:]!r}"


def read_whole(body: bytes) -> list[list[int]]:
    return [choice["token_ids"] for choice in json.loads(body)["choices"]]


def read_stream(body: bytes) -> list[list[int]]:
    """Token ids of the samples in a chunked stream of events."""
    samples: dict[int, list[int]] = {}
    data = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        data += rest[:length]
        body = rest[length + 2 :]
    assert data.endswith(DONE), data[-300:]
    for event in data.split(b"\n\n")[:-2]:
        if event.startswith(b"data: "):
            for choice in json.loads(event[6:])["choices"]:
                samples.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    return [samples[index] for index in sorted(samples)]


def unloaded_answers(server: Server) -> dict[str, list[int]]:
    """What each kind of request gets when it is alone."""
    found = {}
    for kind, (_weight, fields) in MIX.items():
        body = {**fields, **COMMON, "n": 1}
        response = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
        [found[kind]] = [choice["token_ids"] for choice in response.json()["choices"]]
    return found
