"""What decoders are made of. Kernels are bound at construction; weights are loaded by slots."""
