"""What is only for NVIDIA's GPUs, as data: importing this imports no torch."""

from cardan.core.interfaces.kernels import Needs, Provider

CUDA_PROVIDERS: tuple[Provider, ...] = (
    Provider(
        op="linear_float32",
        name="cuda.linear_float32",
        load="cardan.platforms.cuda.linear:linear_float32",
        needs=Needs(dtypes=frozenset({"bfloat16", "float16"}), modules=("triton",)),
        traits=frozenset({"graph_safe"}),
    ),
)
