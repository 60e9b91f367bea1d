"""A plan as text and as plain data."""

from collections.abc import Sequence
from typing import Any

from cardan.core.kvcache.sizing import format_bytes
from cardan.plan.alternatives import Alternative, remedies
from cardan.plan.planner import DecodeRate, Plan, PlanRequest
from cardan.plan.rates import StepTime

_NO_PEAKS = (
    "unknown, as are this device's peaks; --measure measures them where the platform can, "
    "--device plans for a device whose data sheet is known"
)


def plan_fields(request: PlanRequest, plan: Plan, others: Sequence[Alternative]) -> dict[str, Any]:
    """The plan as JSON has it; times are seconds, sizes bytes of one rank.

    Each figure says whether it is ``exact``, an ``estimate``, a ``floor`` or an ``expectation``.
    """
    need, fit, info = plan.need, plan.fit, request.target.info
    stored, weights = _kind(plan.is_stored), _kind(plan.is_exact)
    cache = _kind(need.kv_budget is not None)
    return {
        "model": request.source.files.name,
        "architecture": request.source.architecture,
        "platform": info.platform,
        "device": info.name,
        "is_here": request.target.is_here,
        "dtype": plan.config.model.dtype,
        "quantization": plan.scheme,
        "kv_cache_dtype": plan.kv_dtype,
        "tensor_parallel_size": plan.config.parallel.tensor_parallel_size,
        "fits": plan.does_fit,
        "problem": fit.problem,
        "warning": fit.warning,
        "memory": {
            "total": _figure(need.total, _kind(request.target.is_here)),
            "reserved": _figure(need.reserved, "estimate"),
            "weights_stored": _figure(plan.stored_bytes, stored),
            "weights": _figure(need.weights, weights),
            "largest_step": _figure(need.step, "estimate"),
            "graphs": _figure(need.graphs, "estimate"),
            "kv_bytes_per_token": _figure(plan.kv_bytes_per_token, "exact"),
            "kv_cache": _figure(fit.kv_bytes, cache),
            "kv_tokens": _figure(fit.kv_tokens, cache),
            "max_model_len": fit.max_model_len,
            "requests": _figure(_requests(plan), cache),
        },
        "decode": [
            {"batch": rate.batch, "context": rate.context, "has_room": rate.has_room}
            | _time_fields(rate.time, rate.batch)
            for rate in plan.decode
        ],
        "prefill": None
        if plan.prefill is None
        else {"tokens": plan.prefill.length} | _time_fields(plan.prefill.time, plan.prefill.length),
        "sources": _sources(plan),
        "alternatives": [_alternative_fields(item) for item in others],
        "remedies": list(remedies(request, plan, others)),
        "notes": list(plan.notes),
    }


def plan_lines(request: PlanRequest, plan: Plan, others: Sequence[Alternative]) -> list[str]:
    """The plan for people."""
    lines = [_headline(request, plan), ""]
    lines += _memory_lines(plan, request.target.is_here)
    lines += ["", *_rate_lines(plan)]
    if others:
        lines += ["", *_alternative_lines(plan, others)]
    lines += [f"\nnote: {note}" for note in plan.notes]
    lines.append("")
    lines += _verdict(request, plan, others)
    return lines


def _headline(request: PlanRequest, plan: Plan) -> str:
    ranks = plan.config.parallel.tensor_parallel_size
    info = request.target.info
    spread = f", one of {ranks} ranks" if ranks > 1 else ""
    return (
        f"{request.source.files.name} ({request.source.architecture}, {plan.config.model.dtype}, "
        f"quantization {plan.scheme}) on {info.name} ({info.platform}){spread}"
    )


def _memory_lines(plan: Plan, is_here: bool) -> list[str]:
    need, fit = plan.need, plan.fit
    stored = "as stored" if plan.is_stored else "by config.json"
    weights = f"{_kind(plan.is_exact)}; {stored} {format_bytes(plan.stored_bytes)}"
    kv_token = f"{plan.kv_dtype}, {plan.kv_bytes_per_token} B a token (exact)"
    total = "unknown" if need.total is None else format_bytes(need.total)
    rows = [
        ("memory", total, "exact" if is_here else "data sheet"),
        ("  not to be had", format_bytes(need.reserved), "estimate"),
        ("  weights", format_bytes(need.weights), weights),
        ("  largest step", format_bytes(need.step), "estimate"),
        ("  graphs", format_bytes(need.graphs), "estimate"),
        ("  KV cache", format_bytes(fit.kv_bytes), _budget(plan)),
        ("KV cache holds", f"{fit.kv_tokens} tokens", kv_token),
    ]
    if plan.does_fit:
        requests = f"{_requests(plan):.1f} requests"
        rows.append(("  that is", requests, f"of {fit.max_model_len} tokens each"))
    return _table(rows)


