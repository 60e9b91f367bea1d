"""Offline scenarios of the engine: one result of `cardan bench` a line.

    python benchmarks/throughput.py [--scenario A B D] [--model demo] [--dtype auto] [--repeats 3]
        [--quantization SCHEME] [--kv-cache-dtype auto]

A: one stream, 128 prompt and 256 generated tokens. B: 32 requests at once, 256 prompt and 128
generated tokens each. D: 32 requests that share 512 prompt tokens and have 32 of their own, 32
generated tokens each. Prompts are random ids, EOS is ignored, the prefix cache is empty before
every repeat. `--scale 0.25` makes counts and lengths a quarter, for a quick look.
"""

import argparse
import json
import sys

from cardan.bench.latency import run_latency
from cardan.bench.offline import OfflineOptions
from cardan.bench.synthetic import SyntheticOptions
from cardan.bench.throughput import run_throughput
from cardan.core.config.cache import CacheConfig
from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig

SCENARIOS = {
    "A": (run_latency, {"count": 1, "input_len": 128, "output_len": 256}),
    "B": (run_throughput, {"count": 32, "input_len": 256, "output_len": 128}),
    "D": (run_throughput, {"count": 32, "input_len": 32, "output_len": 32, "prefix_len": 512}),
}


def scaled(load, scale):
    return {
        name: value if value == 1 else max(1, round(value * scale)) for name, value in load.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    config = EngineConfig(
        model=ModelConfig(
            model=options.model, dtype=options.dtype, quantization=options.quantization
        ),
        cache=CacheConfig(kv_cache_memory_bytes=2 << 30, kv_cache_dtype=options.kv_cache_dtype),
    )
    for name in options.scenario:
        run, load = SCENARIOS[name]
        offline = OfflineOptions(
            load=SyntheticOptions(**scaled(load, options.scale)),
            repeats=options.repeats,
            label=name,
        )
        result = run(config, offline, lambda text: print(text, file=sys.stderr))
        print(json.dumps(result.as_dict()), flush=True)


if __name__ == "__main__":
    main()
