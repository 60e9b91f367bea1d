"""Runs the prompts of one HTTP request on the engine, as one stream of outputs."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from cardan.core.engine.serving import ServingEngine
from cardan.core.types.errors import (
    EngineAsleepError,
    EngineDeadError,
    InputError,
    QueueFullError,
    RequestFailedError,
)
from cardan.core.types.outputs import RequestOutput
from cardan.core.types.prompt import Prompt, TokenPrompt
from cardan.core.types.sampling_params import SamplingParams
from cardan.server.metrics import ServerMetrics
from cardan.server.protocol.generation import GenerationRequest
from cardan.server.recorder import RequestRecorder

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
_MAX_QUEUED = 256


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """Prompts that share their settings."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


async def resolve_prompts(
    engine: ServingEngine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    request: GenerationRequest,
) -> list[Prompt]:
    """The prompts, tokenized ahead where needed.

    Of several prompts a bad one must fail the request before any of them runs, and a cut on the
    right is made on the token ids.

    Raises:
        InputError: a prompt is unusable or leaves no room in the context.
    """
    cuts_right = request.truncate_prompt_tokens is not None and request.truncation_side == "right"
    if len(prompts) == 1 and not cuts_right:
        return list(prompts)
    limit = engine.info.max_model_len - (0 if params.max_tokens == 0 else 1)
    resolved: list[Prompt] = []
    for prompt in prompts:
        token_ids = await engine.encode(prompt, params)
        if cuts_right:
            token_ids = token_ids[: _cut_length(request, params, engine.info.max_model_len)]
        if len(token_ids) > limit:
            raise InputError(
                f"prompt {len(resolved)} has {len(token_ids)} tokens; with room for an answer at "
                f"most {limit} fit this model's context of {engine.info.max_model_len}",
                "prompt",
            )
        resolved.append(TokenPrompt(token_ids=token_ids))
    return resolved


async def run_job(
    engine: ServingEngine, job: GenerationJob, metrics: ServerMetrics, request_id: str
) -> Outputs:
    """Outputs of all prompts as they come, each with the index of its prompt.

    A single prompt runs as ``request_id``; of several each has its index added, after a space.
    Closing the generator aborts what still runs.

    Raises:
        InputError, QueueFullError, RequestFailedError, EngineDeadError: as the engine says; the
            other prompts are aborted.
    """
    if len(job.prompts) == 1:
        async with aclosing(_run_prompt(engine, job, 0, metrics, request_id)) as outputs:
            async for output in outputs:
                yield 0, output
        return
    # Bounded, so that a slow reader holds the prompts back rather than filling memory.
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(_MAX_QUEUED)

    async def pump(index: int) -> None:
        try:
            prompt_id = f"{request_id} {index}"
            async with aclosing(_run_prompt(engine, job, index, metrics, prompt_id)) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(pump(index)) for index in range(len(job.prompts))]
    try:
        num_running = len(tasks)
        while num_running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_prompt(
    engine: ServingEngine, job: GenerationJob, index: int, metrics: ServerMetrics, request_id: str
) -> AsyncGenerator[RequestOutput, None]:
    recorder = RequestRecorder(metrics, job.params)
    outputs = engine.generate(
        job.prompts[index],
        job.params,
        request_id=request_id,
        priority=job.priority,
        cache_salt=job.cache_salt,
    )
    has_begun = False
    try:
        async for output in outputs:
            has_begun = True
            _check_pieces(output)
            recorder.observe(output)
            yield output
    except InputError:
        # Else it was never admitted, or its settings leave not even a first token.
        if has_begun:
            recorder.finish("error")
        raise
    except QueueFullError:
        metrics.rejections.add()
        raise
    except EngineAsleepError:
        raise  # it was never admitted
    except (RequestFailedError, EngineDeadError):
        recorder.finish("error")
        raise
    except BaseException as error:
        # Cancelled or closed by whoever reads, or a defect.
        recorder.finish("error" if isinstance(error, Exception) else "abort")
        raise
    else:
        recorder.finish()
    finally:
        close = getattr(outputs, "aclose", None)
        if close is not None:
            await close()


def _check_pieces(output: RequestOutput) -> None:
    for piece in output.outputs:
        if piece.finish_reason == "error":
            raise RequestFailedError("the model could not compute this request")


def _cut_length(request: GenerationRequest, params: SamplingParams, max_model_len: int) -> int:
    asked = request.truncate_prompt_tokens or -1
    return asked if asked > 0 else max(1, max_model_len - (params.max_tokens or 1))
