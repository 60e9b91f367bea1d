"""Clients that leave at every point of a request leave nothing behind."""

import asyncio
import os
import random
import time

import pytest
from clients import Address, connect, post, visit_many
from load_server import Footprint, check_held, check_log, idle_footprint, known_answer
from server_process import Server, serving

pytestmark = [pytest.mark.model, pytest.mark.slow]

SEED = int(os.environ.get("CARDAN_LOAD_SEED") or random.randrange(10**6))
# MiB that a process may grow by while half of the clients come and go.
MAX_GROWTH = 8.0


@pytest.mark.timeout(600)
def test_a_thousand_dropped_clients_leave_nothing(server: Server) -> None:
    print(f"seed {SEED}")
    before_answer = known_answer(server)
    _visit(server, 200, SEED)  # pools and caches reach their size
    before = idle_footprint(server)
    for turn in range(4):
        began = time.monotonic()
        _visit(server, 200, SEED + 1 + turn)
        after = idle_footprint(server)
        print(f"200 clients in {time.monotonic() - began:.1f} s: {after}")
        check_held(before, after)
        if turn == 1:
            half = after
    _check_growth(half, after)
    assert known_answer(server) == before_answer
    check_log(server)


@pytest.mark.timeout(300)
def test_dropped_clients_of_the_demo_model(tmp_path) -> None:
    arguments = ("--dtype", "float32", "--kv-cache-memory-bytes", "200MiB", "--max-num-seqs", "8")
    with serving(tmp_path / "log", *arguments, "--max-model-len", "1024") as server:
        before_answer = known_answer(server)
        _visit(server, 12, SEED)
        before = idle_footprint(server)
        _visit(server, 60, SEED + 1)
        check_held(before, idle_footprint(server))
        assert known_answer(server) == before_answer
        check_log(server)


def _visit(server: Server, count: int, seed: int) -> None:
    # More clients than rows, so that some leave while they wait for one.
    asyncio.run(visit_many(Address.of(server.url), count, 40, seed))


def _check_growth(half: Footprint, after: Footprint) -> None:
    assert after.server_rss - half.server_rss < MAX_GROWTH, (half, after)
    assert after.engine_rss - half.engine_rss < MAX_GROWTH, (half, after)


@pytest.mark.parametrize("by_reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize(
    "kind", ["whole", "streamed", "pipelined", "trailing", "later", "never reading"]
)
def test_the_engine_stops_for_a_client_that_left(server: Server, kind: str, by_reset: bool) -> None:
    """Whatever else the client sent and however little it read."""
    fields = {"prompt": "Hi", "max_tokens": 900, "ignore_eos": True}
    whole = post("/v1/completions", {**fields, "stream": False})
    streamed = post("/v1/completions", {**fields, "stream": True, "logprobs": 20})
    sent = {
        "whole": whole,
        "streamed": streamed,
        "pipelined": whole + whole,
        "trailing": whole + b"GET / ",
        "later": whole,
        "never reading": streamed,
    }[kind]

    async def visit() -> None:
        address = Address.of(server.url)
        async with connect(address, by_reset=by_reset, receive_buffer=4096) as peer:
            await peer.send(sent)
            await _until_running(server)
            if kind == "streamed":
                await peer.read()
            if kind == "later":
                await peer.send(whole)
            await asyncio.sleep(0.1)

    server.wait_idle()
    before = server.metric("vllm:iteration_tokens_total_sum")
    asyncio.run(visit())
    idle_footprint(server)
    assert server.metric("vllm:iteration_tokens_total_sum") - before < 600


async def _until_running(server: Server) -> None:
    while not (await asyncio.to_thread(server.get, "/load")).json()["num_running"]:
        await asyncio.sleep(0.01)