def _rate_lines(plan: Plan) -> list[str]:
    if plan.prefill is None:
        return [f"speed: {_NO_PEAKS}"]
    rows = [("", "expected", "at best (floor)", "limited by")]
    for rate in plan.decode:
        rows.append(
            (
                f"decode, batch {rate.batch} x {rate.context}",
                *_speeds(rate.time, rate.batch),
                rate.time.limit if rate.has_room else "capacity: the KV cache is too small",
            )
        )
    prefill = plan.prefill
    label = f"prefill of {prefill.length}"
    rows.append((label, *_speeds(prefill.time, prefill.length), prefill.time.limit))
    return [*_table(rows), *(f"{name}: {text}" for name, text in _sources(plan).items())]


def _speeds(time: StepTime, tokens: int) -> tuple[str, str]:
    """Tokens a second, and the time."""
    expected = "unknown" if time.expected_s is None else _speed(time.expected_s, tokens)
    return expected, _speed(time.floor_s, tokens)


def _speed(seconds: float, tokens: int) -> str:
    time = f"{1000 * seconds:.3g} ms" if seconds < 0.999 else f"{seconds:,.1f} s"
    return f"{_rate(tokens / seconds)} tok/s ({time})".replace(",", " ")


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.{0 if tokens_per_s >= 10 else 1}f}"


def _alternative_lines(plan: Plan, others: Sequence[Alternative]) -> list[str]:
    rows = [("what would change it", "weights", "KV tokens", *_rate_titles(plan), "costs")]
    for item in others:
        other = item.plan
        tokens = f"{other.fit.kv_tokens}" if other.does_fit else "does not fit"
        rows.append(
            (
                item.option,
                format_bytes(other.need.weights),
                tokens,
                *(_rate_cell(rate) for rate in other.decode[:2]),
                item.cost,
            )
        )
    return _table(rows)


def _rate_titles(plan: Plan) -> tuple[str, ...]:
    return tuple(f"tok/s, batch {rate.batch}" for rate in plan.decode[:2])


def _rate_cell(rate: DecodeRate) -> str:
    seconds = rate.time.floor_s if rate.time.expected_s is None else rate.time.expected_s
    return _rate(rate.batch / seconds).replace(",", "")


def _verdict(request: PlanRequest, plan: Plan, others: Sequence[Alternative]) -> list[str]:
    if plan.does_fit:
        warning = f", but {plan.fit.warning}" if plan.fit.warning else ""
        return [f"it fits{warning}"]
    found = remedies(request, plan, others)
    lines = [f"it does not fit: {plan.fit.problem}"]
    if not found:
        return [*lines, "no single setting helps; take a smaller model"]
    return [*lines, "what helps, the cheapest first:", *(f"  {remedy}" for remedy in found)]


def _time_fields(time: StepTime, tokens: int) -> dict[str, Any]:
    expected = time.expected_s
    return {
        "seconds": {"floor": time.floor_s, "expectation": expected},
        "tokens_per_s": {
            "ceiling": tokens / time.floor_s,
            "expectation": None if expected is None else tokens / expected,
        },
        "limited_by": time.limit,
    }


def _alternative_fields(item: Alternative) -> dict[str, Any]:
    plan = item.plan
    return {
        "option": item.option,
        "cost": item.cost,
        "fits": plan.does_fit,
        "weights": plan.need.weights,
        "kv_tokens": plan.fit.kv_tokens,
        "decode": [
            {"batch": rate.batch} | _time_fields(rate.time, rate.batch) for rate in plan.decode
        ],
    }


def _sources(plan: Plan) -> dict[str, str]:
    roofline = plan.roofline
    if roofline is None:
        return {}
    sources = {"floors": roofline.source}
    if roofline.efficiency is not None:
        known = roofline.efficiency.source
        sources["expectations"] = f"floors by the shares of peaks that were reached: {known}"
    return sources


def _figure(value: float | None, kind: str) -> dict[str, Any]:
    return {"value": value, "kind": "unknown" if value is None else kind}


def _requests(plan: Plan) -> float:
    length = plan.fit.max_model_len
    return plan.fit.kv_tokens / length if length else 0.0


def _kind(is_exact: bool) -> str:
    return "exact" if is_exact else "estimate"


def _budget(plan: Plan) -> str:
    if plan.need.kv_budget is not None:
        return f"of {format_bytes(plan.need.kv_budget)}"
    return f"estimate: {plan.need.utilization:g} of the rest, less step and graphs"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their longest cell, the last one as it comes."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]
        ).rstrip()
        for row in rows
    ]
