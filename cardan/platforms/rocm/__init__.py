"""AMD's GPUs through ROCm: torch's HIP build and Triton."""
