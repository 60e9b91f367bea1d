"""Configs, tokenizers and chat templates that are damaged or made to harm; odd kinds of files."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
from hostile_models import (
    HF_CONFIG,
    TOKENIZER_CONFIG,
    check_refusal,
    engine_config,
    peak_bytes,
    read,
    start,
    write_directory,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cardan.bootstrap.model_source import read_chat_template
from cardan.core.text import ChatTemplate
from cardan.core.types.errors import CardanError

pytestmark = pytest.mark.timeout(120)

MOST_BYTES = 200 << 20
VALUES = [
    None,
    0,
    -1,
    3,
    2**31,
    2**70,
    10**400,
    1e308,
    math.nan,
    math.inf,
    True,
    "",
    "16",
    "x\n\x1b[31m" * 500,
    [],
    [1],
    ["a"],
    [[]],
    {},
    {"a": 1},
    {"rope_type": "yarn", "factor": 0},
]
QUICK = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
GROW = (
    "{{% set n = namespace(x={start}) %}}"
    "{{% for i in range(99) %}}{{% set n.x = n.x {join} n.x %}}{{% endfor %}}"
)
JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sound model; memory may not grow much beyond what it takes."""
    directory = write_directory(tmp_path_factory.mktemp("whole") / "model")
    start(directory)
    before = peak_bytes()
    yield directory
    assert peak_bytes() - before < MOST_BYTES


@pytest.fixture
def model(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def refused(model, work=read):
    try:
        work(model)
    except CardanError as error:
        check_refusal(error)
        return str(error)
    return None


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b"\xff\xfe{}", b"[" * 200_000, b"1" * 5000, b"\0" * 100]
)
def test_files_that_are_no_json_objects(model, name, raw):
    (model / name).write_bytes(raw)
    message = refused(model)
    assert message is not None
    assert name in message


@QUICK
@given(
    key=st.sampled_from([*HF_CONFIG, "dtype", "quantization_config"]), value=st.sampled_from(VALUES)
)
@example("architectures", "LlamaForCausalLM")
@example("architectures", {"a": 1})
@example("eos_token_id", 2**70)
@example("generation_config", 5)
def test_config_values_of_the_wrong_kind(whole, model, key, value):
    (model / "config.json").write_text(json.dumps({**HF_CONFIG, key: value}))
    refused(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": "260"}, "'vocab_size' is '260': must be a positive integer"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"vocab_size": 2**40}, "'vocab_size' is 1099511627776, more than any model has"),
        ({"vocab_size": math.nan}, "'vocab_size' is nan"),
        ({"hidden_size": 0}, "'hidden_size' is 0: must be a positive integer"),
        ({"hidden_size": 2**40}, "'hidden_size' is .* more than any model has"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000, more than any"),
        ({"num_hidden_layers": 10**400}, "'num_hidden_layers' is .* more than any"),
        ({"num_hidden_layers": -1}, "'num_hidden_layers' is -1"),
        ({"max_position_embeddings": 2**31}, "'max_position_embeddings' is 2147483648, more"),
        ({"intermediate_size": 2**40}, "'intermediate_size' is .* more than any model has"),
        ({"intermediate_size": 2**24, "hidden_size": 2**20}, "11 tensors of the wrong shape"),
        ({"num_attention_heads": 0}, "'num_attention_heads' is 0"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "must divide num_attention_heads"),
        ({"head_dim": 7}, "even number"),
        ({"rope_theta": math.nan}, "'rope_theta' is nan: must be positive and finite"),
        ({"rope_theta": 10**400}, "'rope_theta' is .*: must be positive and finite"),
        ({"rms_norm_eps": -1e-5}, "'rms_norm_eps' is -1e-05"),
        ({"rope_scaling": {"rope_type": "novel"}}, "rotary scaling is not known"),
        ({"rope_scaling": "linear"}, "'rope_scaling' is 'linear': must be an object"),
        ({"architectures": []}, "'architectures' is"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list that starts with a name"),
        ({"architectures": ["NobodysForCausalLM"]}, "NobodysForCausalLM"),
        ({"architectures": ["\x1b[31m\n"]}, r"\\x1b"),
        ({"hidden_act": "relu"}, "'hidden_act' is 'relu'"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes': must be true or false"),
    ],
)
def test_a_model_of_absurd_numbers_is_never_built(model, changes, message):
    (model / "config.json").write_text(json.dumps({**HF_CONFIG, **changes}))
    with pytest.raises(CardanError, match=message) as caught:
        start(model)
    check_refusal(caught.value)


def paths(value, path=()):
    """The paths to all values in a nested one, but of the vocabulary's only a few."""
    if path:
        yield path
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in list(keys)[:8]:
            yield from paths(value[key], (*path, key))


def test_damaged_tokenizers(whole, model):
    sound = (whole / "tokenizer.json").read_text()
    for path in paths(json.loads(sound)):
        for value in (None, -1, 2**40, "x", [], {}, [["a", "b"]]):
            damaged = json.loads(sound)
            at = damaged
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value
            (model / "tokenizer.json").write_text(json.dumps(damaged))
            message = refused(model)
            assert message is None or "token" in message


@QUICK
@given(
    key=st.sampled_from(
        [*TOKENIZER_CONFIG, "extra_special_tokens", "additional_special_tokens", "model_max_length"]
    ),
    value=st.sampled_from(VALUES),
)
@example("added_tokens_decoder", {"x": {"content": "a"}})
@example("added_tokens_decoder", {"1": {"content": 5}})
@example("added_tokens_decoder", [{"content": "a"}])
@example("chat_template", [{"name": "a"}])
@example("bos_token", {"content": ["a"]})
def test_tokenizer_configs_of_the_wrong_kind(whole, model, key, value):
    (model / "tokenizer_config.json").write_text(json.dumps({**TOKENIZER_CONFIG, key: value}))
    refused(model)


@pytest.mark.parametrize("value", [-1, 2**31, 2**70, 1.5, "2", True, [2, None], {"a": 1}])
def test_ends_that_are_no_token_ids(model, value):
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert "eos_token_id in generation_config is" in (refused(model) or "")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"\xff\xfe"),
        ("added_tokens.json", b'{"<a>": "1"}'),
        ("added_tokens.json", b"[1]"),
        ("special_tokens_map.json", b"[]"),
    ],
)
def test_side_files(model, name, content):
    (model / "tokenizer_config.json").write_text("{}")
    (model / name).write_bytes(content)
    assert name in (refused(model) or "")


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) + f(n - 1) if n else '' }}{% endmacro %}{{ f(60) }}",
        "{% for a in range(99999) %}{% set x = (messages[0].content * 9999)|upper %}{% endfor %}",
    ],
)
def test_templates_that_never_end(source):
    template = ChatTemplate(source, {}, max_seconds=0.2)
    with pytest.raises(CardanError, match="took too long; it may loop for ever"):
        template.render([{"role": "user", "content": "x" * 1000}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '%s'|format(messages)|attr('__class__') }}",
        "{% import 'os' as os %}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 9999999999) }}",
        "{{ '{a:>{b}}'.format_map({'a': 1, 'b': 9999999999}) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '%9999999999d'|format(1) }}",
        "{{ 'a'.center(9999999999) }}",
        "{{ 'a'.zfill(9999999999) }}",
        "{{ 'a'|center(9999999999) }}",
        "{{ 'a\n'|indent(width=9999999999) }}",
        "{{ ('a' * 9999999)|replace('a', 'b' * 9999) }}",
        "{{ ('a' * 9999999).replace('', 'b' * 9999) }}",
        GROW.format(start="'a'", join="~"),
        GROW.format(start="'a'", join="+"),
        GROW.format(start="[1]", join="+"),
        "{{ [1]|batch(9999999999, 1)|list }}",
        "{{ lipsum(99999) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_templates_that_reach_for_more(source):
    before = peak_bytes()
    try:
        template = ChatTemplate(source, {}, max_chars=1 << 23)
        text = template.render([{"role": "user", "content": "hi"}])
    except CardanError:
        text = ""
    assert text == ""  # nothing was reached; what is undefined writes nothing
    assert peak_bytes() - before < MOST_BYTES


