"""What dtypes, quantisation and KV caches cost in quality: one result of `cardan eval kl` a line.

    python benchmarks/quality.py [--model demo] [--dtype bfloat16] [--quantization auto int8]
        [--kv-cache-dtype auto int8] [--against-dtype float32] [--against-quantization none]
        [--max-tokens 4096]

Every combination of dtype, scheme (auto: the checkpoint's way) and KV dtype is compared with the
same model in full precision (`--against-quantization none`) and `--against-dtype`. Each result also
has the perplexities of both.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

from cardan.core.config.cache import CacheConfig
from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.eval.kl import run_kl
from cardan.eval.run import EvalOptions
from cardan.eval.windows import WindowOptions


def engine_config(model, dtype, quantization, kv_cache_dtype="auto"):
    scheme = None if quantization == "auto" else quantization
    return EngineConfig(
        model=ModelConfig(model=model, dtype=dtype, quantization=scheme),
        cache=CacheConfig(kv_cache_dtype=kv_cache_dtype),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--quantization", nargs="+", default=["auto"])
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["auto"])
    parser.add_argument("--against-dtype", default="float32")
    parser.add_argument("--against-quantization", default="none")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--stride", type=int)
    parser.add_argument("--max-tokens", type=int, default=4096)
    options = parser.parse_args()
    windows = WindowOptions(
        context=options.context, stride=options.stride, max_tokens=options.max_tokens
    )
    base = engine_config(options.model, options.against_dtype, options.against_quantization)
    combinations = itertools.product(options.dtype, options.quantization, options.kv_cache_dtype)
    for combination in combinations:
        run = EvalOptions(windows=windows, text=options.text, label=" ".join(combination))
        config = engine_config(options.model, *combination)
        result = run_kl(config, base, run, lambda text: print(text, file=sys.stderr))
        print(json.dumps(result.as_dict()), flush=True)


if __name__ == "__main__":
    main()
