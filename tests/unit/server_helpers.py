"""A scripted engine and a real loopback server around it."""

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import httpx
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from cardan.core.config.server import ServerConfig
from cardan.core.engine.trace_book import TraceBook
from cardan.core.text import Tokenizer
from cardan.core.types.engine_info import EngineHealth, EngineInfo
from cardan.core.types.errors import InputError
from cardan.core.types.outputs import (
    CompletionOutput,
    EngineStats,
    Logprob,
    LogprobTable,
    RequestMetrics,
    RequestOutput,
)
from cardan.core.types.prompt import ChatPrompt, TextPrompt, TokenPrompt
from cardan.server.run import HttpServer, reserve_socket

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def make_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    """One token a byte, then ``<|begin|>`` and ``<|end|>``."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|begin|>", "<|end|>")]
    )
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<|begin|>", "eos_token": "<|end|>"},
        chat_templates={"default": template},
    )


TOKENIZER = make_tokenizer()
BEGIN, END = 256, 257
INFO = EngineInfo(
    model="tiny",
    architecture="TinyForCausalLM",
    platform="fake",
    device="fake:0",
    dtype="float32",
    vocab_size=260,  # more logits than tokens, as padded models have
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_logprobs=20,
    block_size=16,
    num_blocks=32,
    kv_cache_bytes=4096,
    weight_bytes=8192,
    startup_seconds={"weights": 1.5, "warmup": 0.25},
)


@dataclass
class Sample:
    """What one sample says: parallel token ids and the text that each adds."""

    token_ids: list[int]
    texts: list[str]
    finish_reason: str = "stop"
    stop_reason: int | str | None = None

    @classmethod
    def of(cls, text: str, **kwargs) -> "Sample":
        ids = TOKENIZER.encode(text, False)
        texts, sent = [], 0
        for end in range(1, len(ids) + 1):
            known = TOKENIZER.decode(ids[:end]).rstrip("\ufffd")
            texts.append(known[sent:])
            sent = len(known)
        return cls(ids, texts, **kwargs)


def table_for(token_id: int, num_top: int) -> LogprobTable:
    """The token itself at a place that depends on its id; all but one other are impossible."""
    others = [(token_id + k) % 250 for k in range(1, max(num_top, 1) + 1)]
    own_rank = token_id % 3 + 1
    table = {token_id: Logprob(-float(own_rank), own_rank)}
    for rank, other in enumerate(others[:num_top], 1):
        table[other] = Logprob(-1.5 if rank == 1 else -math.inf, rank)
    return table


@dataclass
class FakeEngine:
    """Answers every prompt with ``samples``; ``chunk(i)`` is the size of a sample's i-th part."""

    samples: Sequence[Sample] = field(default_factory=lambda: [Sample.of("Hello!")])
    chunk: Callable[[int], int] = lambda _i: 1
    delay: float = 0.0
    num_cached: int = 0
    error_before: Exception | None = None
    error_after: tuple[int, Exception] | None = None  # after so many outputs
    info: EngineInfo = INFO
    tokenizer: Tokenizer = TOKENIZER
    state: EngineHealth = field(default_factory=lambda: EngineHealth("ready"))
    totals: EngineStats = field(default_factory=EngineStats)
    traces: TraceBook = field(default_factory=TraceBook)
    requests: list = field(default_factory=list)
    aborted: list = field(default_factory=list)
    num_live: int = 0
    sleep_level: int = 0
    sleep_error: Exception | None = None

    async def sleep(self, level=1, mode="wait") -> None:
        if self.sleep_error is not None:
            raise self.sleep_error
        self.sleep_level = level
        self.sleep_mode = mode

    async def wake_up(self, tags=None) -> None:
        self.woken = tags
        self.sleep_level = 0

    async def encode(self, prompt, params=None) -> list[int]:
        match prompt:
            case TextPrompt():
                begin = [BEGIN] if prompt.add_special_tokens else []
                ids = begin + TOKENIZER.encode(prompt.text, False)
            case TokenPrompt():
                ids = list(prompt.token_ids)
            case ChatPrompt():
                text = "".join(f"<{m['role']}>{m['content']}" for m in prompt.messages)
                ids = TOKENIZER.encode(text, False)
        if any(token_id >= self.info.vocab_size for token_id in ids):
            raise InputError("a token id is out of range", "prompt")
        if params is not None and params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        if not ids:
            raise InputError("the prompt holds no tokens", "prompt")
        return ids

    async def generate(
        self, prompt, params, *, request_id, priority=0, cache_salt=None
    ) -> AsyncIterator[RequestOutput]:
        self.requests.append((prompt, params, request_id, priority, cache_salt))
        if self.error_before is not None:
            raise self.error_before
        ids = await self.encode(prompt, params)
        if len(ids) >= self.info.max_model_len:
            raise InputError(f"the prompt has {len(ids)} tokens", "prompt")
        self.num_live += 1
        self.totals = replace(self.totals, num_running=self.num_live)
        finished = False
        try:
            async for output in self._outputs(prompt, ids, params, request_id):
                yield output
                finished = output.finished
        finally:
            self.num_live -= 1
            self.totals = replace(self.totals, num_running=self.num_live)
            if not finished:
                self.aborted.append(request_id)

    async def _outputs(self, prompt, ids, params, request_id):
        writers = [
            _SampleWriter(index, self.samples[index % len(self.samples)], params)
            for index in range(params.n)
        ]
        start = time.monotonic()
        times = RequestMetrics(arrival_time=start, first_scheduled_time=start)
        prompt_tables = None
        if params.prompt_logprobs is not None:
            prompt_tables = [None, *(table_for(i, params.prompt_logprobs) for i in ids[1:])]
        num_sent = 0
        while not all(writer.is_done for writer in writers):
            size = self.chunk(num_sent)
            if params.stream_interval > 1 and num_sent > 0:
                size = max(size, params.stream_interval)
            longest = max(len(writer.ids) - writer.position for writer in writers)
            await asyncio.sleep(self.delay * max(1, min(size, longest)))
            if self.error_after is not None and num_sent >= self.error_after[0]:
                raise self.error_after[1]
            now = time.monotonic()
            pieces = [writer.take(size) for writer in writers if not writer.is_done]
            if any(piece.token_ids for piece in pieces):
                times.first_token_time = times.first_token_time or now
                times.last_token_time = now
            is_last = all(writer.is_done for writer in writers)
            times.finished_time = now if is_last else None
            self.totals = replace(
                self.totals,
                num_steps=self.totals.num_steps + 1,
                num_batched_tokens=self.totals.num_batched_tokens + len(pieces),
            )
            yield RequestOutput(
                request_id=request_id,
                prompt=prompt.text if isinstance(prompt, TextPrompt) else None,
                prompt_token_ids=ids,
                outputs=pieces,
                finished=is_last,
                prompt_logprobs=prompt_tables if num_sent == 0 else None,
                num_cached_tokens=self.num_cached,
                metrics=times,
                num_output_tokens=sum(writer.position for writer in writers),
            )
            num_sent += 1

    async def abort(self, request_id: str) -> None:
        raise AssertionError("the server closes the iterator instead")

    def health(self) -> EngineHealth:
        return self.state

    def stats(self) -> EngineStats:
        return self.totals


