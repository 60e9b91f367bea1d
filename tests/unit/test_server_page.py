"""The page's files and the live numbers over HTTP."""

import asyncio
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files

import httpx
import pytest
from server_helpers import FakeEngine, running, strict_json, wait_until

from cardan.cli.server_options import ServerOptions, server_config
from cardan.core.types.engine_info import EngineHealth

STATIC = {
    entry.name: entry.read_text("utf-8")
    for entry in files("cardan.server").joinpath("static").iterdir()
}
TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
DATA = ("/cardan/live", "/cardan/requests", "/cardan/requests/some")


@pytest.fixture(scope="module")
def shared():
    with running() as server:
        yield server


@pytest.fixture
def server(shared):
    shared.engine.__dict__.update(FakeEngine().__dict__)
    return shared


class Links(HTMLParser):
    """Addresses in a document, and what a strict content policy would block."""

    def __init__(self, text):
        super().__init__()
        self.addresses, self.inline, self.ids = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.addresses += [values[name] for name in ("href", "src") if name in values]
        self.inline += [name for name in values if name.startswith("on") or name == "style"]
        if tag == "style" or (tag == "script" and "src" not in values):
            self.inline.append(tag)
        if "id" in values:
            self.ids.append(values["id"])


# -- files ----------------------------------------------------------------------------------------


def test_the_page_and_its_files(server):
    page = server.http.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text == STATIC["index.html"]
    names = [address for address in Links(page.text).addresses if address.startswith("static/")]
    assert len(names) >= 3
    for name in {*names, *(f"static/{name}" for name in STATIC if name != "index.html")}:
        answer = server.http.get(f"/{name}")
        assert answer.status_code == 200
        assert answer.text == STATIC[name.removeprefix("static/")]
        assert answer.headers["content-type"].split(";")[0] == TYPES[name.rpartition(".")[2]]
        assert answer.headers["x-content-type-options"] == "nosniff"
        head = server.http.head(f"/{name}")
        assert (head.status_code, head.content) == (200, b"")
    assert server.http.head("/").status_code == 200


@pytest.mark.parametrize("path", ["/", "/static/style.css"])
def test_files_are_kept_and_asked_about(server, path):
    first = server.http.get(path)
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for value in (tag, f"W/{tag}", f'"other", {tag}'):
        again = server.http.get(path, headers={"If-None-Match": value})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == tag
    assert server.http.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
    assert server.http.get("/static/main.js").headers["etag"] != tag


def test_policy_allows_nothing_from_elsewhere_and_nothing_inline(server):
    policy = server.http.get("/").headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    links = Links(STATIC["index.html"])
    assert links.inline == []
    for address in links.addresses:
        assert not re.match(r"[a-z]+:|/", address), f"{address} is not relative to the page"
    for name, text in STATIC.items():
        urls = [url for url in re.findall(r"https?://\S+", text) if "www.w3.org" not in url]
        assert urls == [], name
        assert "innerHTML" not in text
        assert "document.write" not in text
        assert not re.search(r"\beval\(|new Function\(", text)
        assert len(text.splitlines()) < 300


def test_modules_find_each_other_and_the_elements_they_name():
    ids = Links(STATIC["index.html"]).ids
    assert len(ids) == len(set(ids))
    for name, text in STATIC.items():
        if not name.endswith(".js"):
            continue
        for target in re.findall(r'from "\./([^"]+)"', text):
            assert target in STATIC, f"{name} imports {target}"
        for element in re.findall(r'(?:byId|getElementById)\("([^"]+)"\)', text):
            assert element in ids, f"{name} wants #{element}"
    labels = re.findall(r'(?:for|aria-labelledby|aria-controls)="([^"]+)"', STATIC["index.html"])
    assert set(labels) <= set(ids)


def test_unknown_files_are_json_404(server):
    for path in ("/static/none.js", "/static/index.html", "/static/", "/static/..%2fpage.py"):
        answer = server.http.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == 404


def test_the_page_is_counted_by_route_never_by_path(server):
    for path in ("/", "/static/style.css", "/static/none", "/cardan/requests/x"):
        server.http.get(path)
    text = server.http.get("/metrics").text
    handlers = set(re.findall(r'http_requests_total\{.*?handler="([^"]*)"', text))
    assert {"/", "/static/{name}", "/cardan/requests/{request_id:path}"} <= handlers
    assert not {"/static/none", "/cardan/requests/x"} & handlers


def test_page_can_be_disabled():
    with running(enable_page=False) as server:
        for path in ("/", "/static/style.css", *DATA):
            assert server.http.get(path).status_code == 404
        assert "/cardan/live" not in server.http.get("/openapi.json").json()["paths"]


def test_option_of_the_page():
    assert server_config(ServerOptions(model="demo")).enable_page
    assert not server_config(ServerOptions(model="demo", enable_page=False)).enable_page


def test_openapi_has_the_types(server):
    document = server.http.get("/openapi.json").json()
    paths, schemas = document["paths"], document["components"]["schemas"]
    live = paths["/cardan/live"]["get"]["responses"]["200"]["content"]
    assert live["text/event-stream"]["schema"]["$ref"].endswith("/LiveSample")
    listed = paths["/cardan/requests"]["get"]["responses"]["200"]["content"]["application/json"]
    assert listed["schema"]["$ref"].endswith("/TraceList")
    one = paths["/cardan/requests/{request_id}"]["get"]["responses"]["200"]["content"]
    assert one["application/json"]["schema"]["$ref"].endswith("/Trace")
    assert schemas["SampleTrace"]["properties"]["token_times"]["items"] == {"type": "number"}
    assert list(paths["/"]["get"]["responses"]["200"]["content"]) == ["text/html"]


