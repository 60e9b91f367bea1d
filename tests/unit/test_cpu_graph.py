"""Captured work on the CPU gives what eager work gives, from the inputs of each replay."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from cardan.core.interfaces.errors import UnsupportedError
from cardan.platforms.cpu.graph import CpuGraph, capture_graph
from cardan.platforms.cpu.graph_memory import GraphMemory
from cardan.platforms.cpu.native.library import library, unavailable_reason

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no native kernels: {unavailable_reason()}"
)


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def block(x, weights):
    """Native and torch operations in turn, with views and temporaries."""
    from cardan.platforms.cpu.native.elementwise import fused_add_rms_norm, silu_and_mul
    from cardan.platforms.cpu.native.linear import linear

    residual = torch.zeros_like(x)
    for norm, up, down in weights:
        normed, residual = fused_add_rms_norm(x, residual, norm, 1e-5)
        gate, value = linear(normed, up, None).chunk(2, dim=-1)
        x = linear(silu_and_mul(torch.cat([gate, value.sin()], dim=-1)), down, None)
    return x + residual


def layers(size, count):
    return [
        (torch.rand(size), torch.randn(4 * size, size) / 8, torch.randn(size, 2 * size) / 8)
        for _ in range(count)
    ]


def captured(launch, memory=None) -> tuple[CpuGraph, torch.Tensor]:
    results = []
    graph = capture_graph(library(), lambda: results.append(launch()), memory or GraphMemory())
    return graph, results[0]


@pytest.mark.parametrize("rows", [1, 3, 33])
def test_replays_compute_from_what_the_inputs_hold(rows):
    weights, x = layers(64, 3), torch.randn(rows, 64)
    graph, out = captured(lambda: block(x, weights))
    assert torch.equal(out, block(x, weights))
    for _ in range(3):
        x.copy_(torch.randn(rows, 64))
        graph.replay()
        assert torch.equal(out, block(x, weights))
    # zeros_like; sin and cat in each layer; the last sum.
    assert graph.num_torch_calls == 1 + 3 * 2 + 1
    graph.release()


def test_graphs_that_share_memory_keep_their_own_results():
    weights, memory = layers(64, 2), GraphMemory()
    wide, narrow = torch.randn(8, 64), torch.randn(2, 64)
    big, big_out = captured(lambda: block(wide, weights), memory)
    held = memory.num_bytes
    small, small_out = captured(lambda: block(narrow, weights), memory)
    assert memory.num_bytes == held
    narrow.normal_()
    small.replay()
    first = small_out.clone()
    big.replay()
    assert torch.equal(big_out, block(wide, weights))
    assert torch.equal(first, block(narrow, weights))


def test_graphs_of_many_numbers_of_rows_share_memory():
    """What one graph has let go serves those of other sizes: all need little more than the
    largest."""
    from cardan.platforms.cpu.native.linear import linear, prepare_linear

    shapes = [(1024, 64), (64, 1024)] * 3
    weights = [prepare_linear(torch.randn(shape)) for shape in shapes]

    def launch(x):
        for weight in weights:
            x = linear(x, weight, None)

    inputs = [torch.randn(rows, 64) for rows in range(1, 129)]
    alone, shared = GraphMemory(), GraphMemory()
    capture_graph(library(), lambda: launch(inputs[-1]), alone)
    graphs = [capture_graph(library(), lambda x=x: launch(x), shared) for x in inputs]
    assert len(graphs) == 128
    assert shared.num_bytes < 12 * alone.num_bytes, (shared.num_bytes, alone.num_bytes)


def test_a_dead_tensors_memory_is_used_again_and_a_live_views_is_not():
    memory = GraphMemory()
    first = memory.like(torch.empty(100))
    address = first.data_ptr()
    view = first[10:].view(9, 10)
    del first
    other = memory.like(torch.empty(100))
    assert other.data_ptr() != address
    del view
    assert memory.like(torch.empty(100)).data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_memory_is_aligned_and_of_the_wanted_form(dtype):
    memory = GraphMemory()
    for shape in ((), (0,), (3,), (1000, 999), (7, 5, 3)):
        wanted = torch.empty(shape, dtype=dtype)
        if len(shape) == 3:
            wanted = torch.empty((3, 5, 7), dtype=dtype).permute(2, 1, 0)
        found = memory.like(wanted)
        assert (found.shape, found.dtype, found.stride()) == (wanted.shape, dtype, wanted.stride())
        assert found.numel() == 0 or found.data_ptr() % 64 == 0


def test_what_reads_values_cannot_be_captured_and_ends_the_recording():
    x = torch.randn(4, 64)
    with pytest.raises(UnsupportedError, match="item"):
        captured(lambda: x * x.sum().item())
    graph, _ = captured(lambda: x * 2)
    assert graph.num_torch_calls == 1


def test_in_place_operations_are_done_again():
    x, total = torch.ones(3), torch.zeros(3)
    graph, _ = captured(lambda: total.add_(x))
    graph.replay()
    graph.replay()
    assert total.tolist() == [3.0, 3.0, 3.0]


def test_calls_of_other_threads_are_not_taken_down():
    from cardan.platforms.cpu.native.linear import linear

    x, weight = torch.randn(2, 64), torch.randn(64, 64)

    def launch():
        thread = threading.Thread(target=linear, args=(x, weight, None))
        thread.start()
        thread.join()
        return linear(x, weight, None)

    alone, _ = captured(lambda: linear(x, weight, None))
    graph, _ = captured(launch)
    assert graph.num_bytes == alone.num_bytes


def test_a_call_that_fails_stops_the_replay_with_an_error():
    from cardan.platforms.cpu.native.elementwise import rotary_embedding

    q, k = torch.randn(2, 4, 8), torch.randn(2, 1, 8)
    cos_sin, positions = torch.randn(5, 8), torch.tensor([0, 4])
    graph, _ = captured(lambda: rotary_embedding(q, k, cos_sin, positions)[0])
    positions[1] = 5
    with pytest.raises(RuntimeError, match="recorded call 0 of 1 of the CPU refused its input"):
        graph.replay()


def test_a_library_that_is_opened_again_records_what_was_bound_before():
    from cardan.platforms.cpu.native.library import open_library
    from cardan.platforms.cpu.native.linear import linear

    x, weight = torch.randn(2, 64), torch.randn(64, 64)
    results = []
    again = open_library(os.environ)
    graph = capture_graph(again, lambda: results.append(linear(x, weight, None)), GraphMemory())
    x.normal_()
    graph.replay()
    assert torch.equal(results[0], linear(x, weight, None))


def test_capturing_does_not_import_torchs_compiler():
    script = (
        "import sys, torch\n"
        "from cardan.platforms.cpu.graph import GraphMemory, capture_graph\n"
        "from cardan.platforms.cpu.native.library import library\n"
        "x = torch.ones(3)\n"
        "capture_graph(library(), lambda: x + 1, GraphMemory())\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "False\n"
