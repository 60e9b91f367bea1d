"""``cardan eval`` on tiny models: the figures are those of transformers on the same windows."""

import json
import math
import re

import numpy as np
import pytest
import torch
from test_eval_logits import oracle

from cardan.bootstrap import open_client
from cardan.cli.eval import KlOptions, base_options
from cardan.cli.main import main
from cardan.core.observability.logging import reset_logging
from cardan.eval import scorer as scorer_module
from cardan.eval.kl import run_kl
from cardan.eval.perplexity import run_perplexity
from cardan.eval.run import EvalOptions
from cardan.eval.scorer import Scorer
from cardan.eval.windows import Window, WindowOptions, cut_windows
from cardan.llm import config_from_settings
from cardan.testing.fake.settings import VARIABLE
from cardan.testing.tiny_models import make_tiny_model, make_tokenizer, prompt_ids

SETTINGS = {"dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "platform": "cpu"}
WINDOWS = WindowOptions(context=48, stride=20)
IDS = prompt_ids(150, 1)


@pytest.fixture(autouse=True)
def _clean_logging():
    yield
    reset_logging()


class Tiny:
    """A model on disk and its transformers twin."""

    def __init__(self, name, directory, *, noise=0.0):
        self.directory = str(directory)
        self.model = make_tiny_model(name, directory)
        if noise:
            generator = torch.Generator().manual_seed(5)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=noise)
            self.model.save_pretrained(directory)

    @torch.inference_mode()
    def logits(self, window):
        """Float64 logits that predict the window's scored tokens."""
        ids = torch.tensor([window.token_ids])
        rows = self.model(ids, use_cache=False).logits[0, window.first - 1 : -1]
        return rows.double().numpy()

    def nll(self, windows):
        """Of all scored tokens."""
        parts = []
        for window in windows:
            rows = self.logits(window)
            largest = rows.max(-1, keepdims=True)
            norm = (largest + np.log(np.exp(rows - largest).sum(-1, keepdims=True)))[:, 0]
            parts.append(norm - rows[np.arange(len(rows)), list(window.scored)])
        return np.concatenate(parts)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    return Tiny("llama", tmp_path_factory.mktemp("noisy"), noise=0.02)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(f"w{token}" for token in IDS))
    return path


def config_of(tiny, **settings):
    return config_from_settings(tiny.directory, {**SETTINGS, **settings})


def silent(message):
    pass


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_perplexity_equals_transformers(name, text, tmp_path):
    tiny = Tiny(name, tmp_path)
    result = run_perplexity(config_of(tiny), EvalOptions(windows=WINDOWS, text=text), silent)
    nll = tiny.nll(cut_windows(IDS, WINDOWS, None))
    metrics = result.metrics
    assert metrics["perplexity"] == pytest.approx(math.exp(nll.mean()), rel=1e-3)
    assert metrics["mean_nll"] == pytest.approx(nll.mean(), rel=1e-5)
    assert metrics["mean_nll_se"] == pytest.approx(nll.std(ddof=1) / len(nll) ** 0.5, rel=1e-4)
    num_bytes = sum(len(f"w{token}") for token in IDS[28:])
    assert metrics["bits_per_byte"] == pytest.approx(nll.sum() / math.log(2) / num_bytes, rel=1e-5)
    assert metrics["tokens"] == 150 - 28
    assert metrics["computed_tokens"] == 6 * 48 + 30
    assert not result.interrupted
    assert result.config["load"]["stride"] == 20


def test_chunks_go_through_the_cache(llama, monkeypatch):
    """A window takes several steps, and whatever their size its figures are the same."""
    window = Window(tuple(IDS[:48]), 5)
    expected = llama.nll([window])
    steps = []
    for chunk in (48, 7):
        monkeypatch.setattr(scorer_module, "CHUNK", chunk)
        with Scorer(config_of(llama)) as scorer:
            found = scorer.score(window)
            engine = scorer._client._loop._engine
            steps.append(engine._scheduler._step_id)
        np.testing.assert_allclose(-found, expected, rtol=1e-4)
    assert steps[0] < 4
    assert 47 / 7 <= steps[1] < 10