@pytest.mark.parametrize("source", ["{% for %}", "{{", "{% if a %}", "{{ a | no_such_filter }}"])
def test_broken_templates(source):
    with pytest.raises(CardanError, match="the chat template"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


def test_template_files_of_the_user(tmp_path):
    for path, message in ((tmp_path, "Is a directory"), (tmp_path / "no", "No such file")):
        with pytest.raises(CardanError, match=message):
            read_chat_template(engine_config(tmp_path, chat_template=str(path)).model)


@pytest.mark.parametrize("name", [*JSON_FILES, "model.safetensors", "chat_template.jinja"])
def test_pipes_devices_and_loops_in_place_of_files(model, name):
    for kind in ("pipe", "device", "loop", "directory"):
        path = model / name
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "loop":
            path.symlink_to(path)
        else:
            path.mkdir()
        message = refused(model)
        # Files that a model may lack count as missing.
        optional = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")
        assert message is not None or name in optional


def test_an_endless_config_is_not_read(model):
    with (model / "config.json").open("r+b") as file:
        file.truncate(1 << 40)  # takes no place on the disk
    assert "bytes, more than such a file ever has" in (refused(model) or "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else and back")
@pytest.mark.parametrize("name", [*JSON_FILES, "model.safetensors", ""])
def test_files_without_permission(whole, name, tmp_path_factory):
    # The test's own folders are closed to others, so this one lies elsewhere.
    model = shutil.copytree(whole, f"/tmp/cardan-hostile-{os.getpid()}")
    try:
        for path in (model, *os.scandir(model)):
            os.chmod(path, 0o755)
        os.chmod(os.path.join(model, name), 0)
        os.seteuid(65534)
        try:
            message = refused(model)
        finally:
            os.seteuid(0)
    finally:
        shutil.rmtree(model)
    assert message is not None
    assert "ermission denied" in message
    assert name in message


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: (model / "config.json").write_text("{"), "config.json: is not valid JSON"),
        (lambda model: (model / "model.safetensors").write_bytes(b"x"), "is not a whole safetens"),
        (lambda model: (model / "tokenizer.json").write_text("{}"), "no valid tokenizer file"),
    ],
)
def test_the_command_says_it_in_one_line(model, damage, message):
    damage(model)
    done = subprocess.run(
        [sys.executable, "-m", "cardan", "run", str(model), "--platform", "cpu", "-p", "hi"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = [line for line in done.stderr.splitlines() if "WARNING" not in line]
    assert line.startswith("error: ")
    assert message in line
