"""From a configuration, a model's tensors and a device to a plan."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from cardan.bootstrap.model_source import (
    ModelSource,
    check_kv_dtype,
    max_model_len,
    normal_dtype,
    normal_kv_dtype,
)
from cardan.bootstrap.ranks import rank_devices
from cardan.core.config.engine import EngineConfig
from cardan.core.config.fallbacks import chosen
from cardan.core.constraint_solver import owned_constraints, solve
from cardan.core.interfaces.roofline import Roofline
from cardan.core.types.errors import ConfigError
from cardan.core.types.ggml import BLOCK_TYPES
from cardan.core.types.kv import SCALE_BYTES, KVCacheSpec
from cardan.core.weights.tensor_table import StoredTensor
from cardan.plan.memory import Fit, MemoryNeed, fit, graph_bytes, step_bytes
from cardan.plan.rates import RateModel, StepTime
from cardan.plan.shape import ModelShape, read_shape
from cardan.plan.target import Target
from cardan.plan.weights import ServedWeights, WeightForms, tensors_of_shape

_FORMS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_NOT_QUANTIZED = "none"
_GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class Load:
    """What rates are wanted for: sequences of a decode step, tokens that each of them sees, and
    tokens of a prompt; None: what suits the model."""

    batches: tuple[int, ...] = (1, 64, 256)
    context: int | None = None
    prompt: int | None = None


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked. ``tensors`` are empty where only the model's configuration is there."""

    config: EngineConfig
    source: ModelSource
    tensors: tuple[StoredTensor, ...]
    target: Target
    load: Load = Load()


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """Steps of ``batch`` sequences; ``has_room``: the cache holds their contexts."""

    batch: int
    context: int
    time: StepTime
    has_room: bool


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """One prompt of ``length`` tokens."""

    length: int
    time: StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer; sizes are one rank's. ``config`` is solved. Rates are empty where the device's
    peaks are not known.

    ``is_stored``: the tensors are those of files, not made up from the configuration. ``is_exact``:
    they are served as they are counted; kernels that bring weights into a form of their own may add
    to it.
    """

    config: EngineConfig
    shape: ModelShape
    kv_dtype: str
    scheme: str
    stored_bytes: int
    is_stored: bool
    is_exact: bool
    need: MemoryNeed
    kv_bytes_per_token: int
    fit: Fit
    decode: tuple[DecodeRate, ...]
    prefill: PrefillRate | None
    roofline: Roofline | None
    notes: tuple[str, ...]

    @property
    def does_fit(self) -> bool:
        return not self.fit.problem


def make_plan(request: PlanRequest) -> Plan:
    """Predict fit and rates.

    Raises:
        ConfigError: the engine would refuse the configuration.
    """
    target, source = request.target, request.source
    config = _solved(request)
    ranks = config.parallel.tensor_parallel_size
    shape = read_shape(source.architecture, source.config)
    scheme = _scheme(config, source)
    dtype = config.model.dtype
    tensors = request.tensors or tensors_of_shape(
        shape, _FORMS.get(source.dtype or dtype, _FORMS[dtype])
    )
    forms = WeightForms(
        dtype=dtype,
        scheme=scheme,
        ranks=ranks,
        has_kernel=partial(target.has_kernel, dtype=dtype),
        copies_head=target.copies_head(shape.hidden_size, shape.vocab_size, dtype),
    )
    weights = forms.serve(tensors, shape)
    spec = _kv_spec(config, shape, scheme, target)
    # Ranks on one device share its memory and its rates.
    parts = ranks if target.is_shared_by_ranks else 1
    roofline = _divided(target.roofline, parts)
    need = _need(request, config, shape, weights, parts)
    length = max_model_len(config.model, source)
    num_rows = chosen(config.scheduler.max_num_seqs, "scheduler.max_num_seqs")
    explicit = config.model.max_model_len is not None
    found = fit(need, [spec] * shape.num_layers, length, explicit, num_rows)
    plan = Plan(
        config=config,
        shape=shape,
        kv_dtype=spec.dtype,
        scheme=scheme,
        stored_bytes=sum(tensor.nbytes for tensor in tensors),
        is_stored=bool(request.tensors),
        is_exact=bool(request.tensors) and not forms.copies_head,
        need=need,
        kv_bytes_per_token=spec.bytes_per_token * shape.num_layers,
        fit=found,
        decode=(),
        prefill=None,
        roofline=roofline,
        notes=(*target.notes, *_notes(tensors, weights, scheme, ranks)),
    )
    if roofline is None or roofline.bytes_per_s is None:
        return plan
    model = RateModel(
        shape=shape,
        weights=weights,
        kv_bytes=spec.bytes_per_token,
        dtype=dtype,
        ranks=ranks,
        roofline=roofline,
        bytes_per_s=roofline.bytes_per_s,
    )
    return _with_rates(plan, model, request.load, length)


def _notes(
    tensors: tuple[StoredTensor, ...], weights: ServedWeights, scheme: str, ranks: int
) -> Iterator[str]:
    is_stored = scheme == _GGUF and any(tensor.form in BLOCK_TYPES for tensor in tensors)
    if is_stored and all(tensor.dtype != "int8" for tensor in weights.tensors):
        yield "no kernel of the platform takes this file's blocks: weights are decoded"
    if ranks > 1:
        yield "what ranks send each other is not counted"


def _with_rates(plan: Plan, model: RateModel, load: Load, length: int) -> Plan:
    context = min(load.context or 1024, length)
    prompt = min(load.prompt or 8192, length)
    step_tokens = chosen(
        plan.config.scheduler.max_num_batched_tokens, "scheduler.max_num_batched_tokens"
    )
    rates = tuple(
        DecodeRate(
            batch,
            context,
            model.decode(batch, context),
            has_room=batch * context <= plan.fit.kv_tokens,
        )
        for batch in load.batches
    )
    return replace(
        plan, decode=rates, prefill=PrefillRate(prompt, model.prefill(prompt, step_tokens))
    )


def _solved(request: PlanRequest) -> EngineConfig:
    """As the engine solves it, but for constraints of plugins."""
    target, config = request.target, request.config
    owner = f"platform {target.platform.name}"
    wishes = owned_constraints(target.platform.constrain(config, target.info), owner)
    config = solve(config, wishes).config
    dtypes = target.capabilities.dtypes
    dtype = normal_dtype(config.model.dtype)
    if dtype == "auto":
        own = request.source.dtype
        dtype = own if own in dtypes else dtypes[0]
    if dtype not in dtypes:
        raise ConfigError(
            f"model.dtype {dtype} is not available on {target.info.name}; choose one of "
            f"{', '.join(dtypes)}"
        )
    kv_dtype = normal_kv_dtype(config.cache.kv_cache_dtype)
    check_kv_dtype(kv_dtype, target.capabilities.kv_dtypes, target.info.name)
    if target.is_here:
        ranks = config.parallel.tensor_parallel_size
        rank_devices(target.platform.name, target.devices, ranks)
    config = config.with_value("model.dtype", dtype)
    return config.with_value("cache.kv_cache_dtype", kv_dtype)


def _scheme(config: EngineConfig, source: ModelSource) -> str:
    name = config.model.quantization
    is_gguf = source.files.gguf is not None
    if name is None and is_gguf:
        return _GGUF
    if name == _GGUF and not is_gguf:
        raise ConfigError(
            f"model.quantization {name} keeps the blocks of a GGUF file, and {source.files.name} "
            "is none; leave it out, or choose another"
        )
    if name is None and source.config.get("quantization_config") is not None:
        raise ConfigError(
            f"{source.files.name}: config.json: sizes of its quantization_config are not known "
            "here; --quantization none plans for full precision"
        )
    return name or _NOT_QUANTIZED


def _kv_spec(config: EngineConfig, shape: ModelShape, scheme: str, target: Target) -> KVCacheSpec:
    """What one layer keeps on one rank."""
    dtype, kv_dtype = config.model.dtype, config.cache.kv_cache_dtype
    if kv_dtype == "auto":
        is_rounded = scheme != _NOT_QUANTIZED and "float16" in target.capabilities.dtypes
        kv_dtype = "float16" if dtype == "float32" and is_rounded else dtype
    return KVCacheSpec(
        kind="full",
        block_size=chosen(config.cache.block_size, "cache.block_size"),
        num_kv_heads=max(1, shape.num_kv_heads // config.parallel.tensor_parallel_size),
        k_head_dim=shape.head_dim,
        v_head_dim=shape.head_dim,
        dtype=kv_dtype,
        scale_bytes=SCALE_BYTES.get(kv_dtype, 0),
    )


def _need(
    request: PlanRequest,
    config: EngineConfig,
    shape: ModelShape,
    weights: ServedWeights,
    parts: int,
) -> MemoryNeed:
    target = request.target
    total = target.info.memory_bytes
    reserved = 0 if target.roofline is None else target.roofline.reserved_bytes
    num_tokens = chosen(config.scheduler.max_num_batched_tokens, "scheduler.max_num_batched_tokens")
    num_rows = chosen(config.scheduler.max_num_seqs, "scheduler.max_num_seqs")
    ranks = config.parallel.tensor_parallel_size
    eager = chosen(config.device.enforce_eager, "device.enforce_eager")
    return MemoryNeed(
        total=None if total is None else total // parts,
        reserved=reserved // parts,
        weights=weights.nbytes,
        step=step_bytes(shape, config.model.dtype, num_tokens, num_rows, ranks),
        graphs=graph_bytes(target.capabilities.graphs == "full" and not eager),
        kv_budget=config.cache.kv_cache_memory_bytes,
        utilization=chosen(config.cache.memory_utilization, "cache.memory_utilization"),
    )


def _divided(roofline: Roofline | None, parts: int) -> Roofline | None:
    """One rank's share of a device's peaks."""
    if roofline is None or roofline.bytes_per_s is None or parts == 1:
        return roofline
    rates = {dtype: rate / parts for dtype, rate in roofline.flop_per_s.items()}
    return replace(roofline, bytes_per_s=roofline.bytes_per_s / parts, flop_per_s=rates)
