"""Huge pages for weights: contents stay, and only what is large enough is touched."""

import sys

import torch

from cardan.platforms.cpu.huge_pages import HUGE_PAGE_BYTES, use_huge_pages


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
