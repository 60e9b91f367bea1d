"""A whole engine in this process, driven and looked at through its public front."""

import asyncio
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from cardan.bootstrap import open_client
from cardan.core.engine.async_engine import AsyncEngine
from cardan.core.types.outputs import EngineStats, RequestOutput
from cardan.core.types.prompt import TokenPrompt
from cardan.core.types.sampling_params import OutputKind, SamplingParams
from cardan.llm import config_from_settings

Request = tuple[Sequence[int], SamplingParams]
_Result = TypeVar("_Result")

# Seconds for a batch of tiny requests, and for an engine without work to settle and to close.
DEADLINE = 120.0
_SETTLE = 5.0


class EngineSession:
    """Opens an engine, runs batches, and closes it; a stuck engine is an error, not a hang.

    Raises:
        CardanError: the engine cannot be opened.
    """

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        self._client = open_client(config_from_settings(model, settings), in_process=True)
        self._runner = asyncio.Runner()
        self._engine = self._runner.run(self._make_engine())
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def block_size(self) -> int:
        return self._engine.info.block_size

    @property
    def features(self) -> tuple[str, ...]:
        """What the executor honours besides plain steps."""
        return self._engine.info.features

    def generate(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """All requests at once; final outputs in their order."""

        async def run() -> list[RequestOutput]:
            return await asyncio.gather(*(self._final(*request) for request in requests))

        return self._run(run())

    def abort_after(self, requests: Sequence[Request], num_tokens: int) -> list[RequestOutput]:
        """Start all, and abort each when it has ``num_tokens``; what each had at its end."""

        async def run() -> list[RequestOutput]:
            return await asyncio.gather(*(self._aborted(*r, num_tokens) for r in requests))

        return self._run(run())

    def leave_after(self, requests: Sequence[Request], num_tokens: int) -> None:
        """Start all, and walk away from each when it has ``num_tokens``."""

        async def leave(prompt: Sequence[int], params: SamplingParams) -> None:
            stream = self._stream(prompt, replace(params, output_kind=OutputKind.CUMULATIVE))
            async for output in stream:
                if output.num_output_tokens >= num_tokens:
                    break
            await stream.aclose()

        async def run() -> None:
            await asyncio.gather(*(leave(*request) for request in requests))

        self._run(run())

    def stats(self) -> EngineStats:
        """Newest gauges, and totals of the counters (a copy)."""
        self._run(asyncio.sleep(0))
        return replace(self._engine.stats())

    def left_when_idle(self) -> dict[str, float]:
        """What is not zero although nobody asks for anything; waits a while for it to settle."""

        async def settle() -> dict[str, float]:
            end = time.monotonic() + _SETTLE
            while (left := self._held()) and time.monotonic() < end:
                await asyncio.sleep(0.01)
            return left

        return self._run(settle())

    def reset_prefix_cache(self) -> None:
        self._run(self._engine.reset_prefix_cache())

    def close(self) -> None:
        """Stop the engine and free its memory. Idempotent.

        Raises:
            TimeoutError: the engine does not stop.
        """
        closer = threading.Thread(target=self._client.client.close, daemon=True)
        closer.start()
        closer.join(DEADLINE)
        self._runner.close()
        if closer.is_alive():
            raise TimeoutError(f"the engine did not close within {DEADLINE:g} s")

    async def _make_engine(self) -> AsyncEngine:
        opened = self._client
        return AsyncEngine(opened.client, opened.tokenizer, opened.preprocessor)

    def _held(self) -> dict[str, float]:
        stats = self._engine.stats()
        facts = {
            "unfinished sequences": self._engine.num_live,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "share of KV blocks in use": stats.kv_usage,
        }
        return {name: value for name, value in facts.items() if value}

    def _stream(self, prompt: Sequence[int], params: SamplingParams) -> Any:
        self._count += 1
        request_id = f"conformance-{self._count}"
        return self._engine.generate(
            TokenPrompt(token_ids=list(prompt)), params, request_id=request_id
        )

    async def _final(self, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
        last: RequestOutput | None = None
        async for output in self._stream(
            prompt, replace(params, output_kind=OutputKind.FINAL_ONLY)
        ):
            last = output
        if last is None:
            raise AssertionError("the engine ended a request without an output")
        return last

    async def _aborted(
        self, prompt: Sequence[int], params: SamplingParams, num_tokens: int
    ) -> RequestOutput:
        last: RequestOutput | None = None
        async for output in self._stream(
            prompt, replace(params, output_kind=OutputKind.CUMULATIVE)
        ):
            if output.num_output_tokens >= num_tokens:
                await self._engine.abort(output.request_id)
            last = output
        if last is None:
            raise AssertionError("the engine ended a request without an output")
        return last

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        async def in_time() -> _Result:
            return await asyncio.wait_for(work, DEADLINE)

        return self._runner.run(in_time())
