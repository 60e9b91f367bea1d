"""The command line: options, errors, exit codes, and how fast it starts."""

import io
import json
import subprocess
import sys
from typing import get_type_hints

import pytest
import typer

from cardan.cli import main as cli_main
from cardan.cli.console import usage_message
from cardan.cli.device_diagnosis import unset_settings
from cardan.cli.main import main
from cardan.cli.options import EngineOptions
from cardan.cli.values import parse_bytes, parse_count, parse_model_len
from cardan.core.config.engine import EngineConfig
from cardan.core.config.engine_process import EngineProcessConfig
from cardan.core.config.fallbacks import FALLBACKS
from cardan.core.config.model import ModelConfig
from cardan.core.config.server import ServerConfig
from cardan.core.interfaces.constraints import Constraint
from cardan.core.observability.logging import reset_logging
from cardan.core.types.errors import ConfigError, EngineDeadError
from cardan.platforms.cpu.platform import CpuPlatform


@pytest.fixture(autouse=True)
def _clean_logging():
    yield
    reset_logging()


class FakeModule:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class FakeEngine:
    is_closed = False

    async def close(self):
        self.is_closed = True


@pytest.fixture
def stack(monkeypatch):
    """Stands for the engine and the server; ``seen`` gets both configurations, ``error`` is raised
    in place of serving."""

    class Stack:
        engine = FakeEngine()
        sock = io.BytesIO()  # anything with close()
        seen = ()
        error = None

    def reserve_socket(config):
        Stack.seen += (config,)
        return Stack.sock

    async def open_async_engine(config, *, in_process, process, meanwhile):
        assert in_process is False
        meanwhile()
        Stack.process = process
        Stack.seen += (config,)
        return Stack.engine

    async def serve(engine, config, sock):
        assert engine is Stack.engine
        assert config is Stack.seen[0]
        assert sock is Stack.sock
        if Stack.error is not None:
            raise Stack.error

    monkeypatch.setitem(
        sys.modules, "cardan.bootstrap", FakeModule(open_async_engine=open_async_engine)
    )
    monkeypatch.setitem(sys.modules, "cardan.server.run", FakeModule(serve=serve))
    monkeypatch.setattr("cardan.server.sockets.reserve_socket", reserve_socket)
    return Stack


@pytest.fixture
def served(stack):
    """What ``cardan serve`` makes of its arguments: (engine config, server config)."""

    def call(*arguments):
        stack.seen, stack.sock, stack.engine = (), io.BytesIO(), FakeEngine()
        assert main(["serve", *arguments]) == 0
        assert stack.engine.is_closed
        assert stack.sock.closed
        edge, engine = stack.seen
        return engine, edge

    return call


def test_defaults_are_those_of_the_configuration(served):
    engine, server = served("demo")
    assert engine == EngineConfig(model=ModelConfig(model="demo"))
    assert server == ServerConfig()


def test_every_option_reaches_its_setting(served, stack):
    engine, server = served(
        "m", "--tokenizer", "t", "--revision", "r", "--dtype", "bfloat16",
        "--max-model-len", "32k", "--load-format", "dummy", "--seed", "7",
        "--chat-template", "c.jinja", "--generation-config", "none", "--max-logprobs", "5",
        "--hf-overrides", '{"num_hidden_layers": 2}', "--platform", "acme:0,1",
        "--kernels", "rms_norm=acme.fast", "--kernels", "-slow", "--attention-backend", "flash",
        "--enforce-eager", "--threads", "3", "--block-size", "16",
        "--kv-cache-memory-bytes", "2GiB", "--gpu-memory-utilization", "0.5",
        "--kv-cache-dtype", "float16", "--no-enable-prefix-caching", "--max-num-seqs", "1K",
        "--max-num-batched-tokens", "4k", "--no-enable-chunked-prefill",
        "--long-prefill-token-threshold", "512", "--scheduling-policy", "priority",
        "--mixed-prefill-token-budget", "256",
        "--max-num-queued-reqs", "9", "--max-num-queued-tokens", "1M",
        "--plugin", "a", "--plugin", "b", "--no-plugin", "c", "--plugin-option", "a.x=1=2",
        "--host", "0.0.0.0", "--port", "9000", "--uds", "/tmp/s", "--api-key", "k1",
        "--api-key", "k2", "--served-model-name", "n1", "--served-model-name", "n2",
        "--allowed-origins", "*", "--shutdown-timeout", "2.5", "--enable-log-requests",
        "--step-timeout", "7.5", "--hang-timeout", "8.5", "--max-engine-restarts", "9",
        "--root-path", "/llm", "--engine-python", "/venv/bin/python",
    )  # fmt: skip
    expected = {
        "model.model": "m", "model.tokenizer": "t", "model.revision": "r",
        "model.dtype": "bfloat16", "model.max_model_len": 32000, "model.load_format": "dummy",
        "model.seed": 7, "model.chat_template": "c.jinja", "model.generation_config": "none",
        "model.max_logprobs": 5, "model.hf_overrides": {"num_hidden_layers": 2},
        "device.platform": "acme:0,1", "device.kernels": ("rms_norm=acme.fast", "-slow"),
        "device.attention_backend": "flash", "device.enforce_eager": True,
        "device.num_threads": 3, "cache.block_size": 16,
        "cache.kv_cache_memory_bytes": 2**31, "cache.memory_utilization": 0.5,
        "cache.kv_cache_dtype": "float16", "cache.enable_prefix_caching": False,
        "scheduler.max_num_seqs": 1024, "scheduler.max_num_batched_tokens": 4000,
        "scheduler.enable_chunked_prefill": False,
        "scheduler.long_prefill_token_threshold": 512, "scheduler.policy": "priority",
        "scheduler.mixed_prefill_token_budget": 256,
        "scheduler.max_num_queued_reqs": 9, "scheduler.max_num_queued_tokens": 2**20,
        "plugins.required": ("a", "b"), "plugins.blocked": ("c",),
        "plugins.options": {"a.x": "1=2"},
    }  # fmt: skip
    assert {path: engine.get(path) for path in expected} == expected
    assert server == ServerConfig(
        host="0.0.0.0",
        port=9000,
        uds="/tmp/s",
        api_keys=("k1", "k2"),
        served_model_names=("n1", "n2"),
        allowed_origins=("*",),
        shutdown_timeout=2.5,
        engine_process=EngineProcessConfig(
            step_timeout=7.5, hang_timeout=8.5, max_restarts=9, python="/venv/bin/python"
        ),
        enable_log_requests=True,
        root_path="/llm",
    )
    assert stack.process == server.engine_process


