"""Rows of speed: decode, prefill, throughput, each beside its floor."""

import statistics

from gpu_rows.floors import decode_floor_s, prefill_floor_s, throughput_floor_s

SAMPLINGS = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95, "top_k": 50}}


def decode_rows(name, work):
    """Row names, and what measures each of an engine for a number of repeats."""
    rows = {}
    for batch in work.batches:

        def measure(engine, repeats, batch=batch):
            samples = [step_ms(engine, work, batch) for _ in range(repeats + 1)][1:]
            floor = decode_floor_s(engine.shape, batch, work.prompt + work.answer / 2)
            return timed("ms/step", samples, 1000 * floor, 3)

        rows[f"{name} decode, batch {batch}"] = measure
    return rows


def step_ms(engine, work, batch):
    """(time of ``answer`` tokens - time of 1 token) / (``answer`` - 1), each of fresh prompts."""
    one = engine.run_s(batch, work.prompt, 1)
    return 1000 * (engine.run_s(batch, work.prompt, work.answer) - one) / (work.answer - 1)


def long_rows(name, work):
    """The same of long prompts that are in the prefix cache, so that only decode is timed."""
    batch, length = work.long

    def measure(engine, repeats):
        prompts = engine.draw(batch, length)
        engine.time_s(prompts, work.answer)
        samples = []
        for _ in range(repeats):
            one = engine.time_s(prompts, 1)
            samples.append(1000 * (engine.time_s(prompts, work.answer) - one) / (work.answer - 1))
        floor = decode_floor_s(engine.shape, batch, length + work.answer / 2)
        return timed("ms/step", samples, 1000 * floor, 3)

    return {f"{name} decode, {batch} x {length}": measure}


def prefill_rows(name, work):
    rows = {}
    for count, length in work.prefills:

        def measure(engine, repeats, count=count, length=length):
            samples = [1000 * engine.run_s(count, length, 1) for _ in range(repeats + 1)][1:]
            return timed("ms", samples, 1000 * count * prefill_floor_s(engine.shape, length), 2)

        rows[f"{name} prefill {count} x {length}"] = measure
    return rows


def throughput_rows(name, work):
    requests, prompt, answer = work.throughput
    tokens = requests * answer
    rows = {}
    for kind, sampling in SAMPLINGS.items():

        def measure(engine, repeats, sampling=sampling):
            samples = [
                tokens / engine.run_s(requests, prompt, answer, **sampling)
                for _ in range(max(1, repeats - 1) + 1)
            ][1:]
            figure = statistics.median(samples)
            ceiling = tokens / throughput_floor_s(engine.shape, requests, prompt, answer)
            return {
                "unit": "output tok/s",
                "figure": round(figure),
                "floor": round(ceiling),
                "ratio": round(figure / ceiling, 3),
                "samples": [round(sample) for sample in samples],
            }

        rows[f"{name} throughput {requests} requests {prompt}/{answer}, {kind}"] = measure
    return rows


def timed(unit, samples, floor, digits):
    """Fields of a row whose figure is a time: the median of its samples."""
    figure = statistics.median(samples)
    return {
        "unit": unit,
        "figure": round(figure, digits),
        "floor": round(floor, digits),
        "ratio": round(floor / figure, 3),
        "samples": [round(sample, digits + 1) for sample in samples],
    }
