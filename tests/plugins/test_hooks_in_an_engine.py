"""Which hooks an engine calls, in which order, and what becomes of what they say."""

import sys
import time

from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.discovery import PLUGINS
from cardan.testing.tiny_models import make_tiny_model

WATCHER = """
from cardan.core.interfaces.hooks import hookimpl

contract = (1, 0)
heard = []
complaint = None

@hookimpl
def cardan_engine_starting(): heard.append(("starting", None))
@hookimpl
def cardan_model_loaded(report): heard.append(("loaded", report.weight_bytes))
@hookimpl
def cardan_kernel_plan_ready(plan): heard.append(("plan", plan))
@hookimpl
def cardan_engine_started(): heard.append(("started", None))
@hookimpl
def cardan_request_finished(request, finish): heard.append(("finished", (request, finish)))
@hookimpl
def cardan_health(): return complaint
@hookimpl
def cardan_metrics(): return {"calls": len(heard)}
@hookimpl
def cardan_engine_stopped(reason): heard.append(("stopped", reason))
"""
FAULTY = """
from cardan.core.interfaces.hooks import hookimpl

contract = (1, 0)

@hookimpl
def cardan_request_finished(request): raise ValueError("no ends")
@hookimpl
def cardan_kernel_plan_ready(): raise ValueError("no plans")
@hookimpl
def cardan_metrics(): raise ValueError("no numbers")
"""


def await_true(fact):
    deadline = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_hooks_of_an_engine(site, tmp_path, monkeypatch, caplog):
    from cardan.bootstrap.front import open_client
    from cardan.core.engine.frontend import Frontend
    from cardan.core.types.prompt import TokenPrompt
    from cardan.core.types.sampling_params import SamplingParams

    entries = {"faulty": "faulty_plugin", "watcher": "watcher_plugin"}
    modules = {"faulty_plugin": FAULTY, "watcher_plugin": WATCHER}
    site.install("watching", {PLUGINS: entries}, modules)
    monkeypatch.setenv("CARDAN_FAKE", "1")
    make_tiny_model("llama", tmp_path)
    config = EngineConfig(model=ModelConfig(model=str(tmp_path)))
    for path, value in (
        ("device.platform", "fake"),
        ("cache.kv_cache_memory_bytes", 1 << 22),
    ):
        config = config.with_value(path, value)
    opened = open_client(config, in_process=True)
    client = opened.client
    watcher = sys.modules["watcher_plugin"]
    try:
        assert [name for name, _ in watcher.heard] == ["starting", "loaded", "plan", "started"]
        plan = dict(watcher.heard)["plan"]
        assert {"linear", "rms_norm"} <= {item.op for item in plan}
        frontend = Frontend(opened.tokenizer)
        _run(client, opened.preprocessor, frontend, TokenPrompt(token_ids=[3, 5, 7]),
             SamplingParams(max_tokens=2, n=2, ignore_eos=True, temperature=0))  # fmt: skip
        await_true(lambda: len(watcher.heard) == 6)
        for name, (request, finish) in watcher.heard[4:]:
            assert (name, request.request_id, request.num_prompt_tokens) == ("finished", "one", 3)
            assert finish.reason == "length"
        await_true(lambda: client.health().plugin_gauges == {"watcher": {"calls": 6.0}})
        assert client.health().state == "ready"
        watcher.complaint = "too\nhot"
        await_true(lambda: client.health().state == "unhealthy")
        assert client.health().reason == "plugin watcher: too hot"
    finally:
        client.close()
    assert watcher.heard[-1] == ("stopped", "the engine was shut down")
    for hook in ("cardan_request_finished", "cardan_kernel_plan_ready", "cardan_metrics"):
        assert caplog.text.count(f"plugin faulty failed in {hook}") == 1


def _run(client, preprocessor, frontend, prompt, params):
    """One request, to its end."""
    request = preprocessor.to_request(preprocessor.encode(prompt), params, request_id="one")
    state = frontend.open(request, None)

    class Sink:
        def on_outputs(self, outputs):
            frontend.apply(outputs, time.monotonic())

        def on_death(self, reason): ...

    client.connect(Sink())
    client.submit(request)
    await_true(lambda: state.is_finished)
