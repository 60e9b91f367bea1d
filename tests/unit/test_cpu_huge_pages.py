"""Huge pages for weights: contents stay, and only what is large enough is touched."""

import gc
import sys

import torch

from cardan.platforms.cpu.huge_pages import HUGE_PAGE_BYTES, WeightMemory, use_huge_pages


def test_contents_stay_and_whole_pages_alone_are_moved():
    large = torch.arange(3 * HUGE_PAGE_BYTES, dtype=torch.int32)
    small = torch.ones(1000)
    moved = use_huge_pages([large, small, large[::2]])
    assert moved % HUGE_PAGE_BYTES == 0
    # A system without them moves nothing.
    assert moved in (0, *(HUGE_PAGE_BYTES * count for count in (11, 12)))
    assert torch.equal(large, torch.arange(3 * HUGE_PAGE_BYTES, dtype=torch.int32))
    assert use_huge_pages([small]) == 0


def test_mapped_files_and_other_systems_are_left_alone(tmp_path, monkeypatch):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (HUGE_PAGE_BYTES // 64))
    mapped = torch.from_file(str(path), size=4 * HUGE_PAGE_BYTES, dtype=torch.uint8)
    use_huge_pages([mapped])
    assert torch.equal(mapped[:256], torch.arange(256, dtype=torch.uint8))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert use_huge_pages([torch.zeros(HUGE_PAGE_BYTES)]) == 0


def test_small_weights_share_a_chunk_and_large_ones_stay_where_they_are():
    memory = WeightMemory()
    weights = [torch.randn(33, 65).to(dtype) for dtype in (torch.float32, torch.bfloat16) * 3]
    placed = [memory.place(weight) for weight in weights]
    for weight, copy in zip(weights, placed, strict=True):
        assert torch.equal(weight, copy)
    if sys.platform.startswith("linux"):
        addresses = [copy.data_ptr() for copy in placed]
        assert addresses == sorted(addresses)
        assert max(addresses) - min(addresses) < 100_000
        assert all(address % 64 == 0 for address in addresses)
    large = torch.zeros(5 * HUGE_PAGE_BYTES, dtype=torch.uint8)
    assert memory.place(large) is large
    assert memory.place(weights[0].t()).data_ptr() == weights[0].data_ptr()


def test_a_chunk_is_given_up_with_its_last_tensor():
    memory = WeightMemory()
    first = memory.empty(1000)
    again = memory.empty(10)
    assert again.data_ptr() - first.data_ptr() == 1024
    owner = memory._owner
    del first
    gc.collect()
    assert owner() is not None
    del again
    gc.collect()
    assert owner() is None
    assert memory.empty(3).numel() == 3
