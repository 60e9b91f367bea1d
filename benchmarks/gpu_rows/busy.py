"""How much of the time of decode steps a device computes, as torch's profiler sees its kernels."""

from gpu_rows.speed import step_ms

TARGET = 0.95
# Steps of a profiled run: each gives the profiler some hundred kernels to read.
_STEPS = 48


def busy_rows(name, work):
    batch = work.busy_batch

    def measure(engine, repeats):
        step_ms(engine, work, batch)  # warms up
        wall = min(step_ms(engine, work, batch) for _ in range(repeats)) / 1000
        prefill = profiled(engine, batch, work.prompt, 1)
        whole = profiled(engine, batch, work.prompt, _STEPS + 1)
        if not whole:
            return {"unit": "share of time", "skipped": "torch's profiler sees no device's kernels"}
        # Steps alone: the end of the run, less a little for how it ends.
        last = max(end for _, end in whole)
        begin, end = last - 0.8 * _STEPS * wall, last - 0.05 * _STEPS * wall
        computed = (covered(whole) - covered(prefill)) / _STEPS
        return {
            "unit": "share of time",
            "figure": round(covered(whole, begin, end) / (end - begin), 3),
            "floor": 1.0,
            "target": TARGET,
            "computed_ms_a_step": round(1000 * computed, 3),
            "ms_a_step_without_profiler": round(1000 * wall, 3),
        }

    return {f"{name} busy, batch {batch}": measure}


def profiled(engine, batch, prompt, answer):
    """(begin, end) in seconds of every kernel and copy of one run."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    activities = [item for item in supported_activities() if item != ProfilerActivity.CPU]
    if not activities:
        return []
    with profile(activities=activities) as profiler:
        engine.run_s(batch, prompt, answer)
    return [
        (event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events()
        if event.device_type.name != "CPU"
    ]


def covered(intervals, begin=float("-inf"), end=float("inf")):
    """Length of the union of intervals between ``begin`` and ``end``."""
    total, reached = 0.0, begin
    for low, high in sorted(intervals):
        low, high = max(low, reached), min(high, end)
        if high > low:
            total += high - low
            reached = high
    return total
