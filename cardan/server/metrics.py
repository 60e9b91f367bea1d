"""What ``/metrics`` shows: the engine's gauges and totals, and what the server sees of requests."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cardan.core.engine.serving import ServingEngine
from cardan.core.types.outputs import EngineStats, RequestMetrics
from cardan.server.metric_types import PREFIXES, Counter, Family, Histogram, gauges

_SHORT_SECONDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
_LONG_SECONDS = (
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0,
)  # fmt: skip
_TOKENS = tuple(base * 10**power for power in range(7) for base in (1, 2, 5))
_STEP_TOKENS = tuple(2**power for power in range(15))
_FEW = (1, 2, 5, 10, 20)
# By level.
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class ServerMetrics(Collector):
    """All metrics of one server, in a registry of its own."""

    def __init__(self, engine: ServingEngine, model_name: str, engine_label: str = "0") -> None:
        self.registry = CollectorRegistry()
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": engine_label}
        self._http: dict[tuple[str, str, int], int] = {}
        self._seen = EngineStats()

        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens received.")
        self.generation_tokens = Counter("generation_tokens", "Tokens generated.")
        self.cached_tokens = Counter("prompt_tokens_cached", "Prompt tokens found in the cache.")
        self.requests = Counter("request_success", "Requests that ended.", "finished_reason")
        self.rejections = Counter("admission_rejections", "Requests turned away, queue full.")
        self._preemptions = Counter("num_preemptions", "Requests preempted.")
        self._restarts = Counter("engine_restarts", "Engines that replaced a dead or stuck one.")
        self._prefix_queries = Counter("prefix_cache_queries", "Tokens looked up in the cache.")
        self._prefix_hits = Counter("prefix_cache_hits", "Tokens found in the cache.")

        self.time_to_first_token = Histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _SHORT_SECONDS
        )
        self.inter_token_latency = Histogram(
            "inter_token_latency_seconds", "Time between two tokens of a sample.", _SHORT_SECONDS
        )
        self.time_per_output_token = Histogram(
            "request_time_per_output_token_seconds", "Mean time for a token.", _SHORT_SECONDS
        )
        self.e2e_latency = Histogram(
            "e2e_request_latency_seconds", "Arrival to end.", _LONG_SECONDS
        )
        self.queue_time = Histogram(
            "request_queue_time_seconds", "Arrival to first step.", _LONG_SECONDS
        )
        self.prefill_time = Histogram(
            "request_prefill_time_seconds", "First step to first token.", _LONG_SECONDS
        )
        self.decode_time = Histogram(
            "request_decode_time_seconds", "First token to last token.", _LONG_SECONDS
        )
        self.inference_time = Histogram(
            "request_inference_time_seconds", "First step to last token.", _LONG_SECONDS
        )
        self.request_prompt_tokens = Histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self.request_generation_tokens = Histogram(
            "request_generation_tokens", "Tokens generated for a request.", _TOKENS
        )
        self.params_n = Histogram("request_params_n", "Samples asked for.", _FEW)
        self.params_max_tokens = Histogram(
            "request_params_max_tokens", "Most tokens asked for.", _TOKENS
        )
        self._step_tokens = Histogram("iteration_tokens_total", "Tokens of a step.", _STEP_TOKENS)

        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def count_http(self, method: str, route: str, status: int) -> None:
        """``route`` is the path's pattern, never the path itself."""
        key = (method, route, status)
        self._http[key] = self._http.get(key, 0) + 1

    def observe_stats(self) -> None:
        """Take the engine's newest totals; often enough, each step is observed for itself."""
        stats = self._engine.stats()
        num_steps = stats.num_steps - self._seen.num_steps
        if num_steps > 0:
            num_tokens = max(0, stats.num_batched_tokens - self._seen.num_batched_tokens)
            self._step_tokens.observe(num_tokens / num_steps, num_steps)
        if num_steps != 0:
            self._seen = EngineStats(
                num_steps=stats.num_steps, num_batched_tokens=stats.num_batched_tokens
            )
        self._preemptions.raise_to(stats.num_preemptions)
        self._prefix_queries.raise_to(stats.prefix_queries)
        self._prefix_hits.raise_to(stats.prefix_hits)

    def observe_times(self, times: RequestMetrics, num_output_tokens: int) -> None:
        """The phases of a request that has ended, as far as it got."""
        arrival, start = times.arrival_time, times.first_scheduled_time
        first, last = times.first_token_time, times.last_token_time
        if times.finished_time is not None:
            self.e2e_latency.observe(times.finished_time - arrival)
        if start is not None:
            self.queue_time.observe(start - arrival)
        if start is not None and first is not None:
            self.prefill_time.observe(first - start)
        if start is not None and last is not None:
            self.inference_time.observe(last - start)
        if first is not None and last is not None:
            self.decode_time.observe(last - first)
            if num_output_tokens > 1:
                self.time_per_output_token.observe((last - first) / (num_output_tokens - 1))

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Any]:
        """Nothing ahead of time: registering must not ask the engine."""
        return ()

    def collect(self) -> Iterator[Family]:
        self.observe_stats()
        stats = self._engine.stats()
        labels = self._labels
        yield from gauges("num_requests_running", "Running.", stats.num_running, labels)
        yield from gauges("num_requests_waiting", "Waiting.", stats.num_waiting, labels)
        yield from gauges(
            "kv_cache_usage_perc", "KV blocks in use, 0 to 1.", stats.kv_usage, labels
        )
        yield from self._sleep_state()
        health = self._engine.health()
        yield from gauges(
            "last_step_age_seconds", "Since the last step.", health.last_step_age, labels
        )
        yield from self._plugin_gauges(health.plugin_gauges)
        self._restarts.raise_to(health.num_restarts)
        yield from self._info()
        for metric in vars(self).values():
            if isinstance(metric, Counter | Histogram):
                yield from metric.collect(labels)
        yield self._http_requests()

    def _sleep_state(self) -> Iterator[GaugeMetricFamily]:
        level = self._engine.sleep_level
        for prefix in PREFIXES:
            family = GaugeMetricFamily(
                prefix + "engine_sleep_state",
                "1 for the state that holds.",
                labels=[*self._labels, "sleep_state"],
            )
            for at, state in enumerate(_SLEEP_STATES):
                family.add_metric([*self._labels.values(), state], int(level == at))
            yield family

    def _plugin_gauges(
        self, gauges: Mapping[str, Mapping[str, float]]
    ) -> Iterator[GaugeMetricFamily]:
        """Whatever plugins measure; equal names of two plugins differ by their label."""
        for name in sorted({name for own in gauges.values() for name in own}):
            family = GaugeMetricFamily(
                f"cardan:plugin_{name}", "A plugin's gauge.", labels=[*self._labels, "plugin"]
            )
            for plugin, own in gauges.items():
                if name in own:
                    family.add_metric([*self._labels.values(), plugin], own[name])
            yield family

    def _info(self) -> Iterator[GaugeMetricFamily]:
        info = self._engine.info
        cache = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),  # the name that gateways look for
            "num_blocks": str(info.num_blocks),
            "kv_cache_bytes": str(info.kv_cache_bytes),
        }
        yield from gauges("cache_config_info", "The KV cache.", 1, {**self._labels, **cache})
        phases = GaugeMetricFamily(
            "cardan:startup_seconds", "Phases of the start.", labels=[*self._labels, "phase"]
        )
        for phase, seconds in info.startup_seconds.items():
            phases.add_metric([*self._labels.values(), phase], seconds)
        yield phases

    def _http_requests(self) -> CounterMetricFamily:
        family = CounterMetricFamily(
            "http_requests", "HTTP requests answered.", labels=["method", "handler", "status"]
        )
        for (method, route, status), count in self._http.items():
            family.add_metric([method, route, str(status)], count)
        return family
