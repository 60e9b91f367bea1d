"""Intel's GPUs: torch's ``xpu`` device and the shared Triton kernels."""
