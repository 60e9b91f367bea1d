"""Sleep and wake over HTTP, in front of a scripted engine."""

import pytest
from server_helpers import FakeEngine, running

from cardan.cli.server_options import ServerOptions, server_config
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.types.errors import EngineAsleepError, InputError, RequestFailedError


@pytest.fixture
def server():
    with running(enable_sleep_mode=True) as server:
        yield server


def states(server):
    lines = server.http.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("vllm:engine_sleep_state{")]
    return {line.split('sleep_state="')[1].split('"')[0]: line.split()[-1] for line in found}


def test_sleep_and_wake(server):
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert states(server) == {"awake": "1.0", "weights_offloaded": "0.0", "discard_all": "0.0"}
    answer = server.http.post("/sleep")
    assert (answer.status_code, answer.content) == (200, b"")
    assert (server.engine.sleep_level, server.engine.sleep_mode) == (1, "wait")
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert server.http.get("/health").status_code == 200
    asleep = server.http.get("/ready")
    assert asleep.status_code == 503
    assert "POST /wake_up" in asleep.json()["error"]["message"]
    assert server.http.post("/sleep?level=2&mode=abort").status_code == 200
    assert (server.engine.sleep_level, server.engine.sleep_mode) == (2, "abort")
    assert states(server)["discard_all"] == "1.0"
    assert server.http.post("/wake_up?tags=weights&tags=kv_cache").status_code == 200
    assert server.engine.woken == ["weights", "kv_cache"]
    assert server.http.post("/wake_up").status_code == 200
    assert server.engine.woken is None
    assert server.http.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("path", "param", "message"),
    [
        ("/sleep?level=0", "level", "greater than or equal to 1 (got"),
        ("/sleep?level=deep", "level", "valid integer"),
        ("/sleep?mode=keep", "mode", "'wait' or 'abort'"),
        ("/wake_up?tags=weights&tags=scheduling", "tags[1]", "'weights' or 'kv_cache'"),
    ],
)
def test_bad_queries(server, path, param, message):
    answer = server.http.post(path)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert message in error["message"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnsupportedError("the device of this engine cannot sleep"), 501),
        (InputError("it sleeps at level 2", "level"), 400),
        (RequestFailedError("a host pool does not fit"), 500),
    ],
)
def test_what_an_engine_refuses(server, error, status):
    server.engine.sleep_error = error
    answer = server.http.post("/sleep")
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == str(error)


def test_requests_to_a_sleeping_engine():
    engine = FakeEngine(error_before=EngineAsleepError("the engine sleeps; POST /wake_up"))
    with running(engine) as server:
        for answer in (server.complete(), server.complete(stream=True)):
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert "POST /wake_up" in answer.json()["error"]["message"]
        text = server.http.get("/metrics").text
        assert 'vllm:request_success_total{engine="0"' not in text
        assert [server.http.post("/sleep").status_code, server.http.get("/docs").status_code] == [
            404,
            200,
        ]


def test_the_routes_are_served_on_demand(server):
    assert "/sleep" in server.http.get("/openapi.json").json()["paths"]
    assert not server_config(ServerOptions(model="demo")).enable_sleep_mode
    assert server_config(ServerOptions(model="demo", enable_sleep_mode=True)).enable_sleep_mode