class _SampleWriter:
    def __init__(self, index, sample, params):
        self.index, self.params = index, params
        limit = len(sample.token_ids) if params.max_tokens is None else params.max_tokens
        is_cut = limit < len(sample.token_ids)
        self.ids, self.texts = sample.token_ids[:limit], sample.texts[:limit]
        self.finish_reason = "length" if is_cut else sample.finish_reason
        self.stop_reason = None if is_cut else sample.stop_reason
        self.position = 0
        self.is_done = False

    def take(self, size) -> CompletionOutput:
        start, end = self.position, min(len(self.ids), self.position + size)
        self.position = end
        self.is_done = end == len(self.ids)
        num_top = self.params.logprobs
        ids = self.ids[start:end]
        return CompletionOutput(
            index=self.index,
            text="".join(self.texts[start:end]),
            token_ids=ids,
            logprobs=None if num_top is None else [table_for(i, num_top) for i in ids],
            finish_reason=self.finish_reason if self.is_done else None,
            stop_reason=self.stop_reason if self.is_done else None,
            text_offsets=[len("".join(self.texts[:place])) for place in range(start, end)],
        )


class RunningServer:
    """A server on a thread with a loop of its own."""

    def __init__(self, engine: FakeEngine, config: ServerConfig):
        self.engine = engine
        self.sock = reserve_socket(config)
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        self.loop = asyncio.new_event_loop()
        self.server: HttpServer | None = None
        started = threading.Event()

        async def main():
            self.server = HttpServer(engine, config, self.sock)
            started.set()
            await self.server.run()

        def run():
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(main())

        self.thread = threading.Thread(target=run)
        self.thread.start()
        assert started.wait(10)
        self.http = httpx.Client(base_url=self.url, timeout=20)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.server.stop)

    def close(self) -> None:
        self.http.close()
        if self.thread.is_alive():
            self.stop()
            self.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()

    # -- requests ------------------------------------------------------------------------------

    def post(self, path: str, body: object, **kwargs) -> httpx.Response:
        return self.http.post(path, json=body, **kwargs)

    def chat(self, **fields) -> httpx.Response:
        fields.setdefault("messages", [{"role": "user", "content": "Hi"}])
        return self.post("/v1/chat/completions", fields)

    def complete(self, **fields) -> httpx.Response:
        fields.setdefault("prompt", "Hi")
        return self.post("/v1/completions", fields)


