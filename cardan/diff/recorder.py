"""Recording what a model calls: operations and attention, with their arguments and results.

Everything here stands between a model and its kernels only where ``cardan diff`` put it. An engine
that was built in the ordinary way has none of it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cardan.core.interfaces.attention import AttentionBackend, HeadRotation, LayerParams
from cardan.core.interfaces.kernels import Kernel, OpSpec, Provider, Tolerance
from cardan.core.interfaces.model import BuildContext, CausalLM, StepContext
from cardan.core.ops.registry import KernelRegistry
from cardan.core.types.kv import KVCacheSpec

ROTATE = "rotate and write"
WRITE = "write"
ATTENTION = "attention"


@dataclass(frozen=True, slots=True)
class Site:
    """What is called. ``spec`` is None for calls of an attention backend, which have ``kv``.

    ``tolerance`` is None where nobody states one for the dtype.
    """

    op: str
    provider: str
    attributes: Mapping[str, Any]
    tolerance: Tolerance | None
    spec: OpSpec | None = None
    kv: KVCacheSpec | None = None


@dataclass(frozen=True, slots=True)
class CallEvent:
    """One call that has just returned.

    ``path`` is the module it belongs to, ``depth`` 0 for what the model itself called and more for
    parts of that. ``args`` are the live arguments; a weight that a provider keeps in a form of its
    own stands there as it was loaded.
    """

    site: Site
    path: str
    depth: int
    args: tuple[Any, ...]
    result: Any


class Listener(Protocol):
    """Hears of calls, and says what the caller gets."""

    def called(self, event: CallEvent) -> Any: ...


class Recorder:
    """Shows the calls inside a model's passes to whoever listens."""

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._is_inside = False
        self._depth = 0
        self._path: list[str] = []
        self._owners: dict[int, str] = {}
        # By identity of the prepared form, which is held here so that the identity stays its own.
        self._loaded: dict[int, tuple[Any, Any]] = {}

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Show calls to ``listener`` meanwhile."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A pass of the model."""
        self._is_inside, self._depth = True, 0
        self._path.clear()
        try:
            yield
        finally:
            self._is_inside = False

    def watch(self, model: nn.Module) -> None:
        """Know from now on which module of ``model`` is running."""
        for name, module in model.named_modules():
            if name:
                module.register_forward_pre_hook(lambda *_of, name=name: self._path.append(name))
                module.register_forward_hook(lambda *_of: self._leave())

    def name_weights(self, model: nn.Module) -> None:
        """Know whose weight an argument is, for calls that no module's own pass makes."""
        self._owners = {id(item): name for name, item in model.named_parameters()}

    def remember(self, prepared: Any, loaded: Any) -> None:
        """``prepared`` is a kernel's own form of the weight ``loaded``."""
        if prepared is not loaded:
            self._loaded[id(prepared)] = (prepared, loaded)

    def around(self, site: Site, args: tuple[Any, ...], run: Callable[..., Any]) -> Any:
        """Call ``run(*args)``, and show that."""
        listener = self._listener
        if listener is None or not self._is_inside:
            return run(*args)
        mutated = site.spec.mutates if site.spec is not None else ()
        shown = tuple(
            arg.clone() if place in mutated else self._as_loaded(arg)
            for place, arg in enumerate(args)
        )
        self._depth += 1
        try:
            result = run(*args)
        finally:
            self._depth -= 1
        return listener.called(CallEvent(site, self._place_of(args), self._depth, shown, result))

    def _as_loaded(self, arg: Any) -> Any:
        return self._loaded.get(id(arg), (arg, arg))[1]

    def _place_of(self, args: Sequence[Any]) -> str:
        for arg in args:
            if isinstance(arg, nn.Parameter) and id(arg) in self._owners:
                return self._owners[id(arg)].rpartition(".")[0]
        return self._path[-1] if self._path else ""

    def _leave(self) -> None:
        self._path.pop()


