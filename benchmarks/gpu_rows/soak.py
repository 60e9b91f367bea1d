"""Rows of a long run: an engine with a small cache under random traffic, window by window.

After each window all that was asked for has ended, everything must be at zero, and memory is read.
In the end memory must not have grown since the warm-up, and answers that were kept must be those
that the same requests get alone.
"""

import asyncio
import contextlib
import gc
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gpu_rows.agreement import Agreement, answer_of
from gpu_rows.engine import write_model
from gpu_rows.shapes import SHAPES
from gpu_rows.traffic import Bounds, Traffic

# Looks inside an engine: what the end-to-end tests demand to be zero.
sys.path.append(str(Path(__file__).parents[2] / "tests" / "e2e"))
from engine_probe import idle_facts

WINDOWS = 8
_WARM_UP = 2
# A cache of 3 longest requests, so that some are preempted, and steps smaller than long prompts.
SETTINGS = {
    "max_model_len": 4096,
    "num_blocks": 770,
    "block_size": 16,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 1024,
}
TINY = {
    **SETTINGS,
    "max_model_len": 512,
    "num_blocks": 98,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
}
# Since the warm-up. Of Python's containers: traces of the latest requests and sizes of steps that
# were met are kept, some thousands in all; what each request left would soon be more.
_MAX_GROWTH = {"host_mib": 64.0, "device_mib": 64.0, "objects": 10_000}
_PATIENCE_S = 120.0
# Of the time that is left: for answers alone.
_END_S = 30.0
# Live rows and the like go with the step after the last.
_SETTLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the process holds: MiB of host memory and of the device (None where it is the host's),
    and containers of Python."""

    host_mib: float
    device_mib: float | None
    objects: int


class DeviceMemory:
    """What is in use of the device that the engine runs on; close it.

    ``is_shared``: other processes use the device, so only what torch holds for this one counts.
    """

    def __init__(self, platform_name, is_shared):
        from cardan.core.discovery import Discovery
        from cardan.core.platform_selection import installed_platforms, select_platform

        selection = select_platform(platform_name, installed_platforms(Discovery()))
        platform, info = selection.platform, selection.devices[0]
        is_host = platform.capabilities(info).unified_memory
        self._device = None if is_host else platform.open(info)
        self._is_shared = is_shared

    def used_mib(self):
        if self._device is None:
            return None
        if self._is_shared:
            place = self._device.torch_device
            return round(torch.get_device_module(place).memory_reserved(place) / 2**20, 1)
        memory = self._device.memory_info()
        return round((memory.total - memory.free) / 2**20, 1)

    def close(self):
        if self._device is not None:
            self._device.close()


class Soak:
    """One engine and what was found while it ran."""

    def __init__(self, engine, traffic, memory):
        self.faults = []
        self.preemptions = 0
        self._engine = engine
        self._traffic = traffic
        self._memory = memory
        self._footprints = []
        self._requests = self._tokens = 0

    async def window(self, label, seconds):
        """Fields of one window's row."""
        began = time.monotonic()
        counts = await asyncio.wait_for(self._traffic.run(seconds), seconds + _PATIENCE_S)
        took = time.monotonic() - began
        held = await self._held()
        gc.collect()
        footprint = Footprint(host_mib(), self._memory.used_mib(), len(gc.get_objects()))
        self._footprints.append(footprint)
        stats = self._engine.stats()
        preemptions = stats.num_preemptions - self.preemptions
        self.preemptions = stats.num_preemptions
        self._requests += counts.requests
        self._tokens += counts.tokens
        faults = counts.faults + ([f"not at zero when idle: {held}"] if held else [])
        self.faults += [f"{label}: {fault}" for fault in faults]
        return {
            "unit": "requests/s",
            "figure": round(counts.requests / took, 1),
            "requests": counts.requests,
            "tokens": counts.tokens,
            "preemptions": preemptions,
            **asdict(footprint),
            "failures": faults[:5],
        }

    async def check_kept(self, dtype):
        """Answers under load beside those of the same requests alone."""
        from cardan import OutputKind, SamplingParams, TokenPrompt

        found = Agreement(dtype)
        for place, (prompt, count, answer) in enumerate(self._traffic.kept):
            await self._engine.reset_prefix_cache()
            params = SamplingParams(
                temperature=0,
                max_tokens=count,
                ignore_eos=True,
                detokenize=False,
                logprobs=20,
                output_kind=OutputKind.FINAL_ONLY,
            )
            prompt = TokenPrompt(token_ids=prompt)
            async for output in self._engine.generate(prompt, params, request_id=f"alone-{place}"):
                found.answer(f"answer {place}", answer, answer_of(output))
        self.faults += found.failures
        return {**found.fields(), "cases": len(self._traffic.kept)}

    def summary(self):
        """The last row: what was wrong, and how much more is held than after the warm-up."""
        faults = list(self.faults)
        if not self.preemptions:
            faults.append("nothing was preempted: the run was too short or the cache too large")
        first = asdict(self._footprints[min(_WARM_UP, len(self._footprints)) - 1])
        last = asdict(self._footprints[-1])
        growth = {
            name: round(last[name] - first[name], 1) for name in first if first[name] is not None
        }
        faults += [
            f"{name} grew by {growth[name]} since the warm-up, more than {limit}"
            for name, limit in _MAX_GROWTH.items()
            if growth.get(name, 0) > limit
        ]
        return {
            "unit": "faults",
            "figure": len(faults),
            "requests": self._requests,
            "tokens": self._tokens,
            "preemptions": self.preemptions,
            "growth": growth,
            "failures": faults[:10],
        }

    async def _held(self):
        """What is not zero although nobody asks for anything; waits a while for it to settle."""
        end = time.monotonic() + _SETTLE_S
        while True:
            stats = self._engine.stats()
            facts = {
                **idle_facts(self._engine),
                "stats running": stats.num_running,
                "stats waiting": stats.num_waiting,
                "stats kv_usage": stats.kv_usage,
            }
            held = {name: value for name, value in facts.items() if value}
            if not held or time.monotonic() > end:
                return held
            await asyncio.sleep(0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakRun:
    """``model``: a path, or None for made-up weights of the shape named ``shape``."""

    platform: str | None
    model: str | None
    shape: str
    minutes: float
    seed: int
    settings: dict
    is_shared: bool = False

    def window_s(self, rows):
        """A window's part of the whole; less where the time that is left is less."""
        whole, left = 60 * self.minutes, rows.left_s()
        return (whole if left is None else min(whole, max(1.0, left - _END_S))) / WINDOWS


def run_soak_rows(rows, run):
    """``run`` says of what, on what and how long: a ``SoakRun``."""
    with asyncio.Runner() as loop, contextlib.ExitStack() as held:
        opened = []

        def ready():
            soak, info = loop.run(_open(run, held, loop))
            opened.append((soak, info))
            return {"unit": "s", "figure": round(info.startup_seconds["total"], 2)}

        if not rows.run("soak ready", ready):
            return
        soak, info = opened[0]
        seconds = run.window_s(rows)
        for window in range(1, WINDOWS + 1):
            label = f"soak window {window}/{WINDOWS}"
            rows.run(label, lambda label=label: loop.run(soak.window(label, seconds)))
        rows.run(
            "soak answers alone",
            lambda: loop.run(soak.check_kept(info.dtype)),
            is_conclusion=True,
        )
        rows.run("soak", soak.summary, is_conclusion=True)


async def _open(run, held, loop):
    """A soak and its engine's facts; ``held`` closes all of it."""
    from cardan.bootstrap import open_async_engine
    from cardan.llm import config_from_settings

    settings = {"platform": run.platform, **(TINY if "tiny" in run.shape else SETTINGS)}
    folder = held.enter_context(tempfile.TemporaryDirectory())
    model = run.model
    if model is None:
        write_model(SHAPES[run.shape], Path(folder))
        model, settings["load_format"] = folder, "dummy"
    config = config_from_settings(model, {**settings, **run.settings})
    engine = await open_async_engine(config, in_process=True)
    held.callback(lambda: loop.run(engine.close()))
    memory = DeviceMemory(run.platform, run.is_shared)
    held.callback(memory.close)
    info = engine.info
    bounds = Bounds(
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        in_flight=info.max_num_seqs * 3 // 2,
    )
    return Soak(engine, Traffic(engine, bounds, run.seed), memory), info


def host_mib():
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)
