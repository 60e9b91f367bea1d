"""Traces: what the scheduler tells of chunks and preemptions, the book, and what users get."""

import threading
import time

import httpx
import numpy as np
import pytest
from scheduler_helpers import Sim, make_request
from server_helpers import INFO, TOKENIZER, RunningServer, read_events, wait_until

from cardan.core.config.server import ServerConfig
from cardan.core.engine.async_engine import AsyncEngine
from cardan.core.engine.trace_book import MAX_POINTS, SequenceTrace, TokenTimes, TraceBook
from cardan.core.text.postprocess import RequestState
from cardan.core.text.preprocess import Preprocessor
from cardan.core.types.engine_info import EngineHealth
from cardan.core.types.errors import EngineDeadError
from cardan.core.types.outputs import EngineStats, Finish, Started, StepOutputs
from cardan.core.types.request import EngineRequest, FinishReason
from cardan.core.types.sampling_params import SamplingParams
from cardan.server.traces import describe, summarize

# -- what a step tells ----------------------------------------------------------------------------


class Told(Sim):
    """Keeps chunks and preemptions, and what the plans say about them."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.chunks, self.preempted = [], []

    def collect(self):
        take = self.scheduler.take_outputs
        outputs = take()
        self.scheduler.take_outputs = lambda: outputs
        super().collect()
        self.scheduler.take_outputs = take
        self.chunks += outputs.chunks.items()
        self.preempted += outputs.preempted

    def planned_chunks(self):
        """From the plans alone: what a row computed of the tokens that it came with."""
        entries, chunks = {}, []
        for plan in self.plans:
            for row in plan.freed_rows:
                entries.pop(row, None)
            entries |= {new.row: len(new.token_ids) for new in plan.new_rows}
            rows, counts = plan.rows.tolist(), plan.num_scheduled_tokens.tolist()
            for row, key, count, start in zip(
                rows, plan.keys.tolist(), counts, plan.num_computed_tokens.tolist(), strict=True
            ):
                if start < entries[row]:
                    chunks.append((key, count))
        return chunks


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_chunks_add_up_to_the_prompt(depth):
    sim = Told(budget=8, depth=depth)
    sim.add(make_request(1, range(1, 20), 3))
    sim.add(make_request(10, [1], 5))
    sim.run().check_answers()
    assert [count for key, count in sim.chunks if key == 1] == [8, 7, 4]
    assert [count for key, count in sim.chunks if key == 10] == [1]
    assert sim.preempted == []


def test_a_cached_prefix_is_no_chunk():
    sim = Told()
    sim.add(make_request(1, range(1, 14), 2))
    sim.run()
    sim.add(make_request(2, range(1, 14), 2))
    sim.run()
    assert sim.chunks == [(1, 13), (2, 1)]
    assert sim.started[2].num_cached_tokens == 12


def test_samples_share_their_prompt():
    sim = Told()
    sim.add(make_request(1, range(1, 11), 3, n=3))
    sim.run()
    assert sorted(sim.chunks) == [(1, 10), (2, 1), (3, 1)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_under_preemption_chunks_are_what_the_plans_say(depth, prefix_caching):
    sim = Told(num_blocks=13, budget=16, depth=depth, prefix_caching=prefix_caching)
    for key in range(1, 7):
        sim.add(make_request(key, range(key, key + 9), 12, ignore_eos=True))
    sim.run(5000).check_answers()
    assert len(sim.preempted) == sim.totals["num_preemptions"] > 0
    assert set(sim.preempted) <= set(sim.requests)
    # Results for a row whose sequence has left are dropped, and so are their chunks.
    told, planned = sorted(sim.chunks), sorted(sim.planned_chunks())
    if depth == 0:
        assert told == planned
    left = list(planned)
    for chunk in told:
        left.remove(chunk)
    assert len(left) <= len(sim.preempted)


def test_a_decode_step_tells_none():
    sim = Told()
    sim.add(make_request(1, [1, 2, 3], 30, ignore_eos=True))
    for _ in range(10):
        sim.step()
    assert sim.chunks == [(1, 3)]
    assert len(sim.tokens[1]) > 5


# -- the book -------------------------------------------------------------------------------------


def request_of(key=1, n=1, num_prompt=10, max_tokens=50, request_id=None):
    return EngineRequest(
        key=key,
        request_id=request_id or f"r{key}",
        prompt_token_ids=list(range(num_prompt)),
        params=SamplingParams(n=n, max_tokens=max_tokens),
        max_tokens=max_tokens,
        arrival_time=100.0,
    )


def step(at, **kwargs):
    return StepOutputs(stats=EngineStats(num_steps=1, last_step_time=at), **kwargs)


class Front:
    """A book and the states that the front has; ``now`` far from the engine's clock."""

    def __init__(self, **kwargs):
        self.book = TraceBook(**kwargs)
        self.states = {}

    def open(self, request):
        self.states[request.key] = RequestState(TOKENIZER, request, None)
        self.book.open(request)
        return self.states[request.key]

    def apply(self, outputs):
        self.book.apply(outputs, now=1e6)

    def close(self, key, token_ids=(), finish=None, now=200.0):
        state = self.states.pop(key)
        for sequence in state.sequences:
            sequence.advance(token_ids, [], finish)
        self.book.close(state, now)
        return self.book.find(state.request.request_id)


