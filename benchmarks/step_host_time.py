"""Host time of a decode step against rows, and how busy the loop keeps a device of 5 ms steps.

    python benchmarks/step_host_time.py [--rows 8,64,256,512,1024] [--repeats 5]

One JSON line for each number of rows. ``steady_us``: thread time of a step in which nothing changes
(plan, launch, results, outputs, the message to the front), without waiting for the device.
``growing_us``: what each row adds in a step in which it needs a new KV block. ``joining_us``: what
each new request of 4 tokens adds. Medians with minimum and maximum over the repeats, of which each
is the median of its steps. ``busy``: share of time in which a fake device of 5 ms steps computes,
with one step ahead.
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import time
from pathlib import Path

import msgspec

from cardan.core.engine.client import InProcessClient
from cardan.core.engine.messages import Outputs
from cardan.testing.digest_engine import BLOCK_SIZE, DigestEngine, digest_request
from cardan.testing.fake.settings import FakeSettings

PROMPT = 4
STEP_MS = 5.0
ENCODER = msgspec.msgpack.Encoder()


def spread(values, digits=1):
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def engine(num_rows, num_tokens, step_ms=0.0):
    length = PROMPT + num_tokens
    return DigestEngine(
        FakeSettings(tier="executor", model="digest", depth=1, step_ms=step_ms, memory_mb=4096),
        max_num_seqs=2 * num_rows,
        num_blocks=2 * num_rows * (length // BLOCK_SIZE + 1) + 2,
        budget=max(2048, 2 * num_rows * PROMPT),
        max_model_len=length,
    )


def request(key, num_tokens):
    return digest_request(key, [(key + place) % 97 for place in range(PROMPT)], num_tokens)


def step_us(fake):
    """Microseconds of this thread for one step; its predecessor's result is there already."""
    fake.device.queue.drain()
    began = time.thread_time_ns()
    ENCODER.encode(Outputs(fake.engine.step()))
    return (time.thread_time_ns() - began) / 1000


def host_times(num_rows):
    """Steady, growing and joining costs of one engine."""
    num_tokens = 6 * BLOCK_SIZE
    fake = engine(num_rows, num_tokens)
    for key in range(num_rows):
        fake.engine.add(request(key, num_tokens))
    for _ in range(4):
        fake.engine.step()
    # All rows are in step, so every 16th step gives each of them a block.
    times = [step_us(fake) for _ in range(4 * BLOCK_SIZE)]
    steady = statistics.median(times)
    growing = statistics.median(sorted(times)[-4:]) - steady
    num_new = max(1, num_rows // 8)
    for key in range(num_new):
        fake.engine.add(request(num_rows + key, 8))
    joining = step_us(fake) - steady
    fake.executor.close()
    return steady, growing / num_rows, joining / num_new


def busy_share(num_rows, seconds=1.5):
    """Share of a device's time that it computes, behind a loop on its own thread."""
    num_tokens = int(3 * seconds * 1000 / STEP_MS)
    fake = engine(num_rows, num_tokens, STEP_MS)
    client = InProcessClient(fake.parts)
    inbox = queue.SimpleQueue()

    class Sink:
        def on_outputs(self, outputs):
            inbox.put(outputs)

        def on_death(self, reason): ...

    client.connect(Sink())
    for key in range(num_rows):
        client.submit(request(key, num_tokens))
    seen = set()
    while len(seen) < num_rows:
        seen.update(inbox.get().keys)
    busy, began = fake.counters.busy_seconds, time.monotonic()
    time.sleep(seconds)
    share = (fake.counters.busy_seconds - busy) / (time.monotonic() - began)
    client.close()
    return share


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="8,64,256,512,1024")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    root = Path(__file__).parents[1]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=root
    ).stdout.strip()
    for num_rows in map(int, options.rows.split(",")):
        times = [host_times(num_rows) for _ in range(options.repeats)]
        steady, growing, joining = zip(*times, strict=True)
        line = {
            "bench": "step_host_time",
            "commit": commit,
            "device": "fake",
            "model": "digest",
            "rows": num_rows,
            "steady_us": spread(steady),
            "growing_us": spread(growing, 2),
            "joining_us": spread(joining, 1),
            "busy": spread([busy_share(num_rows) for _ in range(options.repeats)], 3),
            "load": round(os.getloadavg()[0], 1),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
