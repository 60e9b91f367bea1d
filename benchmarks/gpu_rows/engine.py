"""An engine with made-up weights, and timed runs of it."""

import json
import tempfile
import time
from pathlib import Path

import numpy as np

# What the platforms of accelerators prefer where nothing else is asked for.
SETTINGS = {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "memory_utilization": 0.9}


def write_model(shape, directory):
    """The files of a model of ``shape`` whose weights are made up."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = {**shape, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(config))
    words = {f"t{index}": index for index in range(shape["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))


class Engine:
    """An LLM with made-up weights, and runs of it. Close its ``llm``."""

    def __init__(self, shape, settings):
        from cardan.llm import LLM

        self.shape = shape
        self._random = np.random.default_rng(0)
        with tempfile.TemporaryDirectory() as directory:
            write_model(shape, Path(directory))
            began = time.perf_counter()
            self.llm = LLM(directory, load_format="dummy", **settings)
            self.ready_s = time.perf_counter() - began

    def draw(self, requests, length):
        """Random prompts of equal length, other ones in every call."""
        return self._random.integers(3, self.shape["vocab_size"], (requests, length)).tolist()

    def run_s(self, requests, prompt, answer, **sampling):
        """Seconds for fresh prompts of equal length."""
        return self.time_s(self.draw(requests, prompt), answer, **sampling)

    def time_s(self, prompts, answer, **sampling):
        """Seconds for these prompts; greedy unless sampling settings say otherwise."""
        from cardan.core.types.sampling_params import SamplingParams

        params = SamplingParams(
            max_tokens=answer, ignore_eos=True, detokenize=False, **(sampling or {"temperature": 0})
        )
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - began
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        if made != len(prompts) * answer:
            raise RuntimeError(f"{made} tokens came instead of {len(prompts) * answer}")
        return took