def test_every_window_begins_with_the_begin_token(llama, text, tmp_path):
    from tokenizers import processors

    backend = make_tokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="w1 $A", special_tokens=[("w1", 1)]
    )
    tiny = Tiny("llama", tmp_path)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "w1"}))
    result = run_perplexity(config_of(tiny), EvalOptions(windows=WINDOWS, text=text), silent)
    windows = cut_windows(IDS, WINDOWS, 1)
    assert all(window.token_ids[0] == 1 for window in windows)
    assert result.metrics["mean_nll"] == pytest.approx(tiny.nll(windows).mean(), rel=1e-5)


def test_kl_equals_numpy_on_logits_of_transformers(llama, noisy, text):
    options = EvalOptions(windows=WINDOWS, text=text)
    result = run_kl(config_of(noisy), config_of(llama), options, silent)
    windows = cut_windows(IDS, WINDOWS, None)
    base = np.concatenate([llama.logits(window) for window in windows])
    model = np.concatenate([noisy.logits(window) for window in windows])
    expected = oracle(base, model)
    found = result.metrics["kl"]
    assert expected.mean() > 1e-3
    assert found["mean"] == pytest.approx(expected.mean(), rel=1e-3)
    for name, percent in (("median", 50), ("p90", 90), ("p99", 99), ("max", 100)):
        assert found[name] == pytest.approx(np.percentile(expected, percent), rel=5e-3)
    same = (base.argmax(-1) == model.argmax(-1)).mean()
    assert 0 < same < 1
    assert result.metrics["same_top_token_fraction"] == pytest.approx(same)
    base_nll, model_nll = llama.nll(windows), noisy.nll(windows)
    assert result.metrics["against"]["mean_nll"] == pytest.approx(base_nll.mean(), rel=1e-5)
    assert result.metrics["model"]["mean_nll"] == pytest.approx(model_nll.mean(), rel=1e-5)
    increase = model_nll - base_nll
    assert result.metrics["nll_increase"] == pytest.approx(increase.mean(), rel=1e-3, abs=1e-5)
    assert result.metrics["nll_increase_se"] == pytest.approx(
        increase.std(ddof=1) / len(increase) ** 0.5, rel=1e-3
    )
    # The perplexities are those of the other command.
    alone = run_perplexity(config_of(noisy), options, silent)
    assert result.metrics["model"]["perplexity"] == alone.metrics["perplexity"]


def test_kl_on_a_device_with_padded_steps_in_flight(llama, noisy, text, monkeypatch):
    monkeypatch.setenv(VARIABLE, "static=1 depth=1")
    options = EvalOptions(windows=WINDOWS, text=text)
    fake = {"platform": "fake"}
    result = run_kl(config_of(noisy, **fake), config_of(llama, **fake), options, silent)
    windows = cut_windows(IDS, WINDOWS, None)
    expected = np.concatenate([oracle(llama.logits(w), noisy.logits(w)) for w in windows])
    assert result.metrics["kl"]["mean"] == pytest.approx(expected.mean(), rel=1e-3)
    assert result.metrics["kl"]["max"] == pytest.approx(expected.max(), rel=5e-3)


def test_a_platform_that_runs_whole_steps(llama, text, monkeypatch, capsys):
    """It says what it cannot do: show logits, and here log-probabilities of prompts."""
    monkeypatch.setenv(VARIABLE, "tier=executor")
    arguments = [llama.directory, "--platform", "fake", "--text", text, "--context", "48"]
    code, _out, err = run(["kl", *arguments], capsys)
    assert code == 1
    assert "platform fake runs whole steps and shows no logits; choose another" in err
    code, _out, err = run(["perplexity", *arguments], capsys)
    assert code == 1
    assert "platform fake computes no prompt_logprobs" in err


def test_logits_are_shown_in_this_process_only(llama):
    with pytest.raises(ValueError, match="set in_process"):
        open_client(config_of(llama), in_process=False, prompt_logits=lambda *_: None)


def test_kl_of_a_model_with_itself_is_zero(llama, text):
    result = run_kl(
        config_of(llama), config_of(llama), EvalOptions(windows=WINDOWS, text=text), silent
    )
    assert result.metrics["kl"]["max"] < 1e-12
    assert result.metrics["same_top_token_fraction"] == 1.0
    assert result.metrics["nll_increase"] == 0.0


