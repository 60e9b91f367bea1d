"""Rows of kernels and attention backends against float64."""

import numpy as np

_SEEDS = 5
# Rows, outputs and inputs of products: one row, a few, and many.
_PRODUCTS = ((1, 1024, 3072), (1, 9001, 1000), (7, 1024, 3072), (300, 1024, 512))


def run_correctness_rows(rows, platform_name):
    """A row for each provider and each backend of the platform's first device."""
    from cardan.core.discovery import Discovery
    from cardan.core.platform_selection import installed_platforms, select_platform

    opened = []

    def open_device():
        selection = select_platform(platform_name, installed_platforms(Discovery()))
        platform, info = selection.platform, selection.devices[0]
        opened.append((platform, info, platform.open(info)))
        return {"device": info.name}

    if not rows.run("correct", open_device):
        return
    platform, info, device = opened[0]
    try:
        features = platform.capabilities(info).instruction_sets
        for provider in platform.kernels(info):
            rows.run(
                f"correct {provider.name}",
                lambda provider=provider: provider_row(provider, device, features),
            )
        for backend in platform.attention(info):
            rows.run(
                f"correct attention {backend.name}",
                lambda backend=backend: attention_row(backend, platform, info, device),
            )
    finally:
        device.close()


def provider_row(provider, device, features):
    """All cases that the provider takes, of all dtypes."""
    from cardan.core.interfaces.kernels import check_needs
    from cardan.core.ops.catalogue import CATALOGUE
    from cardan.core.ops.compare import compare_case
    from cardan.core.ops.loading import load_provider

    ops = {op.name: op for op in CATALOGUE}
    op, loaded = ops[provider.op], load_provider(ops[provider.op], provider)
    failures, cases, worst = [], 0, 0.0
    for dtype, tolerance in op.tolerances.items():
        for seed in range(_SEEDS):
            for case in cases_of(op, dtype, device.torch_device, seed):
                attributes = {"dtype": dtype, **case.attributes}
                if not check_needs(provider.needs, features, attributes):
                    continue
                with device.inference():
                    found = compare_case(op, loaded.run, case, ops, tolerance, loaded.prepare)
                cases, worst = cases + 1, max(worst, found.ratio)
                if not found.ok:
                    failures.append(f"{dtype}: {found}")
    return {
        "unit": "failed cases",
        "figure": len(failures),
        "cases": cases,
        "worst_of_tolerance": round(worst, 3),
        "failures": failures[:3],
    }


def cases_of(op, dtype, device, seed):
    """The operation's own inputs, and products of several numbers of rows and of experts, which
    have kernels of their own or other tiles."""
    import torch
    from sampling_cases import sampling_cases

    from cardan.core.interfaces.kernels import Case
    from cardan.core.ops.reference.expert_inputs import make_mixture

    made = list(op.make_inputs(getattr(torch, dtype), device, seed))
    if op.name == "choose_tokens":
        made += sampling_cases(device, seed)
    products = op.name in ("linear", "linear_float32")
    for rows, outputs, inputs in _PRODUCTS if products else ():
        generator = torch.Generator().manual_seed(seed)
        x, weight = (
            torch.randn(size, inputs, generator=generator).to(device, getattr(torch, dtype))
            for size in (rows, outputs)
        )
        attributes = {"dtype": dtype, "in_features": inputs, "out_features": outputs}
        bias = (None,) if op.name == "linear" else ()
        made.append(Case((x, weight / inputs**0.5, *bias), attributes))
    for tokens in (1, 3, 40, 64, 300, 1500) if op.name == "expert_mlp" else ():
        generator = torch.Generator().manual_seed(seed)
        sizes = (tokens, 24, 4, 384, 200)
        made.append(make_mixture(sizes, getattr(torch, dtype), device, generator))
    return made


def attention_row(backend, platform, info, device):
    """The conformance kit's layers on ragged steps, with longer rows than the kit has."""
    from cardan.testing.conformance.attention_bench import AttentionBench, decode_rows, mixed_rows
    from cardan.testing.conformance.paged_batches import PagedBatch
    from cardan.testing.conformance.test_l3_attention import layer_cases

    capabilities = platform.capabilities(info)
    rng = np.random.default_rng(7)
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
    return {
        "unit": "failed steps",
        "figure": len(failures),
        "cases": steps,
        "failures": failures[:5],
    }
