"""Which platform and device, and which of its kernels."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Settings of the device.

    None leaves ``enforce_eager`` open: the platform may choose, else the engine does
    (``cardan.core.config.fallbacks``).

    Attributes:
        platform: platform name, optionally with device indices (``name:0,1``); None selects the
            best one present.
        kernels: pins and vetoes of kernel providers: ``op=provider``, ``-provider``, ``-op``.
        attention_backend: name of an attention backend; None takes the platform's first fit.
        enforce_eager: never capture graphs.
        strict_kernels: a provider that fails its self-check is an error, not a demotion.
        num_threads: host threads for computing; None follows affinity and cgroup limits.
    """

    platform: str | None = None
    kernels: tuple[str, ...] = ()
    attention_backend: str | None = None
    enforce_eager: bool | None = None
    strict_kernels: bool = False
    num_threads: int | None = None
