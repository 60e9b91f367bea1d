"""The tokenizer of a Hugging Face model directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from cardan.core.text.errors import TextError
from cardan.core.text.tokenizer import Tokenizer
from cardan.core.types.errors import shown

_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Transformers writes 1e30 for "no limit".
_NO_MAX_LENGTH = 10**15
# Far above what any such side file or vocabulary has.
_MOST_BYTES = 128 << 20
_MOST_IDS = 1 << 31


def load_tokenizer(
    directory: Path, generation_config: Mapping[str, Any] | None = None
) -> Tokenizer:
    """Load the tokenizer of a model directory, with the ids that transformers gives.

    ``tokenizer.json`` decides how text is cut and which tokens go around it (as in transformers,
    ``add_bos_token`` in ``tokenizer_config.json`` has no say when that file exists);
    ``tokenizer_config.json``, ``special_tokens_map.json`` and ``added_tokens.json`` add tokens that
    it lacks and name their roles.

    Args:
        directory: the model's files.
        generation_config: its ``eos_token_id`` (int or list) ends generations; None reads
            ``generation_config.json``. Without either the one of ``config.json`` counts.

    Raises:
        TextError: a file is missing or malformed.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TextError(_missing_message(directory))
    backend = _read_backend(path)
    config = _read_json(directory / "tokenizer_config.json")
    roles = dict(config)
    if "added_tokens_decoder" not in config:
        roles.update(_read_json(directory / "special_tokens_map.json"))
    special_tokens = _special_tokens(roles)
    _add_tokens(backend, directory, config, roles)
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_token_ids=_eos_token_ids(directory, generation_config),
        chat_templates=_chat_templates(directory, config),
        max_length=_max_length(config),
    )