class RecordingRegistry(KernelRegistry):
    """A registry whose kernels tell a recorder of their calls."""

    def __init__(
        self,
        recorder: Recorder,
        ops: Sequence[OpSpec],
        providers: Sequence[Provider],
        **settings: Any,
    ) -> None:
        """``settings`` are those of ``KernelRegistry``."""
        super().__init__(ops, providers, **settings)
        self._recorder = recorder
        self._specs = {op.name: op for op in ops}
        self._own_tolerances = {(item.op, item.name): item.tolerances for item in providers}

    def bind(self, op: str, **attributes: int | float | str | bool) -> Kernel:
        kernel = super().bind(op, **attributes)
        provider = self.resolve(op, **attributes).provider
        dtype = str(attributes["dtype"])
        own = self._own_tolerances.get((op, provider), {}).get(dtype)
        spec = self._specs[op]
        site = Site(op, provider, attributes, own or spec.tolerances.get(dtype), spec)

        def recorded(*args: Any) -> Any:
            return self._recorder.around(site, args, kernel)

        return recorded

    def prepare(self, op: str, weight: Any, **attributes: int | float | str | bool) -> Any:
        prepared = super().prepare(op, weight, **attributes)
        self._recorder.remember(prepared, weight)
        return prepared


def recording_model(base: type[CausalLM], recorder: Recorder) -> type[CausalLM]:
    """``base`` with its passes, and the modules that run in them, made known to ``recorder``."""

    class RecordingModel(base):  # type: ignore[valid-type, misc]
        """Computes what its base does."""

        def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
            super().__init__(config, build)
            if isinstance(self, nn.Module):
                recorder.watch(self)

        def finish_loading(self) -> None:
            super().finish_loading()
            if isinstance(self, nn.Module):
                recorder.name_weights(self)

        def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
            with recorder.passing():
                hidden: Tensor = super().forward(token_ids, step)
            return hidden

        def compute_logits(self, hidden: Tensor) -> Tensor:
            with recorder.passing():
                logits: Tensor = super().compute_logits(hidden)
            return logits

    return RecordingModel


def recording_attention(base: type[AttentionBackend], recorder: Recorder) -> type[AttentionBackend]:
    """``base`` under its name, whose calls ``recorder`` is told of."""

    class RecordingAttention(base):  # type: ignore[valid-type, misc]
        """Computes what its base does."""

        def __init__(self, spec: KVCacheSpec, layout: Any, device: Any) -> None:
            super().__init__(spec, layout, device)
            self._recorded_spec = spec

        def write(self, k: Tensor, v: Tensor, cache: Tensor, plan: Any) -> None:
            store = super().write
            recorder.around(self._site(WRITE, k), (k, v), lambda k, v: store(k, v, cache, plan))

        def rotate_and_write(
            self,
            qkv: tuple[Tensor, Tensor, Tensor],
            positions: Tensor,
            rotation: HeadRotation,
            cache: Tensor,
            plan: Any,
        ) -> Tensor:
            both = super().rotate_and_write
            rotated: Tensor = recorder.around(
                self._site(ROTATE, qkv[0]),
                (*qkv, positions, rotation),
                lambda q, k, v, positions, rotation: both(
                    (q, k, v), positions, rotation, cache, plan
                ),
            )
            return rotated

        def run(
            self,
            q: Tensor,
            cache: Tensor,
            plan: Any,
            layer: LayerParams,
            lse: Tensor | None = None,
        ) -> Tensor:
            attend = super().run
            out: Tensor = recorder.around(
                self._site(ATTENTION, q),
                (q, layer),
                lambda q, layer: attend(q, cache, plan, layer, lse),
            )
            return out

        def _site(self, op: str, x: Tensor) -> Site:
            tolerance = attention_tolerance(dtype_name(x.dtype), self._recorded_spec.dtype)
            attributes = {"dtype": dtype_name(x.dtype)}
            return Site(op, base.name, attributes, tolerance, kv=self._recorded_spec)

    RecordingAttention.__name__ = base.__name__
    return RecordingAttention


# As the conformance kit has them, of outputs of about unit size; a cache that is rounded to few
# bits may round a number that lies between two of them either way.
_ATTENTION_ERRORS = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}
_CACHE_ERRORS = {"int8": 2e-2, "float8_e4m3": 0.1, "float8_e5m2": 0.2}


def attention_tolerance(dtype: str, kv_dtype: str) -> Tolerance | None:
    """Accepted error of attention; None: unknown for ``dtype``."""
    own = _ATTENTION_ERRORS.get(dtype)
    if own is None:
        return None
    error = max(own, _ATTENTION_ERRORS.get(kv_dtype, 0.0), _CACHE_ERRORS.get(kv_dtype, 0.0))
    return Tolerance(error, error)


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
