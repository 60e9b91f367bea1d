"""The fields that chat and text completions have in common."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cardan.core.types.sampling_params import MAX_N, MAX_STOP_TOKEN_IDS
from cardan.server.protocol.fields import (
    Body,
    CacheSalt,
    ExtraArgs,
    Float,
    Int,
    RequestId,
    StreamOptions,
    StringList,
    TokenIds,
    TokenIdText,
    without_nulls,
)


class GenerationRequest(Body):
    """What every generating request may set.

    A setting left as None takes the model's own default, then the API's.
    """

    model: str | None = None
    stream: bool = False
    stream_options: Annotated[
        StreamOptions | None, BeforeValidator(without_nulls, json_schema_input_type=StreamOptions)
    ] = None

    n: Int = Field(default=1, ge=1, le=MAX_N)
    temperature: Float | None = Field(default=None, ge=0, le=2)
    top_p: Float | None = Field(default=None, gt=0, le=1)
    top_k: Int | None = Field(default=None, ge=-1)
    min_p: Float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: Float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: Float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: Float = Field(default=0.0, ge=-2, le=2)
    seed: Int | None = None
    logit_bias: dict[TokenIdText, Float] | None = None
    allowed_token_ids: TokenIds | None = Field(default=None, min_length=1)
    bad_words: StringList = Field(default_factory=list)

    stop: StringList = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list, max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: Int | None = Field(default=None, ge=0)
    min_tokens: Int = Field(default=0, ge=0)

    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Int | None = Field(
        default=None, ge=-1, json_schema_extra={"not": {"const": 0}}
    )
    truncation_side: Literal["left", "right"] = "left"

    echo: bool = False
    prompt_logprobs: Int | None = Field(default=None, ge=-1)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    priority: Int = 0
    request_id: RequestId | None = None
    cache_salt: CacheSalt | None = None
    stream_interval: Int = Field(default=1, ge=1)

    # For logits processors of plugins; the second name is a common one for the same.
    extra_args: ExtraArgs | None = None
    vllm_xargs: ExtraArgs | None = None

    # Without a reasoning parser there is nothing that this could change, and a text has no calls.
    include_reasoning: bool = True
    parallel_tool_calls: bool = True

    def ignored_fields(self) -> list[str]:
        """Names of the members that nothing here acts upon, sorted."""
        names = list(self.model_extra or {})
        if self.stream_options is not None:
            names += [f"stream_options.{name}" for name in self.stream_options.model_extra or {}]
        return sorted(names)

    def logged_settings(self) -> dict[str, Any]:
        """Settings that differ from their defaults and hold no text, for the log."""
        shown = self.model_dump(exclude_defaults=True, include=_LOGGED)
        return {name: value for name, value in shown.items() if value is not None}


_LOGGED = {
    "stream", "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed", "ignore_eos", "max_tokens",
    "max_completion_tokens", "min_tokens", "echo", "logprobs", "top_logprobs",
    "prompt_logprobs", "priority",
}  # fmt: skip
