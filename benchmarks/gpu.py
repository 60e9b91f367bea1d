"""Correctness cases and speed of one accelerator, with made-up weights: one JSON line a row.

    python benchmarks/gpu.py [--only correct,decode,prefill,throughput] [--shapes 0.6B,8B]
        [--platform NAME] [--repeats 3] [--set enforce_eager=true max_num_seqs=256 ...]

``correct``: each kernel provider of the platform, and each of its attention backends, against
float64 on the operations' and the conformance kit's inputs; a row each, ``figure`` is the number of
cases that failed. ``decode``: milliseconds of a step at batch 1, 64 and 256, as (time of 128 tokens
- time of 1 token) / 127 after prompts of 128 tokens. ``prefill``: milliseconds of a whole call for
one token after one prompt of 8192. ``throughput``: output tokens a second of 512 requests of
512/256 tokens (8B, 30B-A3B) or 1024 of 256/128 (0.6B), greedy and sampled (temperature 0.8, top-p
0.95, top-k 50).

Prompts are random ids, fresh in every run; EOS is ignored and nothing is detokenized. ``floor`` is
what no engine can go below on a device with 4.31 TB/s and 789 TFLOP/s (an H200, measured): weights
read once a step or multiplied, and the KV cache read once; of experts those that tokens go to if
all are equally likely. ``ratio`` is floor over figure for times
and figure over ceiling for rates, so that 1 is perfect. Times are the host's, medians of the
repeats.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

BYTES_PER_S = 4.31e12
FLOP_PER_S = 789e12
PROMPT, ANSWER = 128, 128

SHAPES = {
    "0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    # For trying this script where there is no accelerator.
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
}
SHAPES["tiny-moe"] = {
    **SHAPES["tiny"],
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
THROUGHPUT = {
    "8B": (512, 512, 256),
    "30B-A3B": (512, 512, 256),
    "0.6B": (1024, 256, 128),
    "tiny": (8, 16, 8),
    "tiny-moe": (8, 16, 8),
}
BATCHES = {"tiny": (1, 4), "tiny-moe": (1, 4)}
# What the platforms of accelerators prefer where nothing else is asked for.
SETTINGS = {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "memory_utilization": 0.9}


def emit(**row):
    print(json.dumps(row), flush=True)


# -- floors --------------------------------------------------------------------------------------


def layer_weights(shape, tokens=None):
    """Elements of one layer's matrices that a token is multiplied with, or (``tokens``) that a
    step of so many reads: as many experts as are hit in the mean by independent, even choices."""
    hidden, dim = shape["hidden_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    attention = dim * (2 * heads + 2 * kv_heads)
    num_experts = shape.get("num_experts")
    if num_experts is None:
        return hidden * (attention + 3 * shape["intermediate_size"])
    hit = shape["num_experts_per_tok"]
    if tokens is not None:
        hit = num_experts * (1 - (1 - hit / num_experts) ** tokens)
    return hidden * (attention + num_experts + 3 * hit * shape["moe_intermediate_size"])


def kv_bytes(shape):
    """Of one token."""
    return 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]


def decode_floor_s(shape, batch, context):
    head = shape["vocab_size"] * shape["hidden_size"]
    layers = shape["num_hidden_layers"]
    read = layers * layer_weights(shape, batch) + head
    multiplied = layers * layer_weights(shape) + head
    products = max(2 * read / BYTES_PER_S, 2 * multiplied * batch / FLOP_PER_S)
    return products + batch * context * kv_bytes(shape) / BYTES_PER_S


def prefill_floor_s(shape, length):
    """Attention's half under the causal mask is counted; the head is needed for one token."""
    layers = shape["num_hidden_layers"]
    width = shape["num_attention_heads"] * shape["head_dim"]
    operations = 2 * length * layers * layer_weights(shape) + 2 * layers * length**2 * width
    return operations / FLOP_PER_S


def throughput_floor_s(shape, requests, prompt, answer):
    """Prompts at the rate of matrix products, then decode steps of all requests at once."""
    prompts = requests * prefill_floor_s(shape, prompt)
    return prompts + answer * decode_floor_s(shape, requests, prompt + answer / 2)


# -- the engine ----------------------------------------------------------------------------------


