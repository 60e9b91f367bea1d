import datetime
import enum
import functools
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from cardan.core.text import ChatTemplate, TextError

FOLDER = Path(__file__).parent / "chat_templates"
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.jinja")}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather <now> & "then" in a città',
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "Where?"},
                    "days": {"type": "array", "items": {"type": "integer"}},
                    "more": {"type": "object", "additionalProperties": {"type": "number"}},
                },
                "required": ["place"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"place": "Zürich <b>", "days": [1, 2]}},
}
USER = {"role": "user", "content": "  Hello <there> & 'you' 日本 \n"}
REPLY = {"role": "assistant", "content": "Hi!  "}
MORE = {"role": "user", "content": "And then?\r\n\r\nOk"}
SYSTEM = {"role": "system", "content": " Be brief. "}
CONVERSATIONS = {
    "user": [USER],
    "turns": [USER, REPLY, MORE],
    "system": [SYSTEM, USER, REPLY, MORE],
    "open_reply": [USER, REPLY],
    "null_keys": [{**USER, "name": None, "tool_calls": None}, {**REPLY, "tool_calls": None}],
    "thinking": [
        USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4", "reasoning": None},
        MORE,
        {"role": "assistant", "content": "5", "reasoning": "sure?"},
    ],
    "tool_round": [
        SYSTEM,
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "12 °C", "tool_call_id": "call00001"},
        {"role": "tool", "content": "rain", "tool_call_id": "call00001"},
        REPLY,
        MORE,
    ],
    "blocks": [
        {"role": "system", "content": [{"type": "text", "text": "Look."}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " what? "}]},
    ],
    "odd_role": [USER, {"role": "critic", "content": "No."}],
    "same_role_twice": [SYSTEM, SYSTEM, USER, USER],
}


@pytest.fixture(scope="module")
def oracle():
    from transformers import PreTrainedTokenizerFast

    backend = Backend(
        models.BPE(
            vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
            merges=[],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


@functools.cache
def compiled(source):
    return ChatTemplate(source, SPECIAL)


def outcome(call):
    try:
        return call()
    except Exception as error:
        return type(error)


def compare(source, oracle, messages, **options):
    options.setdefault("add_generation_prompt", True)
    theirs = outcome(
        lambda: oracle.apply_chat_template(
            messages, chat_template=source, tokenize=False, **options
        )
    )
    ours = outcome(lambda: compiled(source).render(messages, **options))
    if isinstance(theirs, type):
        assert ours is TextError
        return False
    assert ours == theirs
    return True


def test_there_are_enough_templates():
    assert len(TEMPLATES) >= 25


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_text_equals_transformers(name, oracle):
    rendered = 0
    for messages in CONVERSATIONS.values():
        for tools in (None, TOOLS):
            for generate in (False, True):
                rendered += compare(
                    TEMPLATES[name], oracle, messages, tools=tools, add_generation_prompt=generate
                )
    assert rendered >= 8


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_ids_equal_transformers(name, oracle):
    from cardan.core.text import Tokenizer

    ours = Tokenizer(Backend.from_str(oracle.backend_tokenizer.to_str()), special_tokens=SPECIAL)
    text = compiled(TEMPLATES[name]).render([USER, REPLY, MORE])
    theirs = oracle.apply_chat_template(
        [USER, REPLY, MORE],
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert ours.encode(text, add_special_tokens=False) == theirs


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize(
    "content", ["Sure, ", "Sure:\n", " ", "", "  led", "<think>\nso", None, [], 5]
)
def test_continue_final_message_equals_transformers(name, content, oracle):
    messages = [USER, {"role": "assistant", "content": content}]
    compare(
        TEMPLATES[name],
        oracle,
        messages,
        add_generation_prompt=False,
        continue_final_message=True,
    )


def test_continue_final_message_in_blocks(oracle):
    final = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, {"type": "image"}]
    messages = [USER, {"role": "assistant", "content": final}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert compare(TEMPLATES["gemma3_blocks"], oracle, messages, **options)
    assert final[1]["text"] == "two"


def test_further_variables(oracle):
    source = TEMPLATES["qwen3_thinking"]
    assert compare(source, oracle, [USER], add_generation_prompt=True, enable_thinking=False)
    assert compare(source, oracle, [USER], add_generation_prompt=True, enable_thinking=True)
    assert compare(TEMPLATES["gemma"], oracle, [USER], add_generation_prompt=True, bos_token="B")
    documents = [{"title": "A", "text": "<b>&"}, {"title": "B", "text": "2"}]
    for source in (TEMPLATES["command_r_rag"], "{{ documents | tojson(indent=2) }}"):
        assert compare(source, oracle, [SYSTEM, USER], documents=documents)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}",
        "{{ messages | tojson(ensure_ascii=true, indent=1, sort_keys=true) }}",
        "{{ messages | tojson(separators=(',', ':')) }}",
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}"
        "{% if i > 4 %}{% break %}{% endif %}{% endfor %}",
        "{% set ns = namespace(a=1, self=2) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.self }}",
        "{{ dict(a=1).items() | list }}",
        "    {% if true %}\n  x\n    {% endif %}\n y",
        "{% generation %}a{{ missing }}{% endgeneration %}b",
        "{{ missing.attribute }}",
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}",
        "{{ [].__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{{ 'abc' * 3 }}{{ 2 ** 10 }}{{ [0] * 2 }}",
        "{{ range(10 ** 9) | length }}",
        "{{ messages[7].content }}",
        "{{ undefined_function() }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
        "{{ 'x' | nosuchfilter }}",
        "{% for %}",
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}|{{ messages | length }}",
    ],
)
def test_environment_equals_transformers(source, oracle):
    compare(source, oracle, [USER, REPLY])


