"""Starts of `cardan serve`, weights warm and cold: one result of `cardan bench` a line.

python benchmarks/startup.py [--model demo] [--repeats 3]
"""

import argparse
import json
import sys

from cardan.bench.startup import StartupOptions, run_startup


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for state in ("warm", "cold"):
        startup = StartupOptions(
            model=options.model, repeats=options.repeats, page_cache=state, label=state
        )
        result = run_startup(startup, lambda text: print(text, file=sys.stderr))
        print(json.dumps(result.as_dict()), flush=True)


if __name__ == "__main__":
    main()