def test_a_life_in_order():
    front = Front()
    front.open(request_of(num_prompt=30))
    (trace,) = front.book.live
    told = summarize(trace, 100.5)
    assert (told.state, told.seconds, told.num_cached_tokens) == ("waiting", 0.5, None)
    front.apply(step(102, started={1: Started(8, 101.0)}, chunks={1: 16}))
    assert describe(trace, 102, 512).samples[0].why == "Its prompt is being computed."
    front.apply(step(103, chunks={1: 6}, keys=[1], token_ids=[65]))
    front.apply(step(104, keys=[1], token_ids=[66]))
    assert describe(trace, 104, 512).samples[0].why == "It is answering."
    front.apply(step(105, preempted=[1]))
    assert summarize(trace, 105).state == "preempted"
    front.apply(step(107, chunks={1: 31}, keys=[1], token_ids=[67]))
    assert summarize(trace, 107).state == "running"
    front.close(1, [65, 66, 67], Finish(FinishReason.STOP))
    told = describe(front.book.find("r1"), 300, 512)
    assert told.model_dump(exclude={"arrived_at"}) == {
        "id": "r1",
        "state": "finished",
        "num_samples": 1,
        "num_prompt_tokens": 30,
        "num_cached_tokens": 8,
        "num_output_tokens": 3,
        "num_preemptions": 1,
        "queue_seconds": 1.0,
        "first_token_seconds": 3.0,
        "seconds": 100.0,
        "finish_reason": "stop",
        "max_tokens": 50,
        "priority": 0,
        "error": None,
        "samples": [
            {
                "index": 0,
                "chunks": [
                    {"at": 2.0, "num_tokens": 16},
                    {"at": 3.0, "num_tokens": 6},
                    {"at": 7.0, "num_tokens": 31},
                ],
                "preempted_at": [5.0],
                "num_tokens": 3,
                "token_stride": 1,
                "token_times": [3.0, 4.0, 7.0],
                "last_token_at": 7.0,
                "finish_reason": "stop",
                "stop_token_id": None,
                "why": "The model ended its answer.",
            }
        ],
    }
    assert told.arrived_at == pytest.approx(time.time() - (time.monotonic() - 100), abs=5)
    book = front.book
    assert (book.num_prompt_tokens, book.num_output_tokens, book.num_ended) == (53, 3, 1)
    assert book.live == []


@pytest.mark.parametrize(
    ("finish", "max_tokens", "reason", "why"),
    [
        (Finish(FinishReason.STOP), 50, "stop", "The model ended its answer."),
        (Finish(FinishReason.STOP, 77), 50, "stop", "Token 77, one of the request's stop tokens"),
        (Finish(FinishReason.LENGTH), 50, "length", "The limit of 50 tokens was reached."),
        (Finish(FinishReason.LENGTH), 502, "length", "The context of 512 tokens was full."),
        (Finish(FinishReason.ABORT), 50, "abort", "It was ended early"),
        (None, 50, "abort", "It was ended early"),
    ],
)
def test_why_it_ended(finish, max_tokens, reason, why):
    front = Front()
    front.open(request_of(max_tokens=max_tokens))
    trace = front.close(1, [65], finish)
    told = describe(trace, 200, 512)
    assert told.finish_reason == reason
    assert told.samples[0].why.startswith(why)
    assert told.samples[0].stop_token_id == (finish.stop_token_id if finish else None)


def test_errors_are_told():
    front = Front()
    front.open(request_of()).error = EngineDeadError("the engine is gone")
    told = describe(front.close(1), 200, 512)
    assert (told.finish_reason, told.error) == ("error", "the engine is gone")
    assert told.samples[0].why == "It failed: the engine is gone"


