"""A vendor's integration: identity, detection, facts, and the door to its devices."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.constraints import Constraint
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.graphs import ShapePolicy
from cardan.core.interfaces.kernels import Provider
from cardan.core.interfaces.roofline import Roofline

if TYPE_CHECKING:
    from cardan.core.interfaces.attention import AttentionBackend
    from cardan.core.interfaces.executor import ModelExecutor, ModelParts
    from cardan.core.types.model import ModelSummary

ProbeState = Literal["absent", "present", "broken"]
Role = Literal["server", "engine", "worker"]


@dataclass(frozen=True, slots=True)
class Probe:
    """Result of a detection. ``score`` orders present platforms; ``fix`` is a remedy to show."""

    state: ProbeState
    score: int = 0
    reason: str = ""
    fix: str = ""

    @classmethod
    def absent(cls, reason: str) -> "Probe":
        return cls("absent", 0, reason)

    @classmethod
    def present(cls, score: int, reason: str = "") -> "Probe":
        return cls("present", score, reason)

    @classmethod
    def broken(cls, reason: str, fix: str) -> "Probe":
        return cls("broken", 0, reason, fix)


class ConfigView(Protocol):
    """Read-only sight of an engine configuration: values at ``section.name``."""

    def get(self, path: str) -> Any: ...


class Platform(ABC):
    """Everything a vendor integration says about itself. Importing and probing touch no device.

    A minimal platform sets ``name`` and ``contract`` and implements ``probe``, ``devices`` and
    ``open``; every model then runs on the reference operations.
    """

    name: ClassVar[str]
    # (major, minor) of the contract this platform was written against.
    contract: ClassVar[tuple[int, int]]
    # Exclusive resources of the process, such as "torch.privateuse1"; two open platforms may
    # not claim the same one.
    claims: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def probe(self) -> Probe:
        """Is this platform here? Cheap, never raises, initialises no runtime."""

    @abstractmethod
    def devices(self) -> Sequence[DeviceInfo]:
        """The devices found, without opening any."""

    @abstractmethod
    def open(self, device: DeviceInfo) -> Device:
        """Open a device; the first call that may initialise the vendor's runtime."""

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        """(optional) Facts about a device. Default: only float32, eager, synchronous."""
        return Capabilities()

    def constrain(self, config: ConfigView, device: DeviceInfo) -> Sequence[Constraint]:
        """(optional) Demands on the configuration. Default: none."""
        return ()

    def shapes(self, model: "ModelSummary", device: DeviceInfo) -> ShapePolicy:
        """(optional) Shape buckets for a model. Default: any shape."""
        return ShapePolicy()

    def child_env(self, role: Role, devices: Sequence[DeviceInfo]) -> Mapping[str, str]:
        """(optional) Environment for a process that will open ``devices``. Default: none."""
        return {}

    def kernels(self, device: DeviceInfo) -> Sequence[Provider]:
        """(optional) Kernel providers, preferred ones first. Default: none."""
        return ()

    def attention(self, device: DeviceInfo) -> "Sequence[type[AttentionBackend]]":
        """(optional) Attention backends, preferred ones first. Default: the reference alone."""
        return ()

    def executor(
        self, device: Device, config: ConfigView, parts: "ModelParts"
    ) -> "ModelExecutor | None":
        """(optional) An executor that runs whole steps itself. Default: the core's runner.

        ``parts`` offers the model's modules and operations to those that run them. It honours
        ``cache.block_size``, ``scheduler.max_num_seqs`` (rows) and
        ``scheduler.max_num_batched_tokens`` of ``config``.
        """
        return None

    def doctor(self, device: DeviceInfo) -> Mapping[str, str]:
        """(optional) Further facts to print, such as library versions. Default: none."""
        return {}

    def roofline(self, device: DeviceInfo, measure: bool = False) -> Roofline | None:
        """(optional) Peaks of a device, for ``cardan plan``. Default: unknown.

        ``measure``: where no data sheet has them they may be measured, in about a second; without
        it nothing is run. The device may be one of ``known_devices`` that is not here.
        """
        return None

    def known_devices(self) -> Sequence[DeviceInfo]:
        """(optional) Devices that can be planned for without being here. Default: none."""
        return ()
