"""A platform's attention and cache writes on small steps, to be run under a sanitizer.

    python sanitized_steps.py PLATFORM END

Every backend runs the conformance kit's layers that it accepts on ragged and on decode steps, with
the step's keys and values written before, and rotates and writes in one go. Answers are compared
with float64. Layers come in random order, and none begins after END on the machine's monotonic
clock: one JSON line says how many steps ran, how many layers did not, and what was wrong. PLATFORM
may be empty.
"""

import json
import random
import sys
import time

import numpy as np
import torch

from cardan.core.discovery import Discovery
from cardan.core.interfaces.attention import HeadRotation
from cardan.core.interfaces.kernels import check_needs
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.loading import load_provider
from cardan.core.platform_selection import installed_platforms, select_platform
from cardan.testing.conformance.attention_bench import AttentionBench, decode_rows, mixed_rows
from cardan.testing.conformance.paged_batches import PagedBatch
from cardan.testing.conformance.test_l3_attention import layer_cases

_ROTATIONS = ("rotary_embedding", "qk_norm_rope")


class Steps:
    """Runs steps of one backend and counts them."""

    def __init__(self, bench):
        self.count = 0
        self.failures = []
        self._bench = bench
        self._rng = np.random.default_rng(3)

    def attend(self, name, case):
        """Write and attend."""
        size = min(case.geometry.block_size, 32)
        for rows in (mixed_rows(self._rng, size), decode_rows(self._rng, size), [(40, 40), (7, 7)]):
            batch = self._batch(case, rows)
            layer = case.layer(self._bench.torch_device, self._rng)
            self._note(name, self._bench.fault(batch, layer, case.lse))

    def rotate(self, name, case, provider, spec):
        """Rotate, write and attend; that it ends is what is asked for here."""
        batch = self._batch(case, mixed_rows(self._rng, min(case.geometry.block_size, 32)))
        backend = self._bench.build(case.geometry, batch.placement.layout)
        rotation = self._rotation(case.geometry, provider, spec, batch.batch.max_seq_len)
        parts = [batch.packed(part) for part in (batch.queries, batch.keys, batch.values)]
        qkv = torch.cat(parts, 1).split([part.shape[1] for part in parts], 1)
        layer = case.layer(self._bench.torch_device, self._rng)
        with self._bench.device.inference():
            plan = backend.plan(batch.batch)
            positions = batch.batch.positions
            q = backend.rotate_and_write(qkv, positions, rotation, batch.cache, plan)
            out = backend.run(q, batch.cache, plan, layer)
        self._bench.device.synchronize()
        is_finite = bool(out[: batch.num_query_tokens].isfinite().all())
        self._note(f"{name}, {spec.name}", "" if is_finite else "the output is not finite")

    def _batch(self, case, rows):
        placement = self._bench.placement(
            case.geometry, order=self.count, padding=3, drop_before=case.geometry.window
        )
        return PagedBatch(case.geometry, rows, self.count, placement)

    def _rotation(self, geometry, provider, spec, length):
        device = self._bench.torch_device
        angles = torch.rand(length + 1, geometry.k_dim // 2) * 6
        cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(device)
        run = load_provider(spec, provider).run
        if spec.name == "rotary_embedding":
            return HeadRotation(
                rotate=lambda q, k, at: run(q, k, cos_sin, at),
                provider=provider.name,
                cos_sin=cos_sin,
            )
        weights = [
            (torch.rand(geometry.k_dim) + 0.5).to(device, geometry.torch_dtype) for _ in range(2)
        ]
        return HeadRotation(
            rotate=lambda q, k, at: run(q, k, *weights, 1e-5, cos_sin, at),
            provider=provider.name,
            cos_sin=cos_sin,
            q_weight=weights[0],
            k_weight=weights[1],
            eps=1e-5,
        )

    def _note(self, name, fault):
        self.count += 1
        if fault:
            self.failures.append(f"{self._bench.backend.name}, {name}: {fault}")


def run(platform_name, end):
    selection = select_platform(platform_name or None, installed_platforms(Discovery()))
    platform, info = selection.platform, selection.devices[0]
    capabilities = platform.capabilities(info)
    device = platform.open(info)
    found = {"steps": 0, "layers_not_run": 0, "failures": []}
    try:
        for backend in platform.attention(info):
            bench = AttentionBench(backend, platform, device, device.torch_device)
            steps = Steps(bench)
            layers = list(layer_cases(capabilities.dtypes, capabilities.kv_dtypes).items())
            random.Random(1).shuffle(layers)
            for name, case in (item for item in layers if bench.accepts(item[1].need)):
                if time.monotonic() < end:
                    run_layer(steps, name, case, platform.kernels(info), capabilities)
                else:
                    found["layers_not_run"] += 1
            found["steps"] += steps.count
            found["failures"] += steps.failures
    finally:
        device.close()
    return found


def run_layer(steps, name, case, providers, capabilities):
    """All steps of one layer, also with the rotation of each provider that takes it."""
    steps.attend(name, case)
    if case.geometry.k_dim != case.geometry.v_dim or case.lse:
        return
    features = capabilities.instruction_sets
    attributes = {"dtype": case.geometry.dtype, "head_dim": case.geometry.k_dim}
    for spec in (spec for spec in CATALOGUE if spec.name in _ROTATIONS):
        for provider in (provider for provider in providers if provider.op == spec.name):
            if check_needs(provider.needs, features, attributes):
                steps.rotate(name, case, provider, spec)


if __name__ == "__main__":
    result = run(sys.argv[1], float(sys.argv[2]))
    print(json.dumps(result))
    sys.exit(bool(result["failures"]))