def test_the_ring_keeps_the_latest():
    front = Front(max_recent=3)
    for key in range(1, 6):
        front.open(request_of(key))
        front.close(key)
    assert [trace.request_id for trace in front.book.recent] == ["r5", "r4", "r3"]
    assert front.book.find("r1") is None
    # An id that comes again: one trace, the newer.
    front.open(request_of(9, num_prompt=4, request_id="r4"))
    assert front.book.find("r4").num_prompt_tokens == 4
    assert [trace.request_id for trace in front.book.recent] == ["r5", "r3"]
    front.close(9)
    assert [trace.request_id for trace in front.book.recent] == ["r4", "r5", "r3"]


def test_after_its_end_a_request_gets_nothing_more():
    front = Front()
    front.open(request_of(n=2))
    front.apply(step(101, keys=[1, 2], token_ids=[65, 65]))
    front.book.drop([1])
    front.apply(step(102, keys=[1, 2], token_ids=[66, 66], chunks={1: 5}, preempted=[1]))
    assert [item.tokens.count for item in front.book.find("r1").sequences] == [1, 2]
    trace = front.close(1, [65])
    front.apply(step(103, keys=[2], token_ids=[67], started={1: Started(1, 1.0)}))
    assert trace.num_output_tokens == 2  # as the front counts, one each
    assert trace.queue_seconds is None


@pytest.mark.parametrize("count", [1, 15, 16, 17, 31, 32, 33, 64, 65, 1000])
def test_many_token_times_are_thinned_evenly(count):
    times = TokenTimes(limit=16)
    for place in range(count):
        times.add(float(place))
    assert times.count == count
    assert times.last == count - 1
    assert len(times.times) <= 16
    assert len(times.times) >= min(count, 8)
    assert list(times.times) == list(np.arange(0, count, times.stride))


def test_a_trace_is_bounded():
    sequence = SequenceTrace(MAX_POINTS)
    for place in range(5000):
        sequence.add_chunk(float(place), 3)
        sequence.add_preemption(float(place))
    assert len(sequence.chunk_times) <= 512
    assert sum(sequence.chunk_tokens) == 15000
    assert list(sequence.chunk_times) == sorted(sequence.chunk_times)
    assert sequence.chunk_times[-1] == 4999
    assert sequence.num_preemptions == 5000
    assert len(sequence.preemption_times) == 64
    front = Front()
    front.open(request_of(n=64))
    for place in range(500):
        front.apply(step(100 + place, keys=list(range(1, 65)), token_ids=[65] * 64))
    trace = front.book.find("r1")
    assert trace.num_output_tokens == 64 * 500
    assert sum(len(item.tokens.times) for item in trace.sequences) <= MAX_POINTS


# -- over HTTP, on the real front -----------------------------------------------------------------

ANSWER = TOKENIZER.encode("secret words. And so on", False)


class ScriptedClient:
    """Computes a prompt in two chunks, then says ``ANSWER`` token by token."""

    info = INFO
    sleep_level = 0

    def __init__(self):
        self.hold = threading.Event()
        self.hold.set()
        self.sink = None
        self.is_dead = False
        self.aborted = set()

    def connect(self, sink):
        self.sink = sink

    def submit(self, request):
        if self.is_dead:
            raise EngineDeadError("the engine is gone")
        threading.Thread(target=self._work, args=(request,)).start()

    def abort(self, keys):
        self.aborted |= set(keys)

    def reset_prefix_cache(self):
        pass

    def health(self):
        return EngineHealth("ready")

    def close(self):
        pass

    def _work(self, request):
        key, num_prompt = request.key, len(request.prompt_token_ids)
        self._tell(started={key: Started(1, time.monotonic())}, chunks={key: num_prompt - 3})
        self.hold.wait(10)
        answer = ANSWER[: request.max_tokens]
        for place, token_id in enumerate(answer):
            if key in self.aborted:
                return
            is_last = place == len(answer) - 1
            self._tell(
                keys=[key],
                token_ids=[token_id],
                chunks={} if place else {key: 2},
                finished={key: Finish(FinishReason.LENGTH)} if is_last else {},
            )
            time.sleep(0.001)

    def _tell(self, **kwargs):
        self.sink.on_outputs(step(time.monotonic(), **kwargs))


