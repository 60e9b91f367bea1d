"""Three times more than a server can do, with a KV pool that holds one long request.

``CARDAN_OVERLOAD_SECONDS`` sets how long the runs of every day take, about.
"""

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from load_server import TINY, check_held, check_log, idle_footprint
from server_process import Server, serving
from traffic import Traffic, unloaded_answers

SECONDS = float(os.environ.get("CARDAN_OVERLOAD_SECONDS") or 60)
SEED = int(os.environ.get("CARDAN_LOAD_SEED") or random.randrange(10**6))
OVERLOAD = 3
TURNS = 3
MAX_QUEUED = 24
# 64 blocks of 16 tokens: one request of the longest kind, or a few short ones.
TINY_POOL = ("--kv-cache-memory-bytes", "256KiB", "--max-num-seqs", "16")
MAX_GROWTH = 16.0  # MiB

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timing,
    pytest.mark.timeout(6 * SECONDS + 240),
]


@pytest.mark.parametrize(
    ("arguments", "share"),
    [
        (("--max-num-queued-reqs", str(MAX_QUEUED)), 0.4),
        # Without a cap all that was accepted is worked off afterwards, which takes twice as long.
        (("--scheduling-policy", "priority"), 0.1),
    ],
    ids=["capped", "uncapped"],
)
def test_overload(tmp_path: Path, arguments: tuple[str, ...], share: float) -> None:
    with serving(tmp_path / "log", *TINY, *TINY_POOL, *arguments) as server:
        _overload(server, share * SECONDS, is_capped="--max-num-queued-reqs" in arguments)


@pytest.mark.scheduled
@pytest.mark.timeout(1800)
def test_overload_for_ten_minutes(tmp_path: Path) -> None:
    arguments = ("--max-num-queued-reqs", str(MAX_QUEUED))
    with serving(tmp_path / "log", *TINY, *TINY_POOL, *arguments) as server:
        _overload(server, 600.0, is_capped=True)


def _overload(server: Server, seconds: float, *, is_capped: bool) -> None:
    print(f"seed {SEED}")
    expected = unloaded_answers(server)
    calm = Traffic(server, expected, random.Random(SEED))
    requests_per_second, tokens_per_second = _measure(server, calm.by_workers(8, 6.0), calm)
    footprints = [idle_footprint(server)]
    throughputs, waits = [], []
    outcomes: Counter[str] = Counter()
    for turn in range(TURNS):
        loaded = Traffic(server, expected, random.Random(SEED + 1 + turn))
        rate = OVERLOAD * requests_per_second
        _, tokens = _measure(server, loaded.at_rate(rate, seconds / TURNS), loaded)
        throughputs.append(tokens)
        outcomes.update(visit.outcome for visit in loaded.visits)
        waits.append(_longest_wait(loaded))
        footprints.append(idle_footprint(server))
        assert unloaded_answers(server) == expected
    ratio = sum(throughputs) / TURNS / tokens_per_second
    preemptions = server.metric("vllm:num_preemptions_total")
    print(
        f"capacity {requests_per_second:.1f} requests/s, {tokens_per_second:.0f} tokens/s; "
        f"offered {OVERLOAD}x: {dict(outcomes)}, throughput x{ratio:.2f}, "
        f"longest wait {max(waits):.1f} s, {preemptions:.0f} preemptions"
    )
    _check_outcomes(outcomes, is_capped=is_capped)
    assert ratio > 0.5, throughputs
    if is_capped:
        # Nobody waits much longer than the queue is long.
        assert max(waits) < 10 + 5 * MAX_QUEUED / requests_per_second, waits
    assert preemptions > 0
    check_held(footprints[1], footprints[-1])
    assert footprints[-1].engine_rss - footprints[1].engine_rss < MAX_GROWTH, footprints
    assert footprints[-1].server_rss - footprints[1].server_rss < MAX_GROWTH, footprints
    check_log(server)


def _measure(server: Server, work, traffic: Traffic) -> tuple[float, float]:
    """Requests that ended and tokens generated, a second, until the last one ended."""
    before = server.metric("vllm:generation_tokens_total")
    begin = time.monotonic()
    asyncio.run(work)
    server.wait_idle(60)
    seconds = time.monotonic() - begin
    tokens = server.metric("vllm:generation_tokens_total") - before
    return len(traffic.visits) / seconds, tokens / seconds


def _check_outcomes(outcomes: Counter[str], *, is_capped: bool) -> None:
    """Everybody got an end and every answer was right."""
    allowed = {"answered", "gone"} | ({"refused"} if is_capped else set())
    assert set(outcomes) == allowed, outcomes


def _longest_wait(traffic: Traffic) -> float:
    waits = [
        visit.end - visit.start
        for visit in traffic.visits
        if visit.outcome == "answered" and visit.end is not None
    ]
    return max(waits)
