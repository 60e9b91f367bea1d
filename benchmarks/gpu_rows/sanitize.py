"""Rows of NVIDIA's compute-sanitizer on a platform's attention and cache writes."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from gpu_rows.rows import process_error

TOOLS = ("memcheck", "racecheck")
_NAME = "compute-sanitizer"
_TOOLKIT = Path("/usr/local/cuda/bin") / _NAME
_LONGEST_S = 900.0
# Errors of memcheck, hazards of racecheck; of both, counted in their last line.
_SUMMARIES = (
    re.compile(r"ERROR SUMMARY: (\d+) error"),
    re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
)


def run_sanitize_rows(rows, platform):
    """The steps as they are, then under each tool; each takes its share of the time that is
    left."""

    def seconds(num_runs):
        left = rows.left_s()
        return _LONGEST_S if left is None else min(_LONGEST_S, left / num_runs)

    whole = len(TOOLS) + 1
    if not rows.run("sanitize, no tool", lambda: steps(platform, [], seconds(whole))):
        return
    sanitizer = shutil.which(_NAME) or (str(_TOOLKIT) if _TOOLKIT.exists() else None)
    for place, tool in enumerate(TOOLS):
        rows.run(
            f"sanitize, {tool}",
            lambda tool=tool, place=place: row(
                sanitizer, tool, platform, seconds(len(TOOLS) - place)
            ),
        )


def row(sanitizer, tool, platform, seconds):
    if sanitizer is None:
        return {"unit": "errors", "skipped": f"{_NAME} is not installed"}
    # What asks the driver for devices is another process, and has no kernels.
    prefix = [sanitizer, "--target-processes", "application-only", "--tool", tool]
    return steps(platform, prefix, seconds)


def steps(platform, prefix, seconds):
    """Fields of a row; ``prefix`` stands before the command of the steps' process, which begins no
    layer after six tenths of the time."""
    script = str(Path(__file__).with_name("sanitized_steps.py"))
    end = time.monotonic() + 0.6 * seconds
    # Of a cache's spare room no tool would see that it is written to.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    child = subprocess.run(
        [*prefix, sys.executable, "-P", script, platform or "", str(end)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    return judged(child.returncode, child.stdout, child.stderr, is_tool=bool(prefix))


def judged(code, out, err, *, is_tool):
    """A row from what the process printed.

    Raises:
        RuntimeError: the steps, or the tool, did not come to their end.
    """
    answers = [json.loads(line) for line in out.splitlines() if line.startswith('{"steps"')]
    text = out + err
    counts = [int(found) for summary in _SUMMARIES for found in summary.findall(text)]
    if not answers or (is_tool and not counts):
        raise process_error(code, text)
    failures = list(answers[0]["failures"])
    if sum(counts):
        failures += [line for line in text.splitlines() if line.startswith("=========")][:8]
    return {
        "unit": "errors",
        "figure": sum(counts),
        "steps": answers[0]["steps"],
        "layers_not_run": answers[0]["layers_not_run"],
        "failures": failures[:10],
    }
