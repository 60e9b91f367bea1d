"""What tests under load ask of a server: a known answer, a footprint, a clean log."""

import json
import time
from dataclasses import dataclass

import httpx
import psutil
from server_process import Server

# The demo's tokenizer and architecture, two thin layers, made-up weights: steps take a few
# milliseconds, so that what is tested is everything around them.
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
TINY = (
    *("--load-format", "dummy", "--seed", "1", "--hf-overrides", json.dumps(SIZES)),
    *("--dtype", "float32", "--threads", "1"),
)
ROOMY = ("--kv-cache-memory-bytes", "16MiB", "--max-num-seqs", "16")

# An engine that had nothing to do for a second gives freed memory back.
SECONDS_TO_REST = 1.5

# So that whatever asks for the rest of the context gets little.
SHORT = ("--max-model-len", "128")

KNOWN = {
    "prompt": "The quick brown fox jumps over the lazy dog",
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 2,
    "return_token_ids": True,
}


def known_answer(server: Server) -> str:
    """The token ids and the text that a request known to all tests gets."""
    response = httpx.post(server.url + "/v1/completions", json=KNOWN, timeout=60)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return json.dumps([choice["token_ids"], choice["text"], choice["finish_reason"]])


@dataclass(frozen=True)
class Footprint:
    """What a server and its engine hold of the machine; sizes in MiB."""

    server_fds: int
    engine_fds: int
    server_threads: int
    engine_threads: int
    server_rss: float
    engine_rss: float

    @classmethod
    def of(cls, server: Server) -> "Footprint":
        front, engine = psutil.Process(server.process.pid), server.engine
        return cls(
            server_fds=front.num_fds(),
            engine_fds=engine.num_fds(),
            server_threads=front.num_threads(),
            engine_threads=engine.num_threads(),
            server_rss=front.memory_info().rss / 2**20,
            engine_rss=engine.memory_info().rss / 2**20,
        )


def idle_footprint(server: Server, patience: float = 15.0) -> Footprint:
    """The footprint of rest: nothing runs, keep-alive connections of probes have been closed, and
    the engine has given back what it freed."""
    server.wait_idle(patience)
    deadline = time.monotonic() + patience
    while server.get("/load").json()["server_load"]:
        assert time.monotonic() < deadline, "a request is still in flight at the edge"
        time.sleep(0.05)
    time.sleep(SECONDS_TO_REST)
    return Footprint.of(server)


def check_held(before: Footprint, after: Footprint) -> None:
    """No descriptor and no thread more than before, but for a pool's that start when needed."""
    assert after.server_fds <= before.server_fds, (before, after)
    assert after.engine_fds <= before.engine_fds, (before, after)
    assert after.server_threads <= before.server_threads + MAX_POOL_THREADS, (before, after)
    assert after.engine_threads <= before.engine_threads, (before, after)


# asyncio.to_thread's pool grows to this and stays.
MAX_POOL_THREADS = 32


def check_log(server: Server) -> None:
    """Nothing unexpected was logged, and nothing that could forge a line or drive a terminal."""
    text = server.log.read_bytes()
    for word in (b"Traceback", b" ERROR ", b"CRITICAL", b"was never retrieved"):
        assert word not in text, text[-4000:].decode(errors="replace")
    controls = {byte for byte in text if byte < 32} - {10}
    assert not controls, f"control characters {controls} in the log"
    assert 127 not in text