@contextmanager
def running(engine: FakeEngine | None = None, **config):
    server = RunningServer(engine or FakeEngine(), ServerConfig(port=0, **config))
    try:
        yield server
    finally:
        server.close()


def strict_json(text: str):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def read_events(response: httpx.Response) -> list[dict]:
    """The events of a whole stream, whose framing is checked; errors are events too."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    assert response.text.endswith("data: [DONE]\n\n")
    blocks = response.text.removesuffix("\n\n").split("\n\n")
    events = [block for block in blocks if not block.startswith(":")]
    for block in events:
        assert block.startswith("data: ")
        assert "\n" not in block
    assert events.count("data: [DONE]") == 1
    return [strict_json(block.removeprefix("data: ")) for block in events[:-1]]


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def fold_chat(events):
    """An unstreamed answer made of events by somebody who only read the documentation."""
    answer = {"choices": {}, "usage": None}
    for event in events:
        answer["usage"] = event.get("usage") or answer["usage"]
        for name in ("id", "created", "model", "system_fingerprint"):
            assert answer.setdefault(name, event[name]) == event[name]
        for name in ("prompt_token_ids", "prompt_text", "prompt_logprobs"):
            if name in event:
                answer[name] = event[name]
        for choice in event["choices"]:
            total = answer["choices"].setdefault(
                choice["index"], {"content": "", "logprobs": None, "finish_reason": None}
            )
            assert total["finish_reason"] is None, "nothing may follow the finish reason"
            total["content"] += choice["delta"].get("content") or ""
            total.setdefault("role", choice["delta"].get("role"))
            if choice["logprobs"]:
                total["logprobs"] = (total["logprobs"] or []) + choice["logprobs"]["content"]
            if "token_ids" in choice:
                total["token_ids"] = total.get("token_ids", []) + choice["token_ids"]
            total["finish_reason"] = choice["finish_reason"]
            total["stop_reason"] = choice.get("stop_reason")
    return answer