def test_underscores_are_dashes(served):
    engine, _ = served("demo", "--max_num_seqs=8", "--enable_prefix_caching")
    assert engine.scheduler.max_num_seqs == 8
    assert engine.cache.enable_prefix_caching


def test_keys_from_the_environment(served, monkeypatch):
    monkeypatch.setenv("CARDAN_API_KEY", "one two")
    _, server = served("demo")
    assert server.api_keys == ("one", "two")


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_automatic_length(served, text):
    assert served("demo", f"--max-model-len={text}")[0].model.max_model_len is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7", 7), (7, 7), ("32k", 32000), ("32K", 32768), ("1.5M", 1572864), ("1.5m", 1500000)],
)
def test_counts(text, expected):
    assert parse_count(text) == expected
    assert parse_model_len(text) == expected


@pytest.mark.parametrize("text", ["", "k", "-5", "1.5", "3kk", "1e3", "0x10", "0.3K"])
def test_bad_counts(text):
    with pytest.raises(typer.BadParameter):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1024", 1024),
        ("500M", 500_000_000),
        ("500mb", 500_000_000),
        ("2GiB", 2**31),
        ("2 gib", 2**31),
        ("1.5GiB", 3 * 2**29),
        ("1T", 10**12),
        ("8b", 8),
    ],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "1.5", "2XB", "-1G"])
def test_bad_sizes(text):
    with pytest.raises(typer.BadParameter):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".json", '{"model": "m", "max-model-len": "32K", "port": 9, "api_key": ["a", "b"], '
                  '"hf-overrides": {"x": 1}, "enable-prefix-caching": false, '
                  '"gpu-memory-utilization": 0.25}'),
        (".toml", 'model = "m"\nmax-model-len = "32K"\nport = 9\napi_key = ["a", "b"]\n'
                  'enable-prefix-caching = false\ngpu-memory-utilization = 0.25\n'
                  'hf-overrides = {x = 1}\n'),
    ],
)  # fmt: skip
def test_a_configuration_file(served, tmp_path, suffix, content):
    file = tmp_path / f"c{suffix}"
    file.write_text(content)
    engine, server = served("--config", str(file))
    assert engine.model.model == "m"
    assert engine.model.max_model_len == 32768
    assert engine.model.hf_overrides == {"x": 1}
    assert engine.cache.enable_prefix_caching is False
    assert engine.cache.memory_utilization == 0.25
    assert (server.port, server.api_keys) == (9, ("a", "b"))
    engine, server = served("other", "--config", str(file), "--port", "10")
    assert (engine.model.model, server.port) == ("other", 10)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("c.json", '{"prot": 1}', "prot is no option of `cardan serve`, did you mean port?"),
        ("c.json", "[]", "must hold one object"),
        ("c.json", "{", "c.json: "),
        ("c.toml", "a = ", "c.toml: "),
        ("c.yaml", "", "ends in .json or .toml"),
        ("c.json", None, "cannot be read"),
        ("c.json", '{"config": "d.json"}', "config is no option"),
    ],
)
def test_bad_configuration_files(tmp_path, capsys, name, content, expected):
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    assert main(["serve", "demo", "--config", str(file)]) == 1
    assert expected in capsys.readouterr().err


