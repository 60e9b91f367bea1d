"""Chat templates: messages to prompt text, as Hugging Face models define it in Jinja.

The template comes with the model and is untrusted: it runs in a sandbox, sees plain data only, and
whatever goes wrong inside it is a `TextError` of the request.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cardan.core.text.errors import TextError

MAX_PROMPT_CHARS = 32 * 1024 * 1024
_MAX_POWER_BITS = 4096
# Stands in the final message while it is rendered; the trailing space tells whether the template
# trims messages.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# Names under which clients send a message's reasoning, most current first.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One compiled chat template; rendering is safe from several threads."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        max_chars: int = MAX_PROMPT_CHARS,
    ) -> None:
        """Compile `source`.

        Args:
            source: the Jinja text.
            special_tokens: variables such as ``bos_token``; arguments of `render` go before them.
            max_chars: most characters that a prompt may have.

        Raises:
            TextError: the template has a syntax error.
        """
        self._source = source
        self._special_tokens = MappingProxyType(dict(special_tokens))
        self._max_chars = max_chars
        try:
            self._template = _environment(max_chars).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TextError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}"
            ) from error
        except (RecursionError, SyntaxError, MemoryError) as error:
            raise TextError(f"the chat template cannot be compiled: {error}") from error

    @property
    def source(self) -> str:
        """The Jinja text."""
        return self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation, equal to transformers' ``apply_chat_template``.

        Args:
            messages: plain data, one mapping a message; a key whose value is None counts as absent.
            tools: JSON schemas of functions.
            documents: mappings for retrieval templates.
            add_generation_prompt: end with the header of a new assistant message.
            continue_final_message: end inside the last message, so that the model goes on with it;
                needs `add_generation_prompt` off.
            **kwargs: further template variables.

        Raises:
            TextError: bad arguments, or the template failed, refused or wrote too much.
        """
        if continue_final_message and add_generation_prompt:
            raise TextError(
                "continue_final_message and add_generation_prompt exclude each other; "
                "set add_generation_prompt to false"
            )
        chat = _plain_messages(messages)
        final_text = self._tag_final_message(chat) if continue_final_message else None
        variables = {
            **self._special_tokens,
            **{name: _plain(value, name) for name, value in kwargs.items()},
            "messages": chat,
            "tools": _plain_objects(tools, "tools"),
            "documents": _plain_objects(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(variables)
        return text if final_text is None else _cut_at_tag(text, final_text)

    def _run(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                length += len(piece)
                if length > self._max_chars:
                    raise TextError(
                        f"the chat template wrote more than {self._max_chars} characters; "
                        "send fewer or shorter messages"
                    )
                pieces.append(piece)
        except TextError:
            raise
        except jinja2.TemplateError as error:
            raise TextError(f"the chat template failed: {error.message or error}") from error
        except Exception as error:  # Untrusted code: whatever it raises is a fault of the input.
            detail = f"{type(error).__name__}: {error}"
            raise TextError(f"the chat template failed: {detail}") from error
        return "".join(pieces)

    def _tag_final_message(self, chat: list[dict[str, Any]]) -> str:
        """Append the tag to the last message's text and return that text."""
        final = chat[-1]
        content = final.get("content")
        if content is None:
            raise TextError("continue_final_message: the final message has no content to continue")
        if "content" not in self._source:
            raise TextError("continue_final_message: the chat template does not read the content")
        if isinstance(content, str):
            final["content"] = content + _CONTINUE_TAG
            return content
        blocks = content if isinstance(content, list | tuple) else []
        for block in reversed(blocks):
            if isinstance(block, dict) and isinstance(block.get("text"), str):
                text = str(block["text"])
                block["text"] = text + _CONTINUE_TAG
                return text
        raise TextError("continue_final_message: the final message has no text to continue")


def _cut_at_tag(text: str, final_text: str) -> str:
    tag = _CONTINUE_TAG.strip()
    start = text.rfind(tag)
    if start < 0 or final_text.strip() not in text:
        raise TextError(
            "continue_final_message: the final message is not in the rendered prompt; this chat "
            "template drops or rewrites it"
        )
    if text.startswith(_CONTINUE_TAG, start):
        return text[:start]
    # The template trims messages, so the text before the tag has to lose its spaces too.
    return text[:start].rstrip()


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A fresh plain copy of the messages: absent keys dropped, reasoning under all its names."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TextError("messages must be a list of objects")
    if not messages:
        raise TextError("messages is empty; give at least one message")
    chat = []
    for message in _plain_objects(messages, "messages") or []:
        kept = {key: value for key, value in message.items() if value is not None}
        reasoning = next((kept[key] for key in _REASONING_FIELDS if key in kept), None)
        if reasoning is not None:
            kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
        chat.append(kept)
    return chat


def _plain_objects(
    values: Iterable[Mapping[str, Any]] | None, where: str
) -> list[dict[str, Any]] | None:
    if values is None:
        return None
    result = []
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise TextError(f"{where}[{index}] is a {type(value).__name__}; give an object")
        result.append(_plain(value, f"{where}[{index}]"))
    return result


def _plain(value: object, where: str) -> Any:
    """Rebuild a value from exact JSON types: no object of ours is in reach of the template."""
    try:
        return _rebuild(value, where)
    except RecursionError as error:
        raise TextError(f"{where} is nested too deep") from error


def _rebuild(value: object, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {str(key): _rebuild(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rebuild(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TextError(
        f"{where} is a {type(value).__name__}; a chat template takes strings, numbers, booleans, "
        "lists and objects only"
    )


class _GenerationExtension(Extension):
    """Accepts ``{% generation %}``, which marks assistant text for training and changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse to a scope of its own that writes its body."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        scope: nodes.Node = nodes.CallBlock(self.call_method("_write"), [], [], body)
        return scope.set_lineno(lineno)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` is taken from the arguments so that a template may store that name.
        jinja2.utils.Namespace.__init__(*args, **kwargs)
        for name in dict(*args[1:], **kwargs):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """``dict`` for templates: it makes dictionaries and has no other attribute."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a bound on what one operator may make."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, max_chars: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationExtension, "jinja2.ext.loopcontrols"],
        )
        self._max_chars = max_chars

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Refuse to repeat a text or raise a number beyond all need."""
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(repeated, str | list | tuple) and isinstance(times, int):
                    self._check_size(len(repeated) * times)
        elif isinstance(left, int) and isinstance(right, int):
            self._check_power(left, right)
        return super().call_binop(context, operator, left, right)

    def _check_size(self, size: int) -> None:
        if size > self._max_chars:
            raise SecurityError("the result of * is too large")

    def _check_power(self, base: int, exponent: int) -> None:
        if base.bit_length() * exponent > _MAX_POWER_BITS:
            raise SecurityError("the result of ** is too large")


def _environment(max_chars: int) -> jinja2.Environment:
    environment = _Environment(max_chars)
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models have seen it in training: Jinja's own filter would escape HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