def _read_backend(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # The library raises bare Exception for a malformed file.
        reason = " ".join(str(error).split())
    except BaseException as error:  # A panic of the library is no Exception.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        reason = f"the tokenizers library gave up on it ({shown(str(error))})"
    raise TextError(f"{path} is no valid tokenizer file: {reason}")


def _missing_message(directory: Path) -> str:
    message = f"{directory} holds no tokenizer.json"
    if any((directory / name).is_file() for name in ("tokenizer.model", "spiece.model")):
        message += (
            ", only a SentencePiece model; convert it once with transformers: "
            f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
        )
    else:
        message += "; give a directory with the model's tokenizer files"
    return message


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file."""
    text = _read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TextError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TextError(f"{path} holds a {type(value).__name__}; it must hold an object")
    return value


def _read_text(path: Path) -> str | None:
    """The text of a file; None if there is no such regular file."""
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > _MOST_BYTES:
            raise TextError(f"{path} is larger than {_MOST_BYTES} bytes; download it again")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is no valid UTF-8 at byte {error.start}") from error


def _text_of(value: object) -> str | None:
    """The text of a token that is given as a string or as an object with its flags."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(roles: Mapping[str, Any]) -> dict[str, str]:
    """Role to text: the usual roles and any further ``*_token`` of the model."""
    found: dict[str, str] = {}
    for role in (*_ROLES, *(key for key in roles if key.endswith("_token"))):
        text = _text_of(roles.get(role))
        if text is not None:
            found[role] = text
    extra = roles.get("extra_special_tokens")
    if isinstance(extra, Mapping):
        found.update({key: text for key, value in extra.items() if (text := _text_of(value))})
    return found


def _add_tokens(
    backend: Backend, directory: Path, config: Mapping[str, Any], roles: Mapping[str, Any]
) -> None:
    """Add the tokens that the side files name and ``tokenizer.json`` does not hold."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    special = _special_tokens(roles)
    named = list(special.values())
    extra = roles.get("extra_special_tokens") or roles.get("additional_special_tokens")
    if isinstance(extra, list):
        named.extend(text for value in extra if (text := _text_of(value)) is not None)
    tokens: dict[str, AddedToken] = {}
    if "added_tokens_decoder" in config:
        for flags in _added_entries(directory, config["added_tokens_decoder"]):
            tokens[flags["content"]] = _added_token(flags, flags["content"] in named)
    else:
        for text in _older_entries(directory / "added_tokens.json"):
            tokens[text] = AddedToken(text, special=text in named, normalized=text not in named)
    flags_of = {text: value for value in roles.values() if (text := _text_of(value)) is not None}
    for text in named:
        value = flags_of.get(text)
        flags = value if isinstance(value, Mapping) else {"content": text}
        tokens.setdefault(text, _added_token(flags, True))
    missing = [token for text, token in tokens.items() if text and text not in known]
    backend.add_tokens(missing)


def _added_entries(directory: Path, value: object) -> list[Mapping[str, Any]]:
    """The entries of ``added_tokens_decoder`` (id to flags), by id."""
    entries: list[tuple[int, Mapping[str, Any]]] = []
    for key, flags in value.items() if isinstance(value, Mapping) else [("", value)]:
        if not (str(key).isdecimal() and isinstance(flags, Mapping) and _text_of(flags)):
            raise TextError(
                f"{directory / 'tokenizer_config.json'}: 'added_tokens_decoder' must map ids to "
                f"objects with a 'content', has {shown(key)}: {shown(flags)}"
            )
        entries.append((int(key), flags))
    return [flags for _, flags in sorted(entries, key=lambda entry: entry[0])]


def _older_entries(path: Path) -> list[str]:
    """The tokens of ``added_tokens.json`` (text to id), by id."""
    entries = _read_json(path)
    for text, token_id in entries.items():
        if not isinstance(token_id, int):
            raise TextError(f"{path}: the id of {shown(text)} is {shown(token_id)}, no integer")
    return sorted(entries, key=lambda text: int(entries[text]))


def _added_token(flags: Mapping[str, Any], special: bool) -> AddedToken:
    special = special or bool(flags.get("special", False))
    return AddedToken(
        flags["content"],
        lstrip=bool(flags.get("lstrip", False)),
        rstrip=bool(flags.get("rstrip", False)),
        single_word=bool(flags.get("single_word", False)),
        normalized=bool(flags.get("normalized", not special)),
        special=special,
    )


def _eos_token_ids(directory: Path, generation_config: Mapping[str, Any] | None) -> frozenset[int]:
    if generation_config is None:
        generation_config = _read_json(directory / "generation_config.json")
    value = generation_config.get("eos_token_id")
    where = "generation_config"
    if value is None:
        value = _read_json(directory / "config.json").get("eos_token_id")
        where = "config.json"
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list | tuple) else [value]
    for token_id in ids:
        is_integer = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_integer or not 0 <= token_id < _MOST_IDS:
            raise TextError(
                f"eos_token_id in {where} is {shown(value)}; it must be a token id or a list of "
                "them"
            )
    return frozenset(ids)


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: files first, then ``tokenizer_config.json``."""
    templates: dict[str, str] = {}
    main = _read_text(directory / "chat_template.jinja")
    if main is not None:
        templates["default"] = main
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        text = _read_text(path)
        if text is not None:
            templates[path.stem] = text
    if templates:
        return templates
    value = _read_json(directory / "chat_template.json").get("chat_template")
    if value is None:
        value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, Mapping):
        return {str(name): source for name, source in value.items() if isinstance(source, str)}
    if isinstance(value, list):
        return {name: source for name, source in map(_named_template, value)}
    return {}


def _named_template(entry: object) -> tuple[str, str]:
    fields = entry if isinstance(entry, Mapping) else {}
    name, source = fields.get("name"), fields.get("template")
    if not isinstance(name, str) or not isinstance(source, str):
        raise TextError(
            f"chat_template: {shown(entry)} must be an object with the strings 'name' and "
            "'template'"
        )
    return name, source


def _max_length(config: Mapping[str, Any]) -> int | None:
    value = config.get("model_max_length", config.get("max_len"))
    if not isinstance(value, int | float) or not 0 < value < _NO_MAX_LENGTH:
        return None
    return int(value)
