"""The demo model and what Hugging Face transformers says about it."""

import fcntl
import json
import os
from pathlib import Path

import pytest
from prompts import NUM_TOKENS, PROMPTS

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    from cardan.core.weights.resolve import resolve_model

    gguf = resolve_model("demo").gguf
    assert gguf is not None
    return gguf


class HFModel:
    """transformers' own reading of the demo file, in float32."""

    def __init__(self, gguf: Path) -> None:
        import torch
        import transformers

        self.tokenizer = transformers.AutoTokenizer.from_pretrained(
            gguf.parent, gguf_file=gguf.name
        )
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        ).eval()

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[int]:
        import torch

        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([token_ids]),
                attention_mask=torch.ones(1, len(token_ids), dtype=torch.int64),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[0, len(token_ids) :].tolist()

    def logprobs(self, token_ids: list[int]):
        """[len(token_ids), vocab] log-probabilities of what follows each token."""
        import torch

        with torch.inference_mode():
            logits = self.model(torch.tensor([token_ids])).logits[0]
        return torch.log_softmax(logits.double(), -1)


@pytest.fixture(scope="session")
def hf(demo_gguf: Path) -> HFModel:
    return HFModel(demo_gguf)


@pytest.fixture(scope="session")
def greedy_truth(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, greedy continuation by transformers) of every prompt.

    Takes a minute, so the workers of one test run share it.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    kept = shared / "greedy_truth.json"
    with (shared / "greedy_truth.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_text(json.dumps(_continue_prompts(request.getfixturevalue("hf"))))
    return [(ids, answer) for ids, answer in json.loads(kept.read_text())]


def _continue_prompts(hf: HFModel) -> list[tuple[list[int], list[int]]]:
    prompts = [hf.tokenizer(text)["input_ids"] for text in PROMPTS]
    return [(ids, hf.greedy(ids, NUM_TOKENS)) for ids in prompts]