class LazyEngine:
    """Made on the server's loop, where its first attribute is asked for."""

    def __init__(self, client):
        self.client = client
        self._engine = None

    def __getattr__(self, name):
        if self._engine is None:
            preprocessor = Preprocessor(TOKENIZER, INFO)
            self._engine = AsyncEngine(self.client, TOKENIZER, preprocessor)
        return getattr(self._engine, name)


@pytest.fixture(scope="module")
def server():
    server = RunningServer(LazyEngine(ScriptedClient()), ServerConfig(port=0))
    yield server
    server.close()


def get_trace(server, request_id):
    answer = server.http.get("/cardan/requests/" + request_id)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("stream", [False, True])
def test_the_trace_equals_the_usage(server, stream):
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = server.chat(stream=stream, max_tokens=9, **options)
    if stream:
        answer = next(event for event in read_events(answer) if event["usage"])
    else:
        answer = answer.json()
    usage = answer["usage"]
    trace = get_trace(server, answer["id"])
    assert trace["state"] == "finished"
    assert trace["num_prompt_tokens"] == usage["prompt_tokens"]
    assert trace["num_cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] == 1
    assert trace["num_output_tokens"] == usage["completion_tokens"] == 9
    (sample,) = trace["samples"]
    assert sum(chunk["num_tokens"] for chunk in sample["chunks"]) == usage["prompt_tokens"] - 1
    times = [trace["queue_seconds"], *(chunk["at"] for chunk in sample["chunks"])]
    assert times == sorted(times)
    assert len(sample["token_times"]) == 9
    assert sample["token_times"] == sorted(sample["token_times"])
    assert trace["first_token_seconds"] == pytest.approx(sample["token_times"][0], abs=1e-4)
    assert trace["seconds"] >= sample["token_times"][-1] - 1e-4


def test_a_live_request_is_listed_until_its_client_leaves(server):
    server.engine.client.hold.clear()
    body = {"prompt": "abcdef", "stream": True, "request_id": "live/one?#%"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
    server.engine.client.hold.set()

    def is_ended():
        recent = server.http.get("/cardan/requests").json()["recent"]
        return any(item["id"] == "cmpl-live/one?#%" for item in recent)

    wait_until(is_ended)
    trace = get_trace(server, "cmpl-live%2Fone%3F%23%25")
    assert (trace["id"], trace["finish_reason"]) == ("cmpl-live/one?#%", "abort")
    assert trace["samples"][0]["why"].startswith("It was ended early")


def test_live_ones_come_first(server):
    client = server.engine.client
    client.hold.clear()
    thread = threading.Thread(target=lambda: server.complete(prompt="abcdef", request_id="slow"))
    thread.start()
    wait_until(lambda: server.http.get("/cardan/requests").json()["num_live"] == 1)
    listed = server.http.get("/cardan/requests").json()
    client.hold.set()
    thread.join(10)
    assert [(item["id"], item["state"]) for item in listed["live"]] == [("cmpl-slow", "running")]
    assert listed["live"][0]["finish_reason"] is None
    listed = server.http.get("/cardan/requests").json()
    assert (listed["num_live"], listed["live"]) == (0, [])
    assert listed["recent"][0]["id"] == "cmpl-slow"


def test_a_stop_text_ends_the_count_and_is_not_kept(server):
    answer = server.complete(prompt="private", stop=["s. A"]).json()
    trace = get_trace(server, answer["id"])
    assert trace["finish_reason"] == "stop"
    assert trace["num_output_tokens"] == answer["usage"]["completion_tokens"]
    assert trace["samples"][0]["why"] == "One of the request's stop texts came."
    text = str(trace) + server.http.get("/cardan/requests").text
    for secret in ("private", "secret", "words", "s. A"):
        assert secret not in text


def test_no_engine_and_unknown_ids(server):
    client = server.engine.client
    client.is_dead = True
    assert server.complete(request_id="late").status_code == 503
    client.is_dead = False
    trace = get_trace(server, "cmpl-late")
    assert (trace["finish_reason"], trace["error"]) == ("error", "the engine is gone")
    answer = server.http.get("/cardan/requests/never")
    assert answer.status_code == 404
    assert "the latest 256 requests have one" in answer.json()["error"]["message"]


def test_refused_requests_have_no_trace(server):
    before = server.http.get("/cardan/requests").json()["recent"]
    assert server.complete(prompt="a" * 600).status_code == 400
    assert server.http.get("/cardan/requests").json()["recent"] == before


def test_nothing_is_left_when_all_have_ended(server):
    book = server.engine.traces
    wait_until(lambda: not book.live)
    assert book._sequences == {}
