"""Tiny random models with transformers' answer, in float32, to whether an output is right."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cardan.core.types.outputs import CompletionOutput, LogprobTable
from cardan.testing.tiny_models import make_tiny_model

# Difference of log-probabilities that a dtype may account for. A token within it of the likeliest
# one is a tie that either side may break.
GAPS = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}


class ModelTruth:
    """One tiny model: its directory, and judgement of what an engine made of it."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = str(directory)
        self._model: PreTrainedModel = make_tiny_model(name, directory)
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Float64 [len(token_ids), vocabulary]: row i is the distribution after token i."""
        key = tuple(token_ids)
        if key not in self._known:
            with torch.inference_mode():
                logits = self._model(torch.tensor([key]), use_cache=False).logits[0]
            self._known[key] = logits.double().log_softmax(-1)
        return self._known[key]

    def greedy_fault(self, prompt: Sequence[int], answer: Sequence[int], gap: float) -> str:
        """Which token of a greedy answer is not the likeliest after all before it; empty: none.

        As each token is judged after the engine's own ones, a tie that was broken otherwise does
        not spoil the rest.
        """
        rows = self.logprobs([*prompt, *answer])[len(prompt) - 1 : -1]
        for place, (row, token) in enumerate(zip(rows, answer, strict=True)):
            lead = float(row.max() - row[token])
            if lead > gap:
                return (
                    f"token {place} of the answer to {len(prompt)} tokens is {token}; the truth is "
                    f"{int(row.argmax())}, {lead:.3g} likelier in log-probability"
                )
        return ""

    def logprobs_fault(self, prompt: Sequence[int], answer: CompletionOutput, gap: float) -> str:
        """What is wrong with the tables of an answer's log-probabilities; empty: nothing."""
        if answer.logprobs is None:
            return "the answer has no log-probabilities"
        rows = self.logprobs([*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
        for place, (row, table) in enumerate(zip(rows, answer.logprobs, strict=True)):
            if fault := _table_fault(row, table, gap):
                return f"token {place} of the answer: {fault}"
        return ""

    def prompt_logprobs_fault(
        self, prompt: Sequence[int], tables: Sequence[LogprobTable | None] | None, gap: float
    ) -> str:
        """The same for a prompt's tables, of which the first is None."""
        if tables is None or len(tables) != len(prompt) or tables[0] is not None:
            return (
                "the prompt's log-probabilities are not None and one table for each further token"
            )
        for place, row in enumerate(self.logprobs(prompt)[:-1], start=1):
            table = tables[place]
            if table is None or prompt[place] not in table:
                return f"token {place} of the prompt has no entry of its own"
            if fault := _table_fault(row, table, gap):
                return f"token {place} of the prompt: {fault}"
        return ""


def _table_fault(row: torch.Tensor, table: LogprobTable, gap: float) -> str:
    for token, entry in table.items():
        want = float(row[token])
        if not abs(entry.logprob - want) <= gap:
            return f"the log-probability of {token} is {entry.logprob:.5g} instead of {want:.5g}"
    likeliest = float(row.max())
    if max(entry.logprob for entry in table.values()) < likeliest - gap:
        return f"the likeliest token ({int(row.argmax())}) is missing"
    return ""
