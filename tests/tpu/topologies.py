"""Compiles for TPUs that are not here, with libtpu."""

import jax
from jax.experimental import topologies

# Four chips of each generation. Their names are jax's and libtpu's.
TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")


def compile_for(name, function, *shapes, donated=()):
    """``function`` compiled for one chip of the topology ``name``.

    ``shapes`` are ``jax.ShapeDtypeStruct`` of its arguments, of which those at the places
    ``donated`` are used up. The environment is that of the tests' ``conftest.py``.
    """
    topology = topologies.get_topology_desc(topology_name=name, platform="tpu")
    place = jax.sharding.SingleDeviceSharding(topology.devices[0])
    placed = [jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place) for shape in shapes]
    return jax.jit(function, donate_argnums=donated).lower(*placed).compile()
