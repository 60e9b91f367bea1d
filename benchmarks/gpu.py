"""Correctness and speed of one accelerator, with made-up weights: one JSON line a row.

    python benchmarks/gpu.py [--only decode,prefill] [--shapes 0.6B,8B] [--platform NAME]
        [--repeats 3] [--limit SECONDS] [--set enforce_eager=true max_num_seqs=256 ...]

What runs unless ``--only`` names it:

``correct``: each kernel provider of the platform, and each of its attention backends, against
float64 on the operations' and the conformance kit's inputs; ``figure`` is the number of cases that
failed. ``decode``: milliseconds of a step at batch 1, 64 and 256, as (time of 128 tokens - time of
1 token) / 127 after prompts of 128 tokens. ``long``: the same of 16 prompts of 16384 tokens that
are in the prefix cache. ``prefill``: milliseconds of a whole call for one token after one prompt of
8192, and after 8 of 4096. ``throughput``: output tokens a second of 512 requests of 512/256 tokens
(8B, 30B-A3B) or 1024 of 256/128 (0.6B), greedy and sampled (temperature 0.8, top-p 0.95, top-k 50).
``busy``: share of the time in which the device computes, at batch 256. ``start``: seconds from a
new process to its first token, with kernels compiled anew and with those kept.

What runs only by name:

``parity``: whether answers and log-probabilities of a real model (``--demo PATH``, else the
installed demo) are the CPU platform's, with and without graphs, steps ahead, chunks, preemption and
cached prefixes. ``--record FILE`` writes down what the CPU platform says, ``--truth FILE`` takes
that from there. ``soak``: ``--minutes`` of random traffic on a small cache. ``kit``: the
conformance kit, a row a level. ``sanitize``: attention and cache writes under compute-sanitizer.

Prompts are random ids, fresh in every run; EOS is ignored and nothing is detokenized. ``floor`` is
what no engine can go below on a device with 4.31 TB/s and 789 TFLOP/s (an H200, measured): weights
read once a step or multiplied, and the KV cache read once; of experts those that tokens go to if
all are equally likely. ``ratio`` is floor over figure for times and figure over ceiling for rates,
so that 1 is perfect. Times are the host's, medians of the repeats.

A row that cannot be measured has an ``error``, a wrong one ``failures``; the rest goes on. Rows
that would begin after ``--limit`` are listed as not run. Exit codes: 0, all is well; 1, a row
failed; 3, none failed, but some were not run.
"""

import argparse
import json
import sys

from gpu_rows.busy import busy_rows
from gpu_rows.correctness import run_correctness_rows
from gpu_rows.engine import SETTINGS, Engine
from gpu_rows.kit import run_kit_rows
from gpu_rows.parity import run_parity_rows
from gpu_rows.rows import Rows, emit
from gpu_rows.sanitize import run_sanitize_rows
from gpu_rows.shapes import SHAPES, WORK
from gpu_rows.soak import SoakRun, run_soak_rows
from gpu_rows.speed import decode_rows, long_rows, prefill_rows, throughput_rows
from gpu_rows.start import run_start_rows
from gpu_rows.truth import Truth

__all__ = ["SETTINGS", "SHAPES", "Engine"]

# Measured on one engine for each shape, in this order.
SPEED = {
    "decode": decode_rows,
    "long": long_rows,
    "prefill": prefill_rows,
    "throughput": throughput_rows,
    "busy": busy_rows,
}
TABLE = ("correct", *SPEED, "start")
BY_NAME = ("parity", "soak", "kit", "sanitize")


def run_shape(rows, name, wanted, settings, repeats):
    """All rows of one shape's engine, then starts of others."""
    measures = {}
    for kind in (kind for kind in SPEED if kind in wanted):
        measures.update(SPEED[kind](name, WORK[name]))
    if measures:
        run_speed_rows(rows, name, measures, settings, repeats)
    if "start" in wanted:
        run_start_rows(rows, name, SHAPES[name], settings)


def run_speed_rows(rows, name, measures, settings, repeats):
    engines = []

    def ready():
        engines.append(Engine(SHAPES[name], settings))
        return {"unit": "s", "figure": round(engines[0].ready_s, 2)}

    is_ready = rows.run(f"{name} ready", ready)
    for label, measure in measures.items():
        if is_ready:
            rows.run(label, lambda measure=measure: measure(engines[0], repeats))
        else:
            rows.not_run(label, "there is no engine")
    if is_ready:
        engines[0].llm.close()


def parsed(settings):
    values = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


def arguments():
    kinds = (*TABLE, *BY_NAME)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(TABLE), help=f"of {', '.join(kinds)}")
    parser.add_argument("--shapes", default="0.6B,8B,30B-A3B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--platform")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, metavar="SECONDS")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--demo", metavar="PATH", help="model of parity and soak")
    parser.add_argument("--record", metavar="FILE", help="write the truth of parity, and end")
    parser.add_argument("--truth", metavar="FILE", help="what --record wrote")
    parser.add_argument("--minutes", type=float, default=10.0, help="of soak")
    parser.add_argument(
        "--shared-device", action="store_true", help="others use the device while soak runs"
    )
    parser.add_argument("--seed", type=int, default=0, help="of soak's traffic")
    parser.add_argument("--levels", help="of kit, as in L0,L3")
    options = parser.parse_args()
    options.only = options.only.split(",")
    options.shapes = options.shapes.split(",")
    for given, known in ((options.only, kinds), (options.shapes, SHAPES)):
        if unknown := [item for item in given if item not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
    if "kit" in options.only and options.platform is None:
        parser.error("kit needs --platform")
    return options


def run_named(rows, options):
    """Rows that take a real model, processes of their own, or minutes."""
    wanted, platform = options.only, options.platform
    if "kit" in wanted:
        run_kit_rows(rows, platform, options.levels)
    if "sanitize" in wanted:
        run_sanitize_rows(rows, platform)
    if "parity" in wanted:
        run_parity_rows(rows, options.demo or "demo", platform, options.truth)
    if "soak" in wanted:
        soak = SoakRun(
            platform=platform,
            model=options.demo,
            shape=options.shapes[0],
            minutes=options.minutes,
            seed=options.seed,
            settings=parsed(options.set),
            is_shared=options.shared_device,
        )
        run_soak_rows(rows, soak)


def main():
    options = arguments()
    if options.record:
        Truth.computed(options.demo or "demo").save(options.record)
        emit(row="parity truth", written=options.record)
        return
    rows = Rows(options.limit)
    if "correct" in options.only:
        run_correctness_rows(rows, options.platform)
    settings = {**SETTINGS, "platform": options.platform, **parsed(options.set)}
    for name in options.shapes:
        run_shape(rows, name, options.only, settings, options.repeats)
    run_named(rows, options)
    sys.exit(rows.exit_code)


if __name__ == "__main__":
    main()
