"""From a request's fields to `SamplingParams`, with the model's own defaults underneath."""

from dataclasses import replace
from typing import Any

from cardan.core.types.engine_info import EngineInfo
from cardan.core.types.errors import InputError
from cardan.core.types.sampling_params import OutputKind, SamplingParams
from cardan.server.protocol.chat import ChatCompletionRequest
from cardan.server.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from cardan.server.protocol.generation import GenerationRequest

# Nobody waits for the parts of an answer that is sent whole: only its first and last are made.
_WHOLE_ANSWER = 1 << 30
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SAME_NAME = (
    "n", "presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "bad_words", "skip_special_tokens",
    "spaces_between_special_tokens", "allowed_token_ids",
)  # fmt: skip


def chat_params(
    request: ChatCompletionRequest, info: EngineInfo, reads_calls: bool = False
) -> SamplingParams:
    """Settings of a chat completion. ``reads_calls``: a tool parser is to see special tokens.

    Raises:
        InputError: fields contradict each other or exceed this server's limits.
    """
    if request.top_logprobs and not request.logprobs:
        raise InputError("top_logprobs needs logprobs to be true", "top_logprobs")
    if request.continue_final_message and request.add_generation_prompt:
        raise InputError(
            "continue_final_message needs add_generation_prompt to be false",
            "continue_final_message",
        )
    check_logprobs("top_logprobs", request.top_logprobs, info)
    max_tokens = request.max_completion_tokens or request.max_tokens
    params = _params(
        request,
        info,
        max_tokens=max_tokens,
        logprobs=request.top_logprobs if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )
    return replace(params, skip_special_tokens=False) if reads_calls else params


def completion_params(request: CompletionRequest, info: EngineInfo) -> SamplingParams:
    """Settings of a text completion, the same for each of its prompts.

    Raises:
        InputError: fields contradict each other or exceed this server's limits.
    """
    check_logprobs("logprobs", request.logprobs, info)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and not request.echo:
        raise InputError("max_tokens of 0 needs echo to be true", "max_tokens")
    scores = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        asked = (request.logprobs, request.logprobs if scores is None else scores)
        scores = -1 if -1 in asked else max(asked)
    if max_tokens == 0 and scores is None:
        scores = 0
    return _params(
        request, info, max_tokens=max_tokens, logprobs=request.logprobs, prompt_logprobs=scores
    )


def check_logprobs(name: str, value: int | None, info: EngineInfo) -> None:
    """Refuse a number of log-probabilities above this server's cap; -1 is the vocabulary."""
    cap = info.max_logprobs
    if value is None or cap == -1 or 0 <= value <= cap:
        return
    shown = "the whole vocabulary" if value == -1 else str(value)
    raise InputError(
        f"{name} asks for {shown}, this server gives at most {cap}; "
        "the operator can raise --max-logprobs",
        name,
    )


def _params(
    request: GenerationRequest,
    info: EngineInfo,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    _check_stream(request)
    check_logprobs("prompt_logprobs", request.prompt_logprobs, info)
    values: dict[str, Any] = {name: getattr(request, name) for name in _SAME_NAME}
    for name in MODEL_DEFAULTS:
        value = getattr(request, name)
        value = info.generation_config.get(name) if value is None else value
        if value is not None:
            values[name] = value
    # A cut on the right is made on the token ids, before generation.
    left = request.truncation_side == "left"
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        extra_args=_read_extra_args(request),
        logit_bias=_read_bias(request.logit_bias),
        truncate_prompt_tokens=request.truncate_prompt_tokens if left else None,
        stream_interval=request.stream_interval if request.stream else _WHOLE_ANSWER,
        output_kind=OutputKind.DELTA,
    )


def _read_extra_args(request: GenerationRequest) -> dict[str, Any]:
    if request.extra_args and request.vllm_xargs:
        raise InputError("give either extra_args or vllm_xargs", "vllm_xargs")
    return request.extra_args or request.vllm_xargs or {}


def _check_stream(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise InputError("stream_options needs stream to be true", "stream_options")
    if request.stream and request.prompt_logprobs:
        raise InputError("prompt_logprobs cannot be streamed", "prompt_logprobs")
    if request.truncate_prompt_tokens == 0:
        raise InputError(
            "truncate_prompt_tokens must be -1 or at least 1", "truncate_prompt_tokens"
        )


def _read_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    """Token ids as numbers, values clamped to what OpenAI allows."""
    if bias is None:
        return None
    read = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InputError(f"logit_bias key {key[:40]!r} is not a token id", "logit_bias")
        read[int(key)] = min(100.0, max(-100.0, value))
    return read