def write_model(shape, directory):
    from tokenizers import Tokenizer, models

    config = {**shape, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(config))
    words = {f"t{index}": index for index in range(shape["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(directory / "tokenizer.json"))


class Engine:
    """An LLM with made-up weights, and runs of it."""

    def __init__(self, shape, settings):
        from cardan.llm import LLM

        self.shape = shape
        self._random = np.random.default_rng(0)
        with tempfile.TemporaryDirectory() as directory:
            write_model(shape, Path(directory))
            began = time.perf_counter()
            self.llm = LLM(directory, load_format="dummy", **settings)
            self.ready_s = time.perf_counter() - began

    def run_s(self, requests, prompt, answer, **sampling):
        """Seconds for random prompts of equal length."""
        from cardan.core.types.sampling_params import SamplingParams

        vocab = self.shape["vocab_size"]
        prompts = self._random.integers(3, vocab, (requests, prompt)).tolist()
        params = SamplingParams(
            max_tokens=answer, ignore_eos=True, detokenize=False, **(sampling or {"temperature": 0})
        )
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - began
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        if made != requests * answer:
            raise SystemExit(f"{made} tokens came instead of {requests * answer}")
        return took


def timed(engine, name, repeats, row):
    """A row with the figure of each repeat; ``row`` maps a repeat's number to a figure."""
    samples = [row(engine) for _ in range(repeats + 1)][1:]  # the first warms up
    return statistics.median(samples), [round(sample, 4) for sample in samples]


def decode_rows(name, engine, repeats):
    for batch in BATCHES.get(name, (1, 64, 256)):

        def step_ms(engine, batch=batch):
            one = engine.run_s(batch, PROMPT, 1)
            return 1000 * (engine.run_s(batch, PROMPT, ANSWER) - one) / (ANSWER - 1)

        figure, samples = timed(engine, name, repeats, step_ms)
        floor = 1000 * decode_floor_s(engine.shape, batch, PROMPT + ANSWER / 2)
        emit(
            row=f"{name} decode, batch {batch}",
            unit="ms/step",
            figure=round(figure, 3),
            floor=round(floor, 3),
            ratio=round(floor / figure, 3),
            samples=samples,
        )


def prefill_rows(name, engine, repeats):
    length = 8192
    figure, samples = timed(engine, name, repeats, lambda engine: 1000 * engine.run_s(1, length, 1))
    floor = 1000 * prefill_floor_s(engine.shape, length)
    emit(
        row=f"{name} prefill 1x{length}",
        unit="ms",
        figure=round(figure, 2),
        floor=round(floor, 2),
        ratio=round(floor / figure, 3),
        samples=samples,
    )


def throughput_rows(name, engine, repeats):
    requests, prompt, answer = THROUGHPUT[name]
    for kind, sampling in (
        ("greedy", {}),
        ("sampled", {"temperature": 0.8, "top_p": 0.95, "top_k": 50}),
    ):

        def rate(engine, sampling=sampling):
            return requests * answer / engine.run_s(requests, prompt, answer, **sampling)

        figure, samples = timed(engine, name, max(1, repeats - 1), rate)
        ceiling = requests * answer / throughput_floor_s(engine.shape, requests, prompt, answer)
        emit(
            row=f"{name} throughput {requests} requests {prompt}/{answer}, {kind}",
            unit="output tok/s",
            figure=round(figure),
            floor=round(ceiling),
            ratio=round(figure / ceiling, 3),
            samples=samples,
        )


# -- correctness ---------------------------------------------------------------------------------


def correctness(platform_name):
    """Rows of all kernels and backends; whether all are right."""
    from cardan.core.discovery import Discovery
    from cardan.core.platform_selection import installed_platforms, select_platform

    selection = select_platform(platform_name, installed_platforms(Discovery()))
    platform, info = selection.platform, selection.devices[0]
    device = platform.open(info)
    try:
        return operations_right(platform, info, device) & attention_right(platform, info, device)
    finally:
        device.close()


def operations_right(platform, info, device, seeds=5):

    from cardan.core.interfaces.kernels import check_needs
    from cardan.core.ops.catalogue import CATALOGUE
    from cardan.core.ops.compare import compare_case
    from cardan.core.ops.loading import load_provider

    ops = {op.name: op for op in CATALOGUE}
    features = platform.capabilities(info).instruction_sets
    all_right = True
    for provider in platform.kernels(info):
        op, loaded = ops[provider.op], load_provider(ops[provider.op], provider)
        failures, cases, worst = [], 0, 0.0
        for dtype, tolerance in op.tolerances.items():
            for seed in range(seeds):
                for case in cases_of(op, dtype, device.torch_device, seed):
                    attributes = {"dtype": dtype, **case.attributes}
                    if not check_needs(provider.needs, features, attributes):
                        continue
                    with device.inference():
                        found = compare_case(op, loaded.run, case, ops, tolerance, loaded.prepare)
                    cases, worst = cases + 1, max(worst, found.ratio)
                    if not found.ok:
                        failures.append(f"{dtype}: {found}")
        all_right = all_right and not failures
        emit(
            row=f"correct {provider.name}",
            unit="failed cases",
            figure=len(failures),
            cases=cases,
            worst_of_tolerance=round(worst, 3),
            failures=failures[:3],
        )
    return all_right


def cases_of(op, dtype, device, seed):
    """The operation's own inputs, and products of one row and of many experts, which have kernels
    of their own or other tiles."""
    import torch
    from sampling_cases import sampling_cases

    from cardan.core.interfaces.kernels import Case
    from cardan.core.ops.reference.expert_inputs import make_mixture

    made = list(op.make_inputs(getattr(torch, dtype), device, seed))
    if op.name == "choose_tokens":
        made += sampling_cases(device, seed)
    for outputs, inputs in ((1024, 3072), (9001, 1000)) if op.name == "linear" else ():
        generator = torch.Generator().manual_seed(seed)
        x, weight = (
            torch.randn(size, inputs, generator=generator).to(device, getattr(torch, dtype))
            for size in (1, outputs)
        )
        attributes = {"dtype": dtype, "in_features": inputs, "out_features": outputs}
        made.append(Case((x, weight / inputs**0.5, None), attributes))
    for tokens in (1, 3, 40, 64, 300, 1500) if op.name == "expert_mlp" else ():
        generator = torch.Generator().manual_seed(seed)
        sizes = (tokens, 24, 4, 384, 200)
        made.append(make_mixture(sizes, getattr(torch, dtype), device, generator))
    return made


def attention_right(platform, info, device):
    """The conformance kit's layers on ragged steps, with longer rows than the kit has."""
    from cardan.testing.conformance.attention_bench import AttentionBench, decode_rows, mixed_rows
    from cardan.testing.conformance.paged_batches import PagedBatch
    from cardan.testing.conformance.test_l3_attention import layer_cases

    capabilities = platform.capabilities(info)
    rng = np.random.default_rng(7)
    all_right = True
    for backend in platform.attention(info):
        bench = AttentionBench(backend, platform, device, device.torch_device)
        failures, steps = [], 0
        for name, case in layer_cases(capabilities.dtypes, capabilities.kv_dtypes).items():
            if not bench.accepts(case.need):
                continue
            size = min(case.geometry.block_size, 32)
            steps_of_rows = [
                mixed_rows(rng, size),
                decode_rows(rng, size),
                [(1, 3001), (257, 700), (1, 129), (2, 2), (130, 130)],
                [(1, 300), (257, 257), (700, 700), (2, 2)],
                [(1, 1500)] * 3,
            ]
            if name in capabilities.dtypes:
                steps_of_rows.append([(1, int(length)) for length in rng.integers(1, 300, 300)])
            for rows in steps_of_rows:
                placement = bench.placement(
                    case.geometry, order=steps, padding=3, drop_before=case.geometry.window
                )
                batch = PagedBatch(case.geometry, rows, steps, placement)
                fault = bench.fault(batch, case.layer(device.torch_device, rng), case.lse)
                steps += 1
                if fault:
                    failures.append(f"{name}: {fault}")
        all_right = all_right and not failures
        emit(
            row=f"correct attention {backend.name}",
            unit="failed steps",
            figure=len(failures),
            cases=steps,
            failures=failures[:5],
        )
    return all_right


def parsed(settings):
    values = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="correct,decode,prefill,throughput")
    parser.add_argument("--shapes", default="0.6B,8B")
    parser.add_argument("--platform")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    wanted = options.only.split(",")
    is_right = True
    if "correct" in wanted:
        is_right = correctness(options.platform)
    measures = {"decode": decode_rows, "prefill": prefill_rows, "throughput": throughput_rows}
    for name in options.shapes.split(",") if set(wanted) & set(measures) else ():
        settings = {**SETTINGS, "platform": options.platform, **parsed(options.set)}
        engine = Engine(SHAPES[name], settings)
        emit(row=f"{name} ready", unit="s", figure=round(engine.ready_s, 2))
        for measure in (measures[item] for item in measures if item in wanted):
            measure(name, engine, options.repeats)
        engine.llm.close()
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
