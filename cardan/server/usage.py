"""Token counts of an answer, as OpenAI reports them."""

from dataclasses import dataclass, field
from typing import Any

from cardan.core.types.outputs import RequestOutput


@dataclass(slots=True)
class _Counts:
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(slots=True)
class UsageCounter:
    """Adds up over the prompts of one HTTP request."""

    _counts: dict[int, _Counts] = field(default_factory=dict)

    def update(self, prompt_index: int, output: RequestOutput) -> None:
        counts = self._counts.setdefault(prompt_index, _Counts())
        counts.num_prompt_tokens = len(output.prompt_token_ids)
        counts.num_cached_tokens = max(counts.num_cached_tokens, output.num_cached_tokens)
        counts.num_output_tokens = max(counts.num_output_tokens, output.num_output_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(counts.num_prompt_tokens for counts in self._counts.values())

    @property
    def num_cached_tokens(self) -> int:
        return sum(counts.num_cached_tokens for counts in self._counts.values())

    @property
    def num_output_tokens(self) -> int:
        return sum(counts.num_output_tokens for counts in self._counts.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