# -- access ---------------------------------------------------------------------------------------


def test_with_keys_the_page_is_open_and_its_data_are_not(server):
    assert 'data-needs-key="no"' in server.http.get("/").text
    with running(api_keys=("secret",)) as guarded:
        page = guarded.http.get("/")
        assert 'data-needs-key="yes"' in page.text
        assert "secret" not in page.text
        assert page.headers["etag"] != server.http.get("/").headers["etag"]
        assert guarded.http.get("/static/main.js").status_code == 200
        for path in DATA:
            assert guarded.http.get(path).status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert guarded.http.get("/cardan/requests", headers=key).status_code == 200


@pytest.mark.parametrize("root_path", ["/llm", "/llm/"])
def test_behind_a_proxy(root_path):
    with running(root_path=root_path, api_keys=("secret",)) as server:
        for prefix in ("", "/llm"):  # taken off by the proxy, or not
            assert server.http.get(f"{prefix}/").text.startswith("<!doctype html>")
            assert server.http.get(f"{prefix}/static/main.js").status_code == 200
            assert server.http.get(f"{prefix}/cardan/requests").status_code == 401


def test_without_its_slash_the_page_moves():
    """Its relative addresses need the folder."""
    with running(root_path="/llm") as server:
        answer = server.http.get("/llm")
        assert answer.status_code == 307
        assert answer.headers["location"] == "/llm/"


# -- live -----------------------------------------------------------------------------------------


@contextmanager
def watching(server, **kwargs):
    """The events of ``/cardan/live`` as they come."""
    with httpx.stream("GET", f"{server.url}/cardan/live", timeout=20, **kwargs) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        yield read(response)


def read(response):
    name = None
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, strict_json(line.removeprefix("data: "))


def test_live_tells_the_engine_once_and_then_numbers(server):
    engine = server.engine
    engine.totals = replace(engine.totals, num_waiting=3, kv_usage=0.25, num_steps=10)
    with watching(server) as events:
        name, info = next(events)
        assert name == "info"
        assert info["models"] == ["tiny"]
        assert info["num_blocks"] == 32
        assert info["startup_seconds"] == {"weights": 1.5, "warmup": 0.25}
        name, sample = next(events)
        assert name == "sample"
        assert (sample["num_waiting"], sample["kv_usage"]) == (3, 0.25)
        assert sample["state"] == "ready"
        assert sample["prefix_hit_rate"] is None
        assert sample["steps_per_second"] == sample["output_tokens_per_second"] == 0
        engine.traces.num_output_tokens += 100
        engine.traces.num_prompt_tokens += 40
        engine.totals = replace(
            engine.totals, num_steps=30, num_batched_tokens=140, prefix_queries=80, prefix_hits=20
        )
        name, sample = next(events)
        assert sample["prefix_hit_rate"] == 0.25
        assert sample["tokens_per_step"] == 7
        # What happened in a time that only the server knows: the rates agree with each other.
        assert sample["steps_per_second"] > 0
        out, steps = sample["output_tokens_per_second"], sample["steps_per_second"]
        assert out / steps == pytest.approx(100 / 20)
        assert sample["prompt_tokens_per_second"] / steps == pytest.approx(40 / 20)
        engine.state = EngineHealth("dead", "the process is gone")
        samples = (sample for _name, sample in events)
        sample = next(sample for sample in samples if sample["state"] != "ready")
        assert (sample["state"], sample["reason"]) == ("dead", "the process is gone")
        assert next(sample for sample in samples if sample["steps_per_second"] == 0)


def test_all_watchers_share_one_sampler(server):
    with watching(server) as first, watching(server) as second:
        ours = [next(first)[1] for _ in range(4)][2:]
        theirs = [next(second)[1] for _ in range(4)][2:]
        assert {sample["time"] for sample in ours} & {sample["time"] for sample in theirs}
    # All have left; the next one finds a sampler that begins anew.
    wait_until(lambda: not sampler_tasks(server))
    with watching(server) as events:
        assert [next(events)[0] for _ in range(3)] == ["info", "sample", "sample"]
        assert len(sampler_tasks(server)) == 1
    wait_until(lambda: not sampler_tasks(server))


def sampler_tasks(server):
    found = []
    done = threading.Event()

    def look():
        tasks = asyncio.all_tasks(server.loop)
        found.extend(task for task in tasks if "LiveSampler" in str(task.get_coro()))
        done.set()

    server.loop.call_soon_threadsafe(look)
    assert done.wait(10)
    return found


def test_watching_ends_with_the_server():
    with running() as server, watching(server) as events:
        assert next(events)[0] == "info"
        assert next(events)[1]["state"] == "ready"
        server.stop()
        assert [sample["state"] for _name, sample in events][-1] == "draining"
        server.thread.join(10)
        assert not server.thread.is_alive()


def test_watching_does_not_hold_a_drain_up_and_needs_no_request(server):
    with watching(server) as events:
        next(events)
        assert json.loads(server.http.get("/load").text)["server_load"] == 0
