"""Where arrays of a program lie: whole on each device, or in equal parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

# The axis of the mesh.
AXIS = "model"


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices that share a model's steps: their mesh has the one axis ``AXIS``."""

    mesh: jax.sharding.Mesh

    @classmethod
    def on(cls, devices: Sequence[Any]) -> "Placement":
        return cls(jax.sharding.Mesh(np.asarray(devices), (AXIS,)))

    @property
    def size(self) -> int:
        return int(self.mesh.size)

    @property
    def whole(self) -> jax.sharding.NamedSharding:
        """A copy on each device."""
        return self._split(())

    def split_on(self, axis: int | None, shape: tuple[int, ...]) -> jax.sharding.NamedSharding:
        """Equal parts along ``axis`` of an array of ``shape``; whole where it is None, or where
        the axis cannot be cut."""
        if axis is None or self.size == 1 or shape[axis] % self.size:
            return self.whole
        return self._split((*(None,) * axis, AXIS))

    def put(self, numbers: npt.NDArray[Any], sharding: jax.sharding.NamedSharding) -> jax.Array:
        """A copy of the host's numbers on the devices; nothing refers to ``numbers`` afterwards."""
        if self.mesh.devices.flat[0].platform == "cpu":
            # A host's array could otherwise share the numbers' memory.
            numbers = numbers.copy()
        return jax.device_put(numbers, sharding)

    def _split(self, axes: tuple[str | None, ...]) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*axes))
