"""Names, labels and invariants of the metrics."""

from dataclasses import replace

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from server_helpers import FakeEngine, Sample, running, wait_until

from cardan.core.types.engine_info import EngineHealth
from cardan.core.types.errors import QueueFullError, RequestFailedError

COMMON = {"model_name": "tiny", "engine": "0"}
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    "prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries",
    "prefix_cache_hits", "prompt_tokens_cached", "admission_rejections",
)  # fmt: skip
HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_time_per_output_token_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_params_n", "request_params_max_tokens", "iteration_tokens_total",
)  # fmt: skip


class Scrape:
    def __init__(self, server):
        response = server.http.get("/metrics")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain")
        self.text = response.text
        self.families = {f.name: f for f in text_string_to_metric_families(response.text)}
        self.samples = {}
        for family in self.families.values():
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in self.samples
                self.samples[key] = sample.value

    def get(self, name, **labels):
        return self.samples[(name, tuple(sorted((COMMON | labels).items())))]

    def both(self, name, **labels):
        values = {self.get(prefix + name, **labels) for prefix in ("vllm:", "cardan:")}
        assert len(values) == 1
        return values.pop()


@pytest.fixture
def server():
    with running(FakeEngine(num_cached=3)) as server:
        yield server


def test_all_names_are_there_before_any_request(server):
    scrape = Scrape(server)
    for name in GAUGES:
        assert scrape.both(name) == 0
    for name in COUNTERS:
        assert scrape.both(f"{name}_total") == 0
    for name in HISTOGRAMS:
        assert scrape.both(f"{name}_count") == scrape.both(f"{name}_sum") == 0
        assert scrape.both(f"{name}_bucket", le="+Inf") == 0
    cache = {"block_size": "16", "num_gpu_blocks": "32", "num_blocks": "32"}
    assert scrape.both("cache_config_info", **cache, kv_cache_bytes="4096") == 1
    assert scrape.get("cardan:startup_seconds", phase="weights") == 1.5
    assert scrape.get("cardan:startup_seconds", phase="warmup") == 0.25
    assert "process_resident_memory_bytes" in scrape.families
    assert "vllm:request_success" in scrape.families


def test_own_registry(server):
    assert not any("vllm" in name for name in REGISTRY._names_to_collectors)


def test_counts_of_requests_and_tokens(server):
    server.chat(n=2, max_tokens=4)
    server.chat(n=2, stream=True)
    server.complete(prompt=["a", "b"])
    scrape = Scrape(server)
    # 8 prompt tokens a chat, 2 a text; "Hello!" has 6.
    assert scrape.both("prompt_tokens_total") == 8 + 8 + 2 * 2
    assert scrape.both("generation_tokens_total") == 8 + 12 + 12
    assert scrape.both("prompt_tokens_cached_total") == 4 * 3
    assert scrape.both("request_success_total", finished_reason="length") == 1
    assert scrape.both("request_success_total", finished_reason="stop") == 3
    for name in HISTOGRAMS[:1] + HISTOGRAMS[2:11]:
        assert scrape.both(f"{name}_count") == 4, name
    # Each sample but for its first token.
    assert scrape.both("inter_token_latency_seconds_count") == 2 * 3 + 2 * 5 + 2 * 5
    assert scrape.both("request_params_n_sum") == 2 + 2 + 1 + 1
    assert scrape.both("request_params_max_tokens_count") == 3
    assert scrape.both("request_generation_tokens_sum") == 32
    assert scrape.both("request_prompt_tokens_sum") == 20
    totals = server.engine.totals
    assert scrape.both("iteration_tokens_total_count") == totals.num_steps
    assert scrape.both("iteration_tokens_total_sum") == totals.num_batched_tokens
    assert scrape.both("num_requests_running") == 0


def test_buckets_are_cumulative(server):
    server.chat()
    scrape = Scrape(server)
    family = scrape.families["cardan:request_generation_tokens"]
    buckets = [s for s in family.samples if s.name.endswith("_bucket")]
    values = [sample.value for sample in buckets]
    assert values == sorted(values)
    by_bound = {float(s.labels["le"]): s.value for s in buckets}
    assert (by_bound[5.0], by_bound[10.0], by_bound[float("inf")]) == (0, 1, 1)


def test_failures_aborts_and_rejections(server):
    server.engine.error_before = QueueFullError("full")
    assert server.chat().status_code == 503
    server.engine.error_before = None
    server.engine.error_after = (1, RequestFailedError("NaN"))
    assert server.chat().status_code == 500
    server.engine.error_after = None
    server.engine.samples, server.engine.delay = [Sample.of("x" * 300)], 0.01
    with server.http.stream(
        "POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 300}
    ) as response:
        lines = response.iter_lines()
        next(lines)
    wait_until(lambda: server.engine.num_live == 0)
    scrape = Scrape(server)
    assert scrape.both("admission_rejections_total") == 1
    assert scrape.both("request_success_total", finished_reason="error") == 1
    assert scrape.both("request_success_total", finished_reason="abort") == 1
    assert 0 < scrape.both("generation_tokens_total") < 300


def test_engine_totals_are_monotone_counters(server):
    def set_totals(**values):
        server.engine.totals = replace(server.engine.totals, **values)

    set_totals(num_preemptions=2, prefix_queries=100, prefix_hits=40, num_waiting=7, kv_usage=0.25)
    scrape = Scrape(server)
    assert scrape.both("num_preemptions_total") == 2
    assert scrape.both("prefix_cache_queries_total") == 100
    assert scrape.both("prefix_cache_hits_total") == 40
    assert scrape.both("num_requests_waiting") == 7
    assert scrape.both("kv_cache_usage_perc") == 0.25
    assert "# TYPE vllm:num_preemptions_total counter" in scrape.text
    set_totals(num_preemptions=0, prefix_queries=5, num_waiting=0)
    scrape = Scrape(server)
    assert scrape.both("num_preemptions_total") == 2
    assert scrape.both("prefix_cache_queries_total") == 100
    assert scrape.both("num_requests_waiting") == 0


def test_age_of_the_last_step(server):
    server.engine.state = EngineHealth("stuck", "no step", 12.5)
    assert Scrape(server).both("last_step_age_seconds") == 12.5


def test_gauges_of_plugins(server):
    gauges = {"first": {"heat": 3.5, "load": 1.0}, "second": {"heat": float("inf")}}
    server.engine.state = EngineHealth("ready", plugin_gauges=gauges)
    scrape = Scrape(server)
    found = {
        (name, dict(labels)["plugin"]): value
        for (name, labels), value in scrape.samples.items()
        if name.startswith("cardan:plugin_")
    }
    assert found == {
        ("cardan:plugin_heat", "first"): 3.5,
        ("cardan:plugin_heat", "second"): float("inf"),
        ("cardan:plugin_load", "first"): 1.0,
    }
    assert scrape.text.count("# TYPE cardan:plugin_heat gauge") == 1


def test_http_requests_by_route_and_status(server):
    server.chat()
    server.chat(stream=True)
    server.chat(n=0)
    server.http.get("/v1/models/tiny")
    server.http.get("/nowhere/secret")
    server.http.get("/v1/completions")
    samples = Scrape(server).samples

    def count(method, handler, status):
        labels = {"method": method, "handler": handler, "status": status}
        return samples[("http_requests_total", tuple(sorted(labels.items())))]

    assert count("POST", "/v1/chat/completions", "200") == 2
    assert count("POST", "/v1/chat/completions", "400") == 1
    assert count("GET", "/v1/models/{name:path}", "200") == 1
    assert count("GET", "none", "404") == 1
    assert count("GET", "/v1/completions", "405") == 1
