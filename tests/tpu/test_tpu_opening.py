"""Opening the runtime: programs are kept on disk, and a later process compiles none again."""

import json
import os
import subprocess
import sys

import pytest

from cardan.testing.tiny_models import make_tiny_model

# Counts programs that XLA compiled, and those that were read from the disk.
CODE = """
import json, sys
import jax
from cardan import LLM, SamplingParams, TokenPrompt

counts = {"hits": 0, "misses": 0}
prefix = "/jax/compilation_cache/cache_"

def count(event, **_):
    if event.removeprefix(prefix) in counts:
        counts[event.removeprefix(prefix)] += 1

jax.monitoring.register_event_listener(count)
settings = {"platform": "tpu", "num_blocks": 16, "max_num_seqs": 4, "max_model_len": 64}
with LLM(sys.argv[1], **settings) as llm:
    # However quickly this one was compiled.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    prompt = TokenPrompt(token_ids=[3, 4, 5])
    [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
folder = jax.config.jax_compilation_cache_dir
print(json.dumps({**counts, "tokens": output.outputs[0].token_ids, "folder": folder}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_tiny_model("llama", folder)
    return folder


def run(model, **environment):
    answer = subprocess.run(
        [sys.executable, "-c", CODE, str(model)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


def test_programs_are_kept(model, tmp_path):
    first = run(model, XDG_CACHE_HOME=str(tmp_path))
    second = run(model, XDG_CACHE_HOME=str(tmp_path))
    assert first["folder"] == str(tmp_path / "cardan" / "xla")
    assert first["misses"] > 0
    assert second["hits"] > 0
    assert second["misses"] < first["misses"]
    assert second["tokens"] == first["tokens"]


def test_a_place_that_the_user_chose_is_left(model, tmp_path):
    found = run(model, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    assert found["folder"] == str(tmp_path / "own")
