"""Rows of the conformance kit: a level each, from a run in a process of its own."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from gpu_rows.rows import process_error

_LONGEST_S = 1800.0


def run_kit_rows(rows, platform, levels=None):
    """``platform`` as ``cardan conformance`` takes it; ``levels``: ``L0,L3``, None: all."""
    found = {}

    def run():
        found.update(document(platform, levels, rows.left_s()))
        tests = found["tests"]
        return {
            "unit": "failed tests",
            "figure": sum(test["outcome"] == "failed" for test in tests),
            "reached": found["reached"],
            "seconds": round(sum(test["seconds"] for test in tests), 1),
            "seed": found["seed"],
            "failures": ["the run was interrupted"] if found["interrupted"] else [],
        }

    rows.run("kit", run)
    for level in found.get("levels", ()):
        label = f"kit {level['level']} {level['title']}"
        rows.run(label, lambda level=level: row(found, level), is_conclusion=True)


def row(found, level):
    """Of one level."""
    failures = [
        f"{test['id']}: {test['reason']}"
        for test in found["tests"]
        if test["level"] == level["level"] and test["outcome"] == "failed"
    ]
    return {
        "unit": "failed tests",
        "figure": level["failed"],
        "passed": level["passed"],
        "skipped": level["not_supported"],
        "failures": failures[:10],
    }


def document(platform, levels, left_s):
    """The kit's results, as ``docs/conformance.md`` has them."""
    from cardan.testing.conformance.run import KitRun, command

    # Other plugins and options of pytest's would change what is run.
    environment = {**os.environ, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kit.json"
        done = subprocess.run(
            command(KitRun(spec=platform, levels=levels, json_file=str(path))),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=min(_LONGEST_S, left_s or _LONGEST_S),
            check=False,
        )
        if not path.exists():
            raise process_error(done.returncode, done.stdout + done.stderr)
        return json.loads(path.read_text())
