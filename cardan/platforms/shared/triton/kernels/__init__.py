"""The device code. Pointers and strides (in elements) come without types, as Triton wants them."""
