"""Tests that need jax run in an environment of their own, which scripts/install makes.

What jax and libtpu read from the environment is set before either is imported, and nowhere else.
"""

import os
from importlib.util import find_spec

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # libtpu, which compiles for TPUs that are not here, would otherwise ask a metadata server which
    # TPU this host has, and let one process at a time use it.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Programs run for milliseconds here, and are compiled for seconds.
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    # The host poses as four devices, in this process, whatever uses jax first, and in those that
    # tests start.
    "JAX_NUM_CPU_DEVICES": "4",
    "CARDAN_TPU_HOST": "4",
}

if find_spec("jax") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
