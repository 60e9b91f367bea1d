"""Model files: finding them, reading their configs, and handing out their tensors."""
