"""Times of the sampler's steps on the CPU, by its own kernels and by their definitions: JSON lines.

    python benchmarks/sampling.py [--threads N] [--repeats N] [--vocab N]

``step_us``: from logits to tokens for a batch that does not change, the tables of
log-probabilities read. ``host_us``: the same over a vocabulary of 64, where kernels cost next to
nothing. ``spread`` is the standard deviation of the logits: flat ones leave top-p most tokens.
Each time is the least over repeats in which the contenders take turns, since on a shared machine
everything else that runs only adds; with one thread it is the thread's own time. ``load`` is the
machine's load while it was measured.
"""

import argparse
import json
import os
import time

import numpy as np
import torch

from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.registry import KernelRegistry
from cardan.core.sampling.sampler import Sampler
from cardan.core.sampling.sampling_states import SamplingStates
from cardan.core.types.sampling_params import SamplingParams
from cardan.core.types.step import NewRow
from cardan.platforms.cpu.native.library import native_status
from cardan.platforms.cpu.native.sampling_providers import SAMPLING_PROVIDERS

SETTINGS = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.95},
    "top_k+top_p": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "logprobs 5": {"temperature": 0, "logprobs": 5},
    "penalties": {"temperature": 0, "presence_penalty": 1e-6, "frequency_penalty": 1e-6},
}
ROWS = (1, 8, 32, 256)
SPREADS = (3.0, 0.05)
PROVIDERS = {"native": SAMPLING_PROVIDERS, "definition": ()}
SMALL = 64
# A measurement makes steps for about so long.
SECONDS = 0.02


def least_times(calls, repeats, clock):
    """Microseconds of one call, by name."""
    counts = {}
    for name, call in calls.items():
        call()
        started = time.perf_counter()
        call()
        counts[name] = max(1, int(SECONDS / (time.perf_counter() - started)))
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            started = clock()
            for _ in range(counts[name]):
                call()
            least[name] = min(least[name], (clock() - started) / counts[name])
    return {name: round(seconds * 1e6, 1) for name, seconds in least.items()}


def new_row(row, settings, vocab_size):
    rng = np.random.default_rng(row)
    return NewRow(
        row=row,
        key=row,
        token_ids=rng.integers(vocab_size, size=300).astype(np.int32),
        num_prompt_tokens=200,
        num_computed_tokens=0,
        params=SamplingParams(**settings),
        seed=row,
        stop_token_ids=(),
        bad_words_token_ids=(),
        block_ids=(),
    )


def steps(settings, num_rows, vocab_size, spread):
    """A step of one batch, by who serves it."""
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * spread
    rows = np.arange(num_rows)
    num_output = np.full(num_rows, 100)
    calls = {}
    for name, providers in PROVIDERS.items():
        ops = KernelRegistry(CATALOGUE, providers, device=torch.device("cpu"), features=())
        states = SamplingStates(num_rows, vocab_size, "cpu", ops)
        for row in rows.tolist():
            states.add(new_row(row, settings, vocab_size))
        sampler = Sampler(states, ops)
        own = logits.clone()

        def step(sampler=sampler, own=own):
            for table in sampler.sample(own, rows, num_output).tables:
                table.arrays()

        calls[name] = step
    return calls


def report(**values):
    print(json.dumps({**values, "load": round(os.getloadavg()[0], 2)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--vocab", type=int, default=49152)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    report(library=native_status(), threads=options.threads, torch=torch.__version__)
    with torch.inference_mode():
        for name, settings in SETTINGS.items():
            for rows in ROWS:
                host = least_times(steps(settings, rows, SMALL, 1.0), options.repeats, clock)
                for spread in SPREADS:
                    calls = steps(settings, rows, options.vocab, spread)
                    times = least_times(calls, options.repeats, clock)
                    report(sampling=name, rows=rows, spread=spread, step_us=times, host_us=host)


if __name__ == "__main__":
    main()
