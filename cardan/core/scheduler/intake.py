"""From a request to its sequences, or a refusal with the reason."""

import itertools
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

from cardan.core.config.scheduler import SchedulerConfig
from cardan.core.interfaces.scheduling import RequestView, SchedulingPolicy
from cardan.core.kvcache.manager import KVCacheManager
from cardan.core.kvcache.prefix import root_hash
from cardan.core.scheduler.sequence import Sequence
from cardan.core.types.errors import InputError, QueueFullError
from cardan.core.types.request import EngineRequest
from cardan.core.types.sampling_params import SamplingParams

Veto = Callable[[RequestView], str | None]
ParamsCheck = Callable[[SamplingParams], InputError | None]


class Intake:
    """Checks requests against the limits of this engine and makes their sequences."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: SchedulingPolicy,
        cache: KVCacheManager,
        max_model_len: int,
        veto: Veto,
        check_params: ParamsCheck,
    ) -> None:
        """``veto`` returns a reason to refuse a request, ``check_params`` the refusal itself; both
        return None where there is nothing to say against it."""
        self._config = config
        self._policy = policy
        self._cache = cache
        self._max_model_len = max_model_len
        self._veto = veto
        self._check_params = check_params
        self._arrivals = itertools.count()

    def accept(
        self, request: EngineRequest, num_waiting: int, num_waiting_tokens: int, num_running: int
    ) -> list[Sequence]:
        """The request's sequences in sample order.

        Raises:
            InputError: it can never be computed here.
            QueueFullError: a cap is reached, or the policy refuses it for now.
        """
        self._check_size(request)
        objection = self._check_params(request.params)
        if objection is not None:
            raise objection
        arrival = next(self._arrivals)
        view = RequestView(
            request_id=request.request_id,
            priority=request.priority,
            arrival=arrival,
            arrival_time=request.arrival_time,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.max_tokens,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
        )
        self._check_caps(request, num_waiting, num_waiting_tokens)
        refusal = self._policy.admit(view, num_waiting, num_running)
        if refusal is not None:
            raise QueueFullError(refusal)
        veto = self._veto(view)
        if veto is not None:
            raise InputError(veto)
        return self._make_sequences(request, view)

    def _check_size(self, request: EngineRequest) -> None:
        num_prompt = len(request.prompt_token_ids)
        if num_prompt == 0:
            raise InputError("the prompt holds no tokens", "prompt")
        total = num_prompt + request.max_tokens
        if total > self._max_model_len:
            raise InputError(
                f"{num_prompt} prompt tokens and {request.max_tokens} tokens to generate exceed "
                f"the context of {self._max_model_len} tokens",
                "prompt" if num_prompt > self._max_model_len else "max_tokens",
            )
        blocks = self._cache.blocks_for(total)
        usable = self._cache.config.num_usable_blocks
        if blocks > usable:
            raise InputError(
                f"{total} tokens need {blocks} KV blocks, the cache has {usable}",
                "prompt" if self._cache.blocks_for(num_prompt) > usable else "max_tokens",
            )

    def _check_caps(
        self, request: EngineRequest, num_waiting: int, num_waiting_tokens: int
    ) -> None:
        num_new = request.num_sequences
        cap = self._config.max_num_queued_reqs
        if cap is not None:
            if num_new > cap:
                raise InputError(f"{num_new} samples; the queue takes at most {cap}", "n")
            if num_waiting + num_new > cap:
                raise QueueFullError(f"the queue is full ({num_waiting} of {cap} sequences wait)")
        num_new *= len(request.prompt_token_ids)
        cap = self._config.max_num_queued_tokens
        if cap is not None:
            if num_new > cap:
                raise InputError(
                    f"{num_new} prompt tokens in all samples; the queue takes at most {cap}",
                    "prompt",
                )
            if num_waiting_tokens + num_new > cap:
                raise QueueFullError(
                    f"the queue is full ({num_waiting_tokens} of {cap} prompt tokens wait)"
                )

    def _make_sequences(self, request: EngineRequest, view: RequestView) -> list[Sequence]:
        params = request.params
        sort_key: tuple[Any, ...] = self._policy.sort_key(view)
        prompt = np.array(request.prompt_token_ids, np.int32)
        root = root_hash(request.cache_salt, request.adapter)
        # A seed drawn here is kept, so that a preempted sequence draws the same tokens again.
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        eos = () if params.ignore_eos else request.eos_token_ids
        others = params
        if params.n > 1:
            # The first sample reports the prompt for all; to generate none is no error for others.
            others = params.replace(prompt_logprobs=None, max_tokens=params.max_tokens or None)
        sequences: list[Sequence] = []
        for index in range(params.n):
            sequences.append(
                Sequence(
                    key=request.key + index,
                    index=index,
                    request=request,
                    params=params if index == 0 else others,
                    view=view,
                    order=(sort_key, view.arrival, index),
                    token_ids=prompt,
                    limit=len(prompt) + request.max_tokens,
                    seed=_wrap(seed + index),
                    blocks=self._cache.new_sequence(root, request.media),
                    stop_token_ids=(*eos, *params.stop_token_ids),
                    parent=sequences[0] if sequences else None,
                )
            )
        return sequences


def _wrap(seed: int) -> int:
    """Into the range of int64, so that streams of ``seed + i`` exist for every seed."""
    return (seed + 2**63) % 2**64 - 2**63
