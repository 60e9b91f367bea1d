"""Ten thousand generated bodies: each is answered, and none harms the next."""

import asyncio
import json
import os
import random
import re
from pathlib import Path

import httpx
import pytest
from bodies import ROUTES, Case, make_case
from load_server import (
    ROOMY,
    SHORT,
    TINY,
    check_held,
    check_log,
    idle_footprint,
    known_answer,
)
from server_process import Server, serving

pytestmark = [pytest.mark.model, pytest.mark.slow]

SEED = int(os.environ.get("CARDAN_LOAD_SEED") or random.randrange(10**6))
NUM_BODIES = 10_000
BATCH = 100
CONCURRENCY = 16
TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
}


@pytest.mark.timeout(600)
def test_ten_thousand_bodies(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *TINY, *ROOMY, *SHORT) as server:
        _send_all(server)


def _send_all(server: Server) -> None:
    print(f"seed {SEED}")
    expected = known_answer(server)
    statuses: dict[int, int] = {}

    async def run() -> None:
        limits = httpx.Limits(max_connections=CONCURRENCY)
        gate = asyncio.Semaphore(CONCURRENCY)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as client:
            for start in range(0, NUM_BODIES, BATCH):
                if start == NUM_BODIES // 2:
                    half.append(await asyncio.to_thread(idle_footprint, server))
                found = await asyncio.gather(
                    *(ask(client, gate, start + place) for place in range(BATCH))
                )
                for status in found:
                    statuses[status] = statuses.get(status, 0) + 1
                got = await asyncio.to_thread(known_answer, server)
                assert got == expected, f"seed {SEED}, after {start + BATCH} bodies"

    half = []
    asyncio.run(run())
    print(statuses)
    # The grammar is worth something only while both happen often.
    assert statuses[200] > NUM_BODIES / 10
    assert statuses[400] > NUM_BODIES / 10
    after = idle_footprint(server)
    check_held(half[0], after)
    assert after.engine_rss - half[0].engine_rss < 16, (half, after)
    check_log(server)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_k": 2**70}, "top_k"),
        ({"truncate_prompt_tokens": 2**70}, "truncate_prompt_tokens"),
        ({"stream_interval": 2**70, "stream": True}, "stream_interval"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"allowed_token_ids": [2], "min_tokens": 2}, None),
        ({"allowed_token_ids": [5], "bad_words": [], "stop_token_ids": [5], "min_tokens": 1}, None),
    ],
)
def test_found_by_earlier_bodies(server: Server, fields: dict, param: str | None) -> None:
    body = {"prompt": "Hi", "max_tokens": 4, **fields}
    response = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def ask(client: httpx.AsyncClient, gate: asyncio.Semaphore, place: int) -> int:
    case = make_case(random.Random(f"{SEED} {place}"))
    async with gate:
        try:
            response = await client.post(
                case.path, content=case.body, headers={"Content-Type": case.content_type}
            )
        except httpx.HTTPError as error:
            raise AssertionError(_about(place, case, repr(error))) from error
    try:
        check_answer(case, response)
    except Exception as error:
        shown = f"{response.status_code} {response.content[:1500]!r} {error!r}"
        raise AssertionError(_about(place, case, shown)) from error
    return response.status_code


def check_answer(case: Case, response: httpx.Response) -> None:
    """2xx or 4xx in the API's form, and strict UTF-8 and JSON."""
    whole = response.content.decode("utf-8")
    assert "\n" not in response.headers["x-request-id"]
    if response.status_code == 200:
        check_success(response.headers["content-type"], whole)
        return
    check_error(case, response.status_code, _strict(whole)["error"])


def check_success(content_type: str, whole: str) -> None:
    if content_type == "text/event-stream":
        assert whole.endswith("data: [DONE]\n\n")
        events = [_strict(event[6:]) for event in whole.split("\n\n")[:-2]]
        # The status was out: an error can only be told as an event, and must not be the server's.
        assert all("error" not in event or event["error"]["code"] < 500 for event in events)
    else:
        assert content_type == "application/json"
        _strict(whole)


def check_error(case: Case, status: int, error: dict) -> None:
    assert status in TYPES, status
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["type"] == TYPES[status]
    assert 0 < len(error["message"]) <= 4000
    for word in ("Traceback", "site-packages", "pydantic", "object at 0x"):
        assert word not in error["message"]
    if error["param"] is not None:
        # A field of the body, or a member of one: "messages[2].role".
        root = re.split(r"[.\[]", error["param"])[0]
        assert root in ROUTES[case.path][0] or root.encode() in case.body, error["param"]


def _strict(text: str):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def _about(place: int, case: Case, what: str) -> str:
    return (
        f"seed {SEED}, body {place}, {case.path} {case.content_type!r} {case.body[:1500]!r}: {what}"
    )
