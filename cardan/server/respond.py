"""Runs a checked request and sends its answer, as a stream or whole."""

import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from cardan.core.types.prompt import Prompt
from cardan.core.types.sampling_params import SamplingParams
from cardan.server.answer import AnswerHead, AnswerWriter, Outputs, stream_answer, whole_answer
from cardan.server.context import ServerContext
from cardan.server.errors import JsonResponse
from cardan.server.generation import GenerationJob, resolve_prompts, run_job
from cardan.server.middleware import REQUEST_ID_HEADER
from cardan.server.protocol.fields import StreamOptions, header_safe
from cardan.server.protocol.generation import GenerationRequest
from cardan.server.sse import EventStream
from cardan.server.usage import UsageCounter

logger = logging.getLogger(__name__)

IGNORED_HEADER = "X-Cardan-Ignored-Fields"
_MAX_IGNORED = 32


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """A checked request: what to run and how to write the answer. ``kind`` begins its id."""

    kind: str
    body: GenerationRequest
    prompts: Sequence[Prompt]
    params: SamplingParams
    writer: AnswerWriter


async def respond(context: ServerContext, request: Request, plan: AnswerPlan) -> Response:
    """The answer to ``request``, whose body has been read."""
    body = plan.body
    request_id = _settle_request_id(request, body)
    head = AnswerHead(
        id=f"{plan.kind}-{request_id}",
        created=int(time.time()),
        model=context.model_names[0],
        system_fingerprint=context.system_fingerprint,
    )
    usage = UsageCounter()
    active = context.tracker.track(head.id)
    if body.stream:
        options = body.stream_options or StreamOptions()
        return EventStream(
            lambda engine_id: stream_answer(
                _outputs(context, plan, usage, engine_id), plan.writer, head, options, usage
            ),
            active,
            _ignored_header(body),
        )
    with active as tracked:
        outputs = _outputs(context, plan, usage, tracked.engine_id)
        work = whole_answer(outputs, plan.writer, head, usage)
        answer = await tracked.run(work, request.receive)
    return JsonResponse(answer, headers=_ignored_header(body))


async def _outputs(
    context: ServerContext, plan: AnswerPlan, usage: UsageCounter, engine_id: str
) -> Outputs:
    start = time.monotonic()
    body, params = plan.body, plan.params
    try:
        prompts = await resolve_prompts(context.engine, plan.prompts, params, body)
        job = GenerationJob(prompts, params, body.priority, body.cache_salt)
        async with aclosing(run_job(context.engine, job, context.metrics, engine_id)) as outputs:
            async for prompt_index, output in outputs:
                usage.update(prompt_index, output)
                yield prompt_index, output
    finally:
        if context.config.enable_log_requests:
            _log(plan, usage, engine_id, time.monotonic() - start)


def _settle_request_id(request: Request, body: GenerationRequest) -> str:
    """The header's id, else the body's, else the one that the edge made up."""
    is_from_header = request.headers.get(REQUEST_ID_HEADER) == request.state.request_id
    if body.request_id is not None and not is_from_header:
        request.state.request_id = body.request_id
    return str(request.state.request_id)


def _ignored_header(body: GenerationRequest) -> dict[str, str]:
    names = body.ignored_fields()
    shown = ", ".join(header_safe(name) for name in names[:_MAX_IGNORED])
    return {IGNORED_HEADER: shown} if names else {}


def _log(plan: AnswerPlan, usage: UsageCounter, engine_id: str, seconds: float) -> None:
    """One line of sizes and settings, never of text."""
    settings = " ".join(f"{name}={value}" for name, value in plan.body.logged_settings().items())
    logger.info(
        "%d prompts, %d tokens (%d cached) -> %d tokens in %.3f s; %s",
        len(plan.prompts),
        usage.num_prompt_tokens,
        usage.num_cached_tokens,
        usage.num_output_tokens,
        seconds,
        settings or "default settings",
        extra={"request_id": engine_id},
    )