def test_a_bad_value_in_a_file_names_the_option(tmp_path, capsys):
    file = tmp_path / "c.json"
    file.write_text('{"port": "many"}')
    assert main(["serve", "demo", "--config", str(file)]) == 2
    assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "m", "--max-modl-len", "3"], "--max-modl-len, did you mean --max-model-len"),
        (["srve"], "did you mean 'serve'"),
        (["serve"], "which model?"),
        (["serve", "m", "--port", "99999"], "--port"),
        (["serve", "m", "--port", "x"], "--port"),
        (["serve", "m", "--load-format", "fast"], "'fast' is not one of 'auto', 'dummy'"),
        (["serve", "m", "--hf-overrides", "{"], "not valid JSON"),
        (["serve", "m", "--hf-overrides", "[1]"], "must be a JSON object"),
        (["serve", "m", "--kv-cache-memory-bytes", "2XB"], "'2XB' is not a size"),
        (["serve", "m", "--max-model-len", "0"], "at least 1"),
        (["serve", "m", "--plugin-option", "x"], "is not NAME=VALUE"),
        (["serve", "m", "n"], "unexpected extra argument"),
        (["run", "m", "--port", "1"], "--port"),
    ],
)
def test_usage_errors(capsys, arguments, expected):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    assert expected.lower() in line.lower()
    assert "--help)" in line


def test_values_out_of_range_are_errors_of_the_configuration(capsys):
    assert main(["serve", "m", "--block-size", "0"]) == 1
    assert capsys.readouterr().err == "error: cache.block_size must be at least 1, got 0\n"


@pytest.mark.parametrize("flags", [["--log-level", "debug"], ["--debug"]])
def test_errors_are_one_line_and_a_traceback_when_debugging(stack, capsys, flags):
    stack.error = EngineDeadError("the engine died; start it again")
    assert main(["serve", "demo"]) == 1
    assert capsys.readouterr().err == "error: the engine died; start it again\n"
    assert stack.engine.is_closed
    stack.sock = io.BytesIO()
    stack.seen = ()
    command = ["serve", "demo", *flags] if flags[0] == "--log-level" else [*flags, "serve", "demo"]
    assert main(command) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "error: the engine died" in err


def test_an_address_that_is_taken_stops_before_loading(stack, capsys, monkeypatch):
    def reserve_socket(config):
        raise ConfigError("cannot listen on port 8000; choose another with --port")

    monkeypatch.setattr("cardan.server.sockets.reserve_socket", reserve_socket)
    assert main(["serve", "demo"]) == 1
    assert "choose another with --port" in capsys.readouterr().err
    assert stack.seen == ()


def test_interrupts(stack, capsys):
    stack.error = KeyboardInterrupt()
    assert main(["serve", "demo"]) == 130
    assert capsys.readouterr().err == ""
    assert stack.sock.closed


def test_defects_are_not_hidden(stack):
    stack.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        main(["serve", "demo"])


def test_without_torch_the_remedy_is_named(monkeypatch):
    import builtins

    from cardan.cli.bootstrapping import import_bootstrap

    real_import = builtins.__import__

    def no_torch(name, *more):
        if name == "cardan.bootstrap":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real_import(name, *more)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    with pytest.raises(ConfigError, match=r"pip install 'cardan\[cpu\]'"):
        import_bootstrap()


def test_red_on_a_terminal_only(monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["srve"]) == 2
    assert capsys.readouterr().err.startswith("\x1b[1;31merror:\x1b[0m ")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["srve"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_other_errors_are_no_usage_errors():
    assert usage_message(ValueError("x")) is None


@pytest.mark.parametrize("command", [[], ["--help"], ["run", "-h"], ["serve", "--help"]])
def test_help(capsys, command):
    assert main(command) == 0
    assert "Usage: cardan" in capsys.readouterr().out


@pytest.mark.parametrize("path", FALLBACKS)
def test_help_says_what_becomes_of_settings_that_are_left_out(path):
    hints = get_type_hints(EngineOptions, include_extras=True)
    (option,) = hints[path.partition(".")[2]].__metadata__
    own = FALLBACKS[path]
    own = ("off", "on")[own] if isinstance(own, bool) else own
    assert f"Default: the platform's choice, else {own}." in option.help


def test_doctor_says_whose_values_settings_have():
    platform = CpuPlatform()
    (info,) = platform.devices()
    found = unset_settings(
        platform,
        info,
        lambda config: [Constraint("scheduler.max_num_seqs", "<=", 9, "small", owner="plugin p")],
    )
    settings = {item.path: (item.value, item.owner) for item in found}
    assert settings["scheduler.max_num_seqs"] == (9, "plugin p")
    assert settings["scheduler.max_num_batched_tokens"] == (2048, "default")
    assert settings["cache.block_size"] == (16, "platform cpu")
    assert settings["model.dtype"][1] == "platform cpu"
    assert settings.keys() >= FALLBACKS.keys()


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("cardan ")


def test_starting_imports_nothing_heavy():
    code = (
        "import sys, json; import cardan.cli.main; "
        "print(json.dumps([m for m in ('torch', 'numpy', 'rich', 'pluggy', 'fastapi', "
        "'tokenizers', 'pydantic') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_python_dash_m():
    done = subprocess.run(
        [sys.executable, "-m", "cardan", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("cardan ")
    assert cli_main.app.info.name == "cardan"
