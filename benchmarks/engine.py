"""Offline figures of the engine: one JSON line for each scenario.

    python benchmarks/engine.py [--model demo] [--dtype auto] [--repeats 3]

A: one stream, 128 prompt tokens, 128 generated; tokens a second after the first token, and the time
to the first token. B: 32 requests at once, 256 prompt tokens and 128 generated each; generated
tokens a second over the whole batch. Prompts are random ids, EOS is ignored, nothing is cached
between repeats. Medians with minimum and maximum.
"""

import argparse
import json
import random
import statistics
import subprocess
import time
from pathlib import Path

from cardan import LLM, SamplingParams


def spread(values):
    return {
        "median": round(statistics.median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
    }


def prompts(llm, rng, count, length):
    return [[rng.randrange(llm.info.vocab_size) for _ in range(length)] for _ in range(count)]


def run(llm, batch, num_tokens):
    """Outputs and seconds of one batch."""
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    outputs = llm.generate(batch, params, use_tqdm=False)
    return outputs, time.perf_counter() - began


def single_stream(llm, rng):
    [output], _ = run(llm, prompts(llm, rng, 1, 128), 128)
    times = output.metrics
    rate = 127 / (times.last_token_time - times.first_token_time)
    return rate, (times.first_token_time - times.arrival_time) * 1000


def batch(llm, rng):
    _, seconds = run(llm, prompts(llm, rng, 32, 256), 128)
    return 32 * 128 / seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    root = Path(__file__).parents[1]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=root
    ).stdout.strip()
    rng = random.Random(0)
    with LLM(options.model, dtype=options.dtype, kv_cache_memory_bytes=2 << 30) as llm:
        facts = {
            "commit": commit,
            "device": llm.info.device,
            "model": llm.info.model,
            "dtype": llm.info.dtype,
            "startup_s": round(llm.info.startup_seconds["total"], 2),
        }
        run(llm, prompts(llm, rng, 1, 16), 4)
        singles = [single_stream(llm, rng) for _ in range(options.repeats)]
        rates, first = zip(*singles, strict=True)
        line = {"scenario": "A", "decode_tok_s": spread(rates), "ttft_ms": spread(first)}
        print(json.dumps({**facts, **line}), flush=True)
        line = {"scenario": "B", "output_tok_s": spread([batch(llm, rng) for _ in range(3)])}
        print(json.dumps({**facts, **line}), flush=True)


if __name__ == "__main__":
    main()
