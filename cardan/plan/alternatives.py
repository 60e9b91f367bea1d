"""What would change a plan: the same model with one setting moved, the cheapest change first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cardan.core.config.fallbacks import chosen
from cardan.core.types.errors import ConfigError
from cardan.core.types.kv import DTYPE_BYTES, KV_DTYPES
from cardan.plan.planner import Plan, PlanRequest, make_plan
from cardan.plan.target import known_target

_SHORTEST = 256
_FEWEST_ROWS = 8
_FEWEST_TOKENS = 512
# As users write it.
_KV_OPTIONS = {"float8_e4m3": "fp8"}


@dataclass(frozen=True, slots=True)
class Alternative:
    """An option of the command line, what it costs, and the plan with it."""

    option: str
    cost: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class _Change:
    option: str
    cost: str
    path: str
    value: object


def alternatives(request: PlanRequest, plan: Plan) -> tuple[Alternative, ...]:
    """Those changes that the device and the model allow, and that change something; ordered by
    what they cost: less work at once, a shorter context, accuracy, more devices."""
    found = []
    for change in _changes(request, plan):
        try:
            changed = make_plan(
                replace(request, config=request.config.with_value(change.path, change.value))
            )
        except ConfigError:
            continue
        if _is_other(changed, plan):
            found.append(Alternative(change.option, change.cost, changed))
    return tuple(found)


def remedies(request: PlanRequest, plan: Plan, found: Sequence[Alternative]) -> tuple[str, ...]:
    """What makes a model fit that does not, the cheapest first; empty where nothing is wrong."""
    if plan.does_fit:
        return ()
    named = [f"{item.option} ({item.cost})" for item in found if item.plan.does_fit]
    larger = _larger_device(request)
    if larger is not None:
        named.append(f"a larger device, such as {larger}")
    return tuple(named)


def _larger_device(request: PlanRequest) -> str | None:
    """Of the devices that the platform knows, the one with the least memory in which it fits."""
    platform = request.target.platform
    known = sorted(platform.known_devices(), key=lambda info: info.memory_bytes or 0)
    for info in known:
        try:
            plan = make_plan(replace(request, target=known_target(platform, info)))
        except ConfigError:
            continue
        if plan.does_fit:
            return info.name
    return None


def _is_other(changed: Plan, plan: Plan) -> bool:
    return (changed.fit, changed.need.weights) != (plan.fit, plan.need.weights)


def _changes(request: PlanRequest, plan: Plan) -> Iterator[_Change]:
    if not plan.does_fit and request.config.cache.kv_cache_memory_bytes is not None:
        path, option = "cache.kv_cache_memory_bytes", "no --kv-cache-memory-bytes"
        yield _Change(option, "the cache takes its share of the memory", path, None)
    yield from _smaller_steps(plan)
    yield from _shorter_context(request, plan)
    yield from _rounded_cache(request, plan)
    yield from _rounded_weights(plan)
    ranks = 2 * plan.config.parallel.tensor_parallel_size
    # On one device the ranks would only share what there is.
    if not request.target.is_shared_by_ranks:
        is_there = not request.target.is_here or len(request.target.devices) >= ranks
        cost = f"{ranks} devices" if is_there else f"{ranks} devices, which are not here"
        path = "parallel.tensor_parallel_size"
        yield _Change(f"--tensor-parallel-size {ranks}", cost, path, ranks)


def _smaller_steps(plan: Plan) -> Iterator[_Change]:
    config = plan.config
    if not plan.does_fit:
        tokens = chosen(config.scheduler.max_num_batched_tokens, "scheduler.max_num_batched_tokens")
        rows = chosen(config.scheduler.max_num_seqs, "scheduler.max_num_seqs")
        if rows > _FEWEST_ROWS:
            path, option = "scheduler.max_num_seqs", f"--max-num-seqs {_FEWEST_ROWS}"
            yield _Change(option, "fewer requests at once", path, _FEWEST_ROWS)
        if tokens > _FEWEST_TOKENS:
            path = "scheduler.max_num_batched_tokens"
            option = f"--max-num-batched-tokens {_FEWEST_TOKENS}"
            yield _Change(option, "slower prompts", path, _FEWEST_TOKENS)
    share = plan.need.utilization
    if plan.need.kv_budget is None and share < 0.95:
        path = "cache.memory_utilization"
        yield _Change("--memory-utilization 0.95", "less reserve of memory", path, 0.95)


def _shorter_context(request: PlanRequest, plan: Plan) -> Iterator[_Change]:
    """A context that fits, else half of what was wanted."""
    wanted = request.config.model.max_model_len
    if wanted is None or wanted <= _SHORTEST:
        return
    open_config = request.config.with_value("model.max_model_len", None)
    try:
        longest = make_plan(replace(request, config=open_config)).fit.max_model_len
    except ConfigError:
        return
    length = longest if not plan.does_fit and 0 < longest < wanted else wanted // 2
    path = "model.max_model_len"
    yield _Change(f"--max-model-len {length}", "shorter requests", path, length)


def _rounded_cache(request: PlanRequest, plan: Plan) -> Iterator[_Change]:
    known = dict.fromkeys((*request.target.capabilities.kv_dtypes, *KV_DTYPES))
    smaller = [name for name in known if DTYPE_BYTES[name] < DTYPE_BYTES[plan.kv_dtype]]
    for name in sorted(smaller, key=DTYPE_BYTES.__getitem__, reverse=True):
        if DTYPE_BYTES[name] == 1 or plan.kv_dtype == "float32":
            path = "cache.kv_cache_dtype"
            option = f"--kv-cache-dtype {_KV_OPTIONS.get(name, name)}"
            yield _Change(option, "a rounded KV cache", path, name)


def _rounded_weights(plan: Plan) -> Iterator[_Change]:
    if plan.scheme != "none":
        return
    for name, cost in (("int8", "8-bit weights"), ("q8", "8-bit weights"), ("q4", "5-bit weights")):
        yield _Change(f"--quantization {name}", cost, "model.quantization", name)
