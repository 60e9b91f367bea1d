"""torchax is patched into being importable, and torch is left alone afterwards."""

import torch

from cardan.platforms.tpu import torchax_import


def test_torch_is_patched_for_the_import_alone(monkeypatch):
    """Other threads may trace by then."""
    found = torchax_import.torchax_environment()
    packet = type(torch.ops.aten.add)
    lookup = packet.__getattr__

    def patched():
        raise AssertionError("torch is patched again")

    monkeypatch.setattr(torchax_import, "_missing_overloads", patched)
    assert torchax_import.torchax_environment() is found
    assert packet.__getattr__ is lookup
