"""Platforms of three kinds in one process: the host's, the fake one, a stranger's device type."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cardan.core.discovery import PLATFORMS
from cardan.testing.fake.settings import VARIABLE
from cardan.testing.tiny_models import make_tiny_model

BASALT = Path(__file__).parents[2] / "plugins" / "cardan-basalt" / "cardan_basalt"

# Registers a device type of torch's for good, so it needs a process of its own.
SCRIPT = """
import sys
from concurrent.futures import ThreadPoolExecutor
from cardan import LLM, SamplingParams
from cardan.core.types.errors import ConfigError
from cardan.testing.tiny_models import prompt_ids

params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
prompts = [{"prompt_token_ids": prompt_ids(length, length)} for length in (3, 25, 17)]

def engine(platform):
    return LLM(sys.argv[1], platform=platform, dtype="float32", max_num_seqs=3, num_blocks=24,
               num_threads=1)

def ask(llm):
    return [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]

names = ["cpu", "basalt", "fake:1"]
llms = [engine(name) for name in names]
with ThreadPoolExecutor(3) as pool:
    together = list(pool.map(ask, llms))
assert together[0] == together[1] == together[2], together
assert len(together[0]) == 3 and all(len(tokens) == 6 for tokens in together[0])

try:
    engine("quartz")
except ConfigError as error:
    text = str(error)
assert "basalt" in text and "quartz" in text and "torch.privateuse1" in text, text
assert "process of its own" in text, text

llms.pop(1).close()
for llm in llms:
    assert ask(llm) == together[0]
again = engine("basalt")
assert ask(again) == together[0]
for llm in (*llms, again):
    llm.close()
print("alike")
"""
QUARTZ = """
from cardan_basalt.platform import BasaltPlatform

class Quartz(BasaltPlatform):
    name = "quartz"

    def devices(self):
        from dataclasses import replace
        return [replace(device, platform="quartz") for device in super().devices()]
"""


@pytest.mark.slow
def test_three_are_open_at_once(site, tmp_path):
    shutil.copytree(BASALT, tmp_path / "cardan_basalt")
    basalt = {PLATFORMS: {"basalt": "cardan_basalt.platform:BasaltPlatform"}}
    site.install("cardan-basalt", basalt)
    site.install("quartz", {PLATFORMS: {"quartz": "quartz:Quartz"}}, {"quartz": QUARTZ})
    make_tiny_model("llama", tmp_path / "model")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "model")],
        env={**os.environ, "PYTHONPATH": str(tmp_path), VARIABLE: "num_devices=2"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("alike\n")
