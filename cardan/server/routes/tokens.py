"""Text to token ids and back, exactly as generation does it."""

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from cardan.core.types.errors import InputError
from cardan.core.types.prompt import ChatPrompt, Prompt, TextPrompt
from cardan.server.body import parse_body
from cardan.server.context import ServerContext
from cardan.server.errors import JsonResponse
from cardan.server.messages import read_messages
from cardan.server.protocol.tokens import DetokenizeRequest, TokenizeRequest


def tokens_router(context: ServerContext) -> APIRouter:
    """``/tokenize`` and ``/detokenize``."""
    router = APIRouter(tags=["tokens"])
    engine, max_bytes = context.engine, context.config.max_body_bytes

    @router.post("/tokenize", response_class=Response)
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or of a conversation in the model's chat template."""
        body = await parse_body(request, TokenizeRequest, max_bytes)
        context.check_model(body.model)
        ids = await engine.encode(_prompt(body, engine.tokenizer.chat_template))
        strings = None
        if body.return_token_strs:
            strings = [engine.tokenizer.token_string(token_id) for token_id in ids]
        return JsonResponse(
            {
                "count": len(ids),
                "max_model_len": engine.info.max_model_len,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    @router.post("/detokenize", response_class=Response)
    async def detokenize(request: Request) -> Response:
        """Text of token ids, special tokens included."""
        body = await parse_body(request, DetokenizeRequest, max_bytes)
        context.check_model(body.model)
        size = engine.tokenizer.vocab_size
        if any(token_id >= size for token_id in body.tokens):
            raise InputError(f"tokens must be below {size}, the size of the vocabulary", "tokens")
        text = await asyncio.to_thread(engine.tokenizer.decode, body.tokens, False)
        return JsonResponse({"prompt": text})

    return router


def _prompt(body: TokenizeRequest, template: str | None) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise InputError("give either prompt or messages", "prompt")
    if body.messages is None:
        return TextPrompt(
            text=body.prompt or "", add_special_tokens=body.add_special_tokens is not False
        )
    return ChatPrompt(
        messages=read_messages(body.messages, template),
        tools=body.tools,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens is True,
        template_kwargs=body.chat_template_kwargs,
    )