def test_date_function():
    text = ChatTemplate(TEMPLATES["dated"], {}).render([USER])
    assert str(datetime.datetime.now().year) in text


def test_message_of_the_template_is_kept():
    template = ChatTemplate(TEMPLATES["gemma"], SPECIAL)
    with pytest.raises(TextError, match="System role not supported"):
        template.render([SYSTEM, USER])


def test_syntax_error_names_the_line():
    with pytest.raises(TextError, match="syntax error in line 2"):
        ChatTemplate("a\n{% if %}", {})


def test_output_is_bounded():
    source = (
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}"
    )
    with pytest.raises(TextError, match="wrote more than 1000 characters"):
        ChatTemplate(source, {}, max_chars=1000).render([USER])


@pytest.mark.parametrize("source", ["{{ 'x' * 10**9 }}", "{{ [0] * 10**9 }}", "{{ 9 ** 10000 }}"])
def test_operators_are_bounded(source):
    with pytest.raises(TextError, match="too large"):
        ChatTemplate(source, {}).render([USER])


def test_the_template_sees_plain_data_only():
    class Name(str):
        secret = "leak"

    class Color(int, enum.Enum):
        RED = 1

    messages = [{"role": Name("user"), "content": "x", "n": Color.RED}]
    source = "{{ messages[0].role }}{{ messages[0].role.secret }}{{ messages[0].n }}"
    assert ChatTemplate(source, {}).render(messages) == "user1"
    with pytest.raises(TextError, match=r"messages\[0\].content is a object"):
        ChatTemplate(source, {}).render([{"role": "user", "content": object()}])


def test_the_messages_are_not_changed():
    messages = [{"role": "assistant", "content": "a", "reasoning": "r", "x": None}]
    ChatTemplate(TEMPLATES["chatml"], {}).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert messages == [{"role": "assistant", "content": "a", "reasoning": "r", "x": None}]


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "messages is empty"),
        ("hi", {}, "messages must be a list"),
        ([1], {}, r"messages\[0\] is a int"),
        ([USER], {"tools": ["f"]}, r"tools\[0\] is a str"),
        ([USER], {"continue_final_message": True}, "exclude each other"),
        (
            [{"role": "user"}],
            {"continue_final_message": True, "add_generation_prompt": False},
            "no content to continue",
        ),
    ],
)
def test_bad_arguments(messages, options, message):
    with pytest.raises(TextError, match=message):
        ChatTemplate(TEMPLATES["chatml"], {}).render(messages, **options)


def test_deep_nesting_is_an_error():
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(TextError, match="nested too deep"):
        ChatTemplate("x", {}).render([{"role": "user", "content": deep}])