def run(arguments, capsys):
    code = main(["eval", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_what_the_base_takes_over():
    given = {"model": "a", "dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"}
    given |= {"kernels": ["x=y"], "attention_backend": "b", "revision": "r"}
    shared = {"threads": 2, "max_model_len": 512, "tokenizer": "t", "block_size": 8}
    base = base_options(KlOptions(**given, **shared))
    assert base.model == "a"
    assert {getattr(base, name) for name in given if name != "model"} == {None}
    assert {name: getattr(base, name) for name in shared} == shared
    own = {f"against_{name}": f"{value}2" for name, value in given.items() if name != "model"}
    base = base_options(KlOptions(**given, **shared, **own, against="c"))
    assert base.model == "c"
    assert all(getattr(base, name) == own[f"against_{name}"] for name in given if name != "model")


SIZE = ("--dtype", "float32", "--kv-cache-memory-bytes", "4M", "--platform", "cpu")


def test_the_command_against_the_same_model(llama, text, tmp_path, capsys):
    path = tmp_path / "kl.json"
    code, out, err = run(
        ["kl", llama.directory, *SIZE, "--against-dtype", "bfloat16", "--text", text,
         "--context", "48", "--json", path, "--label", "short"],
        capsys,
    )  # fmt: skip
    assert code == 0, err
    assert "same_top_token_fraction" in out
    assert f"the base: {llama.directory} bfloat16" in out
    assert "window 6 of 6 done" in err
    result = json.loads(path.read_text())
    assert (result["kind"], result["label"]) == ("kl", "short")
    assert result["device"]["dtype"] == "float32"
    assert result["config"]["against"]["dtype"] == "bfloat16"
    assert 0 < result["metrics"]["kl"]["mean"] < 0.1
    assert result["samples"][0]["kl.mean"] == result["metrics"]["kl"]["mean"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--context", "129"], 1, "context is 129, but .* takes 128 tokens at most"),
        (["--context", "1"], 2, "context is 1; it must be at least 2"),
        (["--context", "48", "--stride", "49"], 2, "stride is 49; it must be from 1 to"),
        (["--context", "48", "--stride", "0"], 2, "stride is 0; it must be from 1 to"),
        (["--context", "48", "--max-tokens", "47"], 2, "max_tokens is 47, less than one window"),
        (["--kv-cache-dtype", "nope"], 1, "kv_cache_dtype"),
    ],
)  # fmt: skip
def test_bad_options(arguments, code, message, llama, text, capsys):
    got, _out, err = run(["perplexity", llama.directory, *SIZE, "--text", text, *arguments], capsys)
    assert got == code, err
    assert re.search(message, err), err
    assert "Traceback" not in err


def test_a_text_that_is_too_short(llama, tmp_path, capsys):
    path = tmp_path / "short.txt"
    path.write_text("w1 w2 w3")
    arguments = ["perplexity", llama.directory, *SIZE, "--text", path, "--context", "100"]
    code, _out, err = run(arguments, capsys)
    assert code == 1
    assert "the text has 3 tokens, a window needs 100" in err


def test_models_that_do_not_share_a_vocabulary(llama, text, tmp_path, capsys):
    other = Tiny("llama", tmp_path)
    words = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["w7"], vocabulary["w8"] = 8, 7
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    path = tmp_path / "text"
    path.write_text("w7 " * 60)
    arguments = ["kl", llama.directory, *SIZE, "--context", "48", "--against", other.directory]
    code, _out, err = run([*arguments, "--text", path], capsys)
    assert code == 1
    assert "write the text differently" in err
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 600}))
    code, _out, err = run([*arguments, "--text", text, "--load-format", "dummy"], capsys)
    assert code == 1
    assert "a vocabulary of 600 tokens" in err


def test_interrupts(llama, text, monkeypatch, capsys):
    """Before the first window there is nothing to show; afterwards there is what was scored."""
    score = Scorer.score
    calls = []

    def interrupted(self, window):
        if len(calls) == interrupted.after:
            raise KeyboardInterrupt
        calls.append(window)
        return score(self, window)

    monkeypatch.setattr(Scorer, "score", interrupted)
    arguments = ["perplexity", llama.directory, *SIZE, "--text", text, "--context", "48"]
    interrupted.after = 0
    code, out, err = run(arguments, capsys)
    assert (code, out) == (130, "")
    assert "nothing was measured" in err
    interrupted.after = 2
    code, out, _err = run(arguments, capsys)
    assert code == 130
    assert "interrupted: the figures are of what was done until then" in out
    assert "48" in out.split("tokens", 1)[1]
