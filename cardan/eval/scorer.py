"""A model in this process that says how likely given tokens are.

Windows run as requests do: scheduled, in chunks, with keys and values written to the paged KV cache
and read back from it.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from cardan.bootstrap import open_client
from cardan.core.config.engine import EngineConfig
from cardan.core.text.tokenizer import Tokenizer
from cardan.core.types.engine_info import EngineInfo
from cardan.core.types.errors import ConfigError, EngineDeadError, RequestFailedError
from cardan.core.types.outputs import StepOutputs
from cardan.core.types.prompt import TokenPrompt
from cardan.core.types.request import FinishReason
from cardan.core.types.sampling_params import SamplingParams
from cardan.eval.windows import Window

if TYPE_CHECKING:
    from cardan.core.runner.model_runner import PromptLogitsObserver

Float64 = npt.NDArray[np.float64]

# Tokens of a window in one step, unless the user says otherwise: small enough that most keys and
# values are read back from the cache, as in serving.
CHUNK = 128
_ONLY_PROMPT = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0.0, detokenize=False)


@dataclass(slots=True)
class _Inbox:
    """Engine outputs on their way from the engine's thread to the caller's."""

    items: queue.SimpleQueue[StepOutputs | str] = field(default_factory=queue.SimpleQueue)

    def on_outputs(self, outputs: StepOutputs) -> None:
        self.items.put(outputs)

    def on_death(self, reason: str) -> None:
        self.items.put(reason)


class Scorer:
    """Owner of one engine. Close it, or use it in a ``with`` block."""

    def __init__(
        self, config: EngineConfig, prompt_logits: PromptLogitsObserver | None = None
    ) -> None:
        """Open the model; ``prompt_logits`` is shown the logits of every window, on the engine's
        thread, before ``score`` returns.

        Raises:
            CardanError: the model cannot be opened; the message has the cause and the remedy.
        """
        opened = open_client(_for_scoring(config), in_process=True, prompt_logits=prompt_logits)
        self._client = opened.client
        self._preprocessor = opened.preprocessor
        self._inbox = _Inbox()
        self._count = 0
        self.tokenizer: Tokenizer = opened.tokenizer
        self.info: EngineInfo = opened.client.info
        opened.client.connect(self._inbox)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and free its memory. Idempotent."""
        self._client.close()

    def check_context(self, context: int) -> None:
        """Raise ConfigError for windows that the model cannot hold."""
        if context > self.info.max_model_len:
            raise ConfigError(
                f"context is {context}, but {self.info.model} takes {self.info.max_model_len} "
                "tokens at most; give a smaller --context"
            )

    def score(self, window: Window) -> Float64:
        """Natural log-probabilities of the window's scored tokens.

        Raises:
            CardanError: a token is not in the vocabulary, or the model could not be computed.
        """
        prompt = TokenPrompt(token_ids=window.token_ids)
        self._count += 1
        request = self._preprocessor.to_request(
            self._preprocessor.encode(prompt), _ONLY_PROMPT, request_id=str(self._count)
        )
        self._client.submit(request)
        try:
            logprobs = self._wait(request.key)
        except KeyboardInterrupt:
            self._client.abort([request.key])
            raise
        # The first token of a prompt has no log-probability.
        return np.array(logprobs[window.first - 1 :], np.float64)

    def _wait(self, key: int) -> list[float]:
        logprobs: list[float] = []
        while True:
            outputs = self._inbox.items.get()
            if isinstance(outputs, str):
                raise EngineDeadError(outputs)
            for table in outputs.prompt_logprobs.get(key, ()):
                if table is not None:
                    logprobs.append(table.logprobs[0])
            finish = outputs.finished.get(key)
            if finish is not None and finish.reason is FinishReason.ERROR:
                raise RequestFailedError(finish.message or "the window could not be computed")
            if finish is not None:
                return logprobs


def _for_scoring(config: EngineConfig) -> EngineConfig:
    """One window at a time, in chunks."""
    config = config.with_value("scheduler.max_num_seqs", 1)
    scheduling = config.scheduler
    is_chunked = scheduling.enable_chunked_prefill is not False
    if is_chunked and not scheduling.long_prefill_token_threshold:
        config = config.with_value("scheduler.long_prefill_token_threshold", CHUNK)
    return config
