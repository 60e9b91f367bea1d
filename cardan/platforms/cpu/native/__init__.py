"""C kernels of the CPU platform, compiled on the machine that runs them."""
