"""The two generating routes of the OpenAI API."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from cardan.core.types.errors import InputError
from cardan.core.types.prompt import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from cardan.server.body import parse_body
from cardan.server.chat_writer import ChatWriter
from cardan.server.completion_writer import CompletionWriter
from cardan.server.context import ServerContext
from cardan.server.messages import read_messages
from cardan.server.protocol.chat import ChatCompletionRequest
from cardan.server.protocol.completions import MAX_CHOICES, CompletionRequest
from cardan.server.respond import AnswerPlan, respond
from cardan.server.sampling import chat_params, completion_params
from cardan.server.tool_calls import tool_use


def completions_router(context: ServerContext) -> APIRouter:
    """``/v1/chat/completions`` and ``/v1/completions``."""
    router = APIRouter(tags=["generate"])
    engine, config = context.engine, context.config
    tokenizer = engine.tokenizer
    special = frozenset(tokenizer.token_string(item) for item in tokenizer.special_token_ids)

    @router.post("/v1/chat/completions", response_class=Response)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body = await parse_body(request, ChatCompletionRequest, config.max_body_bytes)
        context.check_model(body.model)
        tools = tool_use(body, context.tool_format, special)
        params = chat_params(body, engine.info, reads_calls=tools is not None)
        prompt = _chat_prompt(body, engine.tokenizer.chat_template, shows_tools=tools is not None)
        echo = _chat_echo(body, prompt, config.response_role)
        writer = ChatWriter(body, config.response_role, echo, engine.tokenizer, tools)
        return await respond(
            context, request, AnswerPlan("chatcmpl", body, [prompt], params, writer)
        )

    @router.post("/v1/completions", response_class=Response)
    async def completions(request: Request) -> Response:
        """Continue one text or several."""
        body = await parse_body(request, CompletionRequest, config.max_body_bytes)
        context.check_model(body.model)
        params = completion_params(body, engine.info)
        prompts = _text_prompts(body)
        writer = CompletionWriter(body, _echo_texts(body), engine.tokenizer)
        return await respond(context, request, AnswerPlan("cmpl", body, prompts, params, writer))

    return router


def _chat_prompt(
    body: ChatCompletionRequest, template: str | None, shows_tools: bool
) -> ChatPrompt:
    return ChatPrompt(
        tools=body.tools if shows_tools else None,
        messages=read_messages(body.messages, template),
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        template_kwargs=body.chat_template_kwargs,
    )


def _chat_echo(body: ChatCompletionRequest, prompt: ChatPrompt, role: str) -> str:
    """With ``echo`` an answer repeats the last message where that is the answerer's own."""
    last = prompt.messages[-1]
    return str(last["content"]) if body.echo and last["role"] == role else ""


def _text_prompts(body: CompletionRequest) -> list[Prompt]:
    num_choices = len(body.prompt) * body.n
    if num_choices > MAX_CHOICES:
        raise InputError(
            f"{len(body.prompt)} prompts with n={body.n} make {num_choices} answers, at most "
            f"{MAX_CHOICES} are allowed; send several requests",
            "prompt",
        )
    return [
        TextPrompt(text=item, add_special_tokens=body.add_special_tokens)
        if isinstance(item, str)
        else TokenPrompt(token_ids=item)
        for item in body.prompt
    ]


def _echo_texts(body: CompletionRequest) -> list[str | None]:
    """What to echo: a text as it came, unless it was cut or came as token ids."""
    is_cut = body.truncate_prompt_tokens is not None
    return [item if isinstance(item, str) and not is_cut else None for item in body.prompt]
