"""Request bodies from a grammar: mostly almost right, which is where checks are wrong."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Value = Callable[[random.Random], Any]


class Raw(str):
    """JSON text that goes into a body as it is, right or wrong."""


@dataclass(frozen=True)
class Case:
    path: str
    body: bytes
    content_type: str


TEXTS = [
    "", " ", "a", "Hello", "\n", "\x00", "\x1b[31m", "é", "日本語", "👩‍👩‍👧", "\u202e", "\ufeff",
    "\uffff",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "{{ 7*7 }}", "{% for x in y %}",
    "../../etc/passwd",
    "' OR 1=1", "null", "NaN", "true", "1", "\U0010ffff", "\U000f0000", "%s%n", "a" * 300,
]  # fmt: skip
INTEGERS = [
    0, 1, -1, 2, 3, 5, 19, 20, 21, 49151, 49152, 49153, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53,
    2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**30,
]  # fmt: skip
FLOATS = [
    0.0, -0.0, 0.5, 1.0, 1.0000001, 2.0, 2.0000001, -0.1, 1e-10, 5e-324, 1e308, -1e308, 5.0, 1e15,
    0.1 + 0.2,
]  # fmt: skip
STRANGE = [
    Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e400"), Raw("-1e400"),
    Raw("1" + "0" * 400),
    Raw("0x10"), Raw("01"), Raw("+1"), Raw(".5"), Raw("1."), Raw("1e"), Raw("-"), Raw("'a'"),
    Raw(""),
    Raw('"\\ud800"'), Raw('"\\udc00\\ud800"'), Raw('"\\u0000"'), Raw('"\\x41"'), Raw('"\t"'),
    Raw('"\\'), Raw("[1,]"), Raw('{"a":1,}'), Raw("undefined"), Raw("/* */1"),
    Raw("[" * 50 + "]" * 50),
    Raw("[" * 300 + "]" * 300), Raw('{"a":' * 300 + "1" + "}" * 300),
]  # fmt: skip


NOT_UTF8 = [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5"]


def pick(*values: Any) -> Value:
    return lambda rng: rng.choice(values)


def text(rng: random.Random) -> str:
    return rng.choice(TEXTS)


def anything(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9)
    if kind == 0:
        return None
    if kind == 1:
        return rng.random() < 0.5
    if kind == 2:
        return rng.choice(INTEGERS)
    if kind == 3:
        return rng.choice(FLOATS)
    if kind == 4:
        return rng.choice(STRANGE)
    if kind in (5, 6) or depth > 3:
        return text(rng)
    items = [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return items
    return {text(rng): item for item in items}


def many(item: Value, *counts: int) -> Value:
    return lambda rng: [item(rng) for _ in range(rng.choice(counts))]


def either(*values: Value) -> Value:
    return lambda rng: rng.choice(values)(rng)


token_id = either(lambda rng: rng.randrange(49152), pick(*INTEGERS))
some_ids = many(lambda rng: rng.randrange(49152), 1, 1, 2, 5, 40)


def bias(rng: random.Random) -> Any:
    names = [0, 1, 49151, 49152, -1, 2**31, "x", "", "٣", "1.5", rng.randrange(49152)]
    keys = [str(rng.choice(names)) for _ in range(rng.choice([0, 1, 1, 3, 400]))]
    return {key: rng.choice([0, 1, -100, 100, 101, -1e9, 1e308, 0.5]) for key in keys}


def part(rng: random.Random) -> Any:
    kind = rng.choice(
        ["text", "text", "text", "input_text", "refusal", "thinking", "image_url", "", 5]
    )
    member = rng.choice(["text", "text", "refusal", "thinking", "image_url"])
    return {"type": kind, member: either(text, text, anything)(rng)}


def message(rng: random.Random) -> Any:
    found: dict[str, Any] = {
        "role": rng.choice(
            [
                "user",
                "user",
                "user",
                "system",
                "assistant",
                "tool",
                "developer",
                "function",
                "",
                "robot",
            ]
        ),
        "content": either(text, text, text, many(part, 0, 1, 2, 50), anything)(rng),
    }
    if rng.random() < 0.15:
        name = rng.choice(["name", "tool_calls", "tool_call_id", "reasoning", "refusal", "content"])
        found[name] = either(anything, many(tool_call, 0, 1, 2))(rng)
    if rng.random() < 0.05:
        del found[rng.choice(list(found))]
    return found


def tool_call(rng: random.Random) -> Any:
    arguments = either(pick("{}", '{"a": 1}', "{", "[]", '{"a": NaN}', "[" * 5000), anything)(rng)
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


COMMON: dict[str, Value] = {
    "model": pick("nobody", "", "x" * 5000, None),
    "stream": pick(True, True, False, "true", 1, None),
    "stream_options": either(
        pick({}, {"include_usage": True}, {"include_usage": None}, {"x": 1}, None), anything
    ),
    "n": pick(1, 2, 3, 17, 0, -1, 1025, 10**9, 2**70, 1.0, 1.5, True),
    "temperature": pick(0, 0.7, 1, 2, 2.1, -1, 1e-300, 5e-324, "hot"),
    "top_p": pick(1, 0.5, 1e-12, 5e-324, 0, 1.1, -0.0),
    "top_k": pick(-1, 0, 1, 5, 10**9, 2**70, -2, 3.0),
    "min_p": pick(0, 0.5, 1, 1.1, 1e-300),
    "repetition_penalty": pick(1, 1.5, 1e-300, 1e-5, 100, 101, 0, 1e308),
    "presence_penalty": pick(0, 2, -2, 2.01, 1e308),
    "frequency_penalty": pick(0, 2, -2, -2.01),
    "seed": pick(0, 1, -1, 2**63 - 1, -(2**63), 2**63, 1.0, 1e18, "a"),
    "logit_bias": either(bias, bias, anything),
    "allowed_token_ids": either(
        some_ids, many(token_id, 0, 1, 3), pick(list(range(2000)), [2], [0, 2])
    ),
    "bad_words": either(many(text, 0, 1, 3), text, pick(["a"] * 2000)),
    "stop": either(text, many(text, 0, 1, 4, 65), pick("a" * 5000, ["inkel"])),
    "stop_token_ids": either(some_ids, many(token_id, 0, 1, 3), pick(list(range(300)))),
    "include_stop_str_in_output": pick(True, False, 1),
    "ignore_eos": pick(True, False, "no"),
    "max_tokens": pick(1, 2, 3, 8, 0, -1, 127, 128, 10**9, 2**70, 2.0, 2.5),
    "min_tokens": pick(0, 1, 2, 3, 9, -1, 10**9, 2**70),
    "skip_special_tokens": pick(True, False),
    "spaces_between_special_tokens": pick(True, False, 0),
    "truncate_prompt_tokens": pick(-1, 0, 1, 5, 127, 128, 10**9, 2**70, -2),
    "truncation_side": pick("left", "right", "middle", 1),
    "echo": pick(True, False, "yes"),
    "prompt_logprobs": pick(0, 1, 20, 21, -1, True, 2**70),
    "return_token_ids": pick(True, False),
    "return_tokens_as_token_ids": pick(True, False),
    "priority": pick(0, 5, -5, 2**63 - 1, -(2**63), 2**63, 1.5),
    "request_id": either(pick("abc", "abc", "a b", "x" * 129, "a\r\nX: 1"), text),
    "cache_salt": either(pick("salt", "a@b", "x" * 129), text),
    "stream_interval": pick(1, 2, 10**9, 0, 2**70),
    "user": either(text, anything),
    "metadata": anything,
    "response_format": either(pick({"type": "text"}, {"type": "json_object"}), anything),
    "tools": either(pick([], None, [{}]), anything),
    "best_of": pick(1, 2, 0, True),
    "guided_json": anything,
    "chat_template": text,
    "kv_transfer_params": anything,
}
COMPLETION: dict[str, Value] = {
    **COMMON,
    "prompt": either(
        text, text, some_ids, many(text, 0, 1, 3), many(some_ids, 1, 3), many(token_id, 1, 3),
        anything, pick("word " * 100, "word " * 1200, ["a"] * 2049, [[]], [[1], "a"], ["a", 1]),
        pick(list(range(127)), [True]),
    ),
    "logprobs": pick(0, 1, 5, 20, 21, -1, True, 2**70),
    "add_special_tokens": pick(True, False),
    "suffix": either(text, anything),
}  # fmt: skip
CHAT: dict[str, Value] = {
    **COMMON,
    "messages": either(many(message, 0, 1, 2, 3), many(message, 1), many(message, 40), anything),
    "max_completion_tokens": pick(1, 2, 0, 10**9, 2**70, None),
    "logprobs": pick(True, False, 1, 5),
    "top_logprobs": pick(0, 1, 20, 21, -1, 2**70),
    "add_generation_prompt": pick(True, False),
    "continue_final_message": pick(True, False),
    "add_special_tokens": pick(True, False),
    "documents": either(pick([], [{}]), anything),
    "chat_template_kwargs": either(pick({}, {"messages": 1}, {"enable_thinking": True}), anything),
    "return_prompt_text": pick(True, False),
}
TOKENIZE: dict[str, Value] = {
    "model": COMMON["model"],
    "prompt": either(text, text, anything, pick("word " * 5000)),
    "messages": CHAT["messages"],
    "tools": either(pick([], [{"type": "function", "function": {"name": "f"}}]), anything),
    "documents": CHAT["documents"],
    "add_special_tokens": pick(True, False),
    "add_generation_prompt": pick(True, False),
    "continue_final_message": pick(True, False),
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "return_token_strs": pick(True, False),
}
DETOKENIZE: dict[str, Value] = {
    "model": COMMON["model"],
    "tokens": either(
        some_ids, some_ids, many(token_id, 0, 1, 5), anything, pick(list(range(5000)))
    ),
}
CONTENT = "application/json"
ROUTES: dict[str, tuple[dict[str, Value], dict[str, Any]]] = {
    "/v1/completions": (COMPLETION, {"prompt": "Hi", "max_tokens": 2}),
    "/v1/chat/completions": (
        CHAT,
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    ),
    "/tokenize": (TOKENIZE, {"prompt": "Hi"}),
    "/detokenize": (DETOKENIZE, {"tokens": [1, 2, 3]}),
}


def make_case(rng: random.Random) -> Case:
    """A request that generates little if it generates at all."""
    path = rng.choices(list(ROUTES), (5, 5, 2, 1))[0]
    grammar, base = ROUTES[path]
    fields = dict(base)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3, 4, 6])):
        name = rng.choice(list(grammar))
        fields[name] = (anything if rng.random() < 0.12 else grammar[name])(rng)
    if rng.random() < 0.1:
        fields[text(rng)] = anything(rng)
    if rng.random() < 0.05:
        del fields[rng.choice(list(fields))]
    body = write(fields).encode("utf-8", "surrogatepass")
    content_type = CONTENT
    if rng.random() < 0.1:
        body = spoil(rng, body)
    if rng.random() < 0.03:
        content_type = rng.choice(
            [
                "",
                "text/json",
                "application/json; charset=utf-16",
                "application/x+json",
                "a" * 500,
                ";",
            ]
        )
    return Case(path, body, content_type)


def write(value: Any) -> str:
    """JSON in which `Raw` text stands as it is."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{write(value[key])}" for key in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def spoil(rng: random.Random, body: bytes) -> bytes:
    """The body broken as bytes."""
    place = rng.randrange(len(body) + 1)
    spoiled: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: body[:place],
        lambda: body[:place] + bytes([rng.randrange(256)]) + body[place:],
        lambda: body[:place] + rng.choice(NOT_UTF8) + body[place:],
        lambda: body + rng.choice([b"}", b" ", b"{}", b"\x00", b"\n\n", b",", body]),
        lambda: b"\xef\xbb\xbf" + body,
        lambda: body.decode("utf-8", "replace").encode(rng.choice(["utf-16", "utf-32", "utf-7"])),
        lambda: b"[" + body + b"]",
        lambda: body[:-1] + b"," + body[1:],  # every member twice
        lambda: rng.choice([b"null", b"1", b'"a"', b"[]", b"{}", b"true"]),
        lambda: rng.randbytes(200),
        lambda: b'{"a":' * 100_000,
        lambda: body[:-1] + b"".join(b',"x%d":1' % n for n in range(2000)) + b"}",
        lambda: body[:-1] + b',"y":"' + b"z" * 1_000_000 + b'"}',
    ]  # fmt: skip
    return rng.choice(spoiled)()
