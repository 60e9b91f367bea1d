"""What Hugging Face transformers says about the demo model."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from prompts import NUM_TOKENS, PROMPTS


class HFModel:
    """transformers' own reading of the demo file, in float32."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self.tokenizer = tokenizer
        self.model = model

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Continuations; prompts of equal length are batched, so that none is padded."""
        import torch

        by_length = defaultdict(list)
        for place, token_ids in enumerate(prompts):
            by_length[len(token_ids)].append(place)
        answers: list[list[int]] = [[] for _ in prompts]
        for length, places in by_length.items():
            token_ids = torch.tensor([prompts[place] for place in places])
            with torch.inference_mode():
                out = self.model.generate(
                    token_ids,
                    attention_mask=torch.ones_like(token_ids),
                    max_new_tokens=num_tokens,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            for place, row in zip(places, out[:, length:].tolist(), strict=True):
                answers[place] = row
        return answers

    def logprobs(self, token_ids: list[int]):
        """[len(token_ids), vocab] log-probabilities of what follows each token."""
        import torch

        with torch.inference_mode():
            logits = self.model(torch.tensor([token_ids])).logits[0]
        return torch.log_softmax(logits.double(), -1)


@pytest.fixture(scope="session")
def hf(hf_demo) -> HFModel:
    return HFModel(*hf_demo)


@pytest.fixture(scope="session")
def greedy_truth(request: pytest.FixtureRequest, made_once) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, greedy continuation by transformers) of every prompt."""

    def make(path: Path) -> None:
        hf = request.getfixturevalue("hf")
        prompts = [hf.tokenizer(text)["input_ids"] for text in PROMPTS]
        path.write_text(json.dumps([prompts, hf.greedy(prompts, NUM_TOKENS)]))

    prompts, answers = json.loads(made_once("greedy_truth.json", make).read_text())
    return list(zip(prompts, answers, strict=True))
