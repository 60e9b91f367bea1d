"""Fields that must not be ignored: what they ask for is not there, so an answer would be wrong.

Constraints above all: a client that sent a schema and gets free text was lied to.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from cardan.core.types.errors import InputError

_NOT_YET = "is not supported yet; remove it"
_REMOVED = "is a removed field, and output constraints are not supported yet; remove it"
_UNTRUSTED = "is not accepted from requests: this server does not trust them with it"

# Field -> values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": (),
    "tool_choice": ("none",),
    "functions": (),
    "function_call": ("none",),
    "response_format": (),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "best_of": (1,),
    "length_penalty": (1, 0),
    "suffix": ("",),
    "prompt_embeds": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (-1,),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "watermarking": (False,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}
_FOREIGN_CONSTRAINTS = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object",
    "guided_decoding_backend", "guided_whitespace_pattern", "structural_tag", "json_schema",
    "regex", "ebnf", "grammar",
)  # fmt: skip
_FOR_TRUSTED = ("chat_template", "media_io_kwargs", "mm_processor_kwargs")
_CONSTRAINTS = ("response_format", "structured_outputs", "guided_decoding")


def drop_unsupported(fields: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """``fields`` without those that ask for nothing.

    Args:
        fields: members of the body that are not null.
        known: names that the body's own model reads; those are left alone.

    Raises:
        InputError: a field asks for what is not there, or is a misspelt constraint.
    """
    kept = {}
    for name, value in fields.items():
        if name in known:
            kept[name] = value
        elif name in _UNSUPPORTED:
            if not _asks_for_nothing(name, value):
                raise InputError(f"{name} {_NOT_YET}", name)
        else:
            _check_foreign(name)
            kept[name] = value
    return kept


def unsupported_properties() -> dict[str, dict[str, Any]]:
    """What ``drop_unsupported`` takes under these names, as JSON schemas: what asks for nothing.

    Names that begin with ``guided_`` are refused, too, and so are misspelt constraints, which no
    schema can say.
    """
    found: dict[str, dict[str, Any]] = {
        name: {"enum": [*harmless, None]} for name, harmless in _UNSUPPORTED.items()
    }
    plain = {"type": "object", "required": ["type"], "properties": {"type": {"const": "text"}}}
    found["response_format"] = {"anyOf": [plain, {"type": "null"}]}
    return found | {name: {"type": "null"} for name in (*_FOREIGN_CONSTRAINTS, *_FOR_TRUSTED)}


def _asks_for_nothing(name: str, value: Any) -> bool:
    if name == "response_format":
        return isinstance(value, Mapping) and value.get("type") == "text"
    return any(
        isinstance(value, bool) == isinstance(harmless, bool) and value == harmless
        for harmless in _UNSUPPORTED[name]
    )


def _check_foreign(name: str) -> None:
    if name in _FOREIGN_CONSTRAINTS or name.startswith("guided_"):
        raise InputError(f"{name} {_REMOVED}", name)
    if name in _FOR_TRUSTED:
        raise InputError(f"{name} {_UNTRUSTED}; remove it", name)
    near = get_close_matches(name[:64], _CONSTRAINTS, 1, cutoff=0.85)
    if near:
        raise InputError(f"{name} is not a field; did you mean {near[0]}?", name)
