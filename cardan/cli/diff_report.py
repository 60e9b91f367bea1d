"""The result of ``cardan diff``, for the terminal and as plain data."""

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from cardan.diff.answers import Answer, Answers
    from cardan.diff.judge import CallDiff
    from cardan.diff.replay import ReplayResult
    from cardan.diff.run import DiffResult
    from cardan.diff.saved_call import SavedCall

# Calls shown before and after the first that is out of tolerance.
_BEFORE, _AFTER = 3, 2


def verdict(result: "DiffResult") -> str:
    """The outcome in a sentence or two."""
    calls = result.calls
    first = calls.first
    if first is not None:
        call = first.diff
        part = call.faulty_part
        inner = "" if part is None else f", in its part {part.op} by {part.provider}"
        return (
            f"different: the first call out of tolerance is {call.op} in {call.path or 'the model'}"
            f" by {call.provider}{inner} (request {first.request + 1}, step {call.step})"
        )
    if result.drifts:
        return (
            "different: every call is within tolerance by itself, but log-probabilities are off by "
            f"up to {max(calls.logprob_errors):.3g} (accepted: {result.logprob_tolerance:g}): "
            "errors add up over the layers, so look where propagated errors grow"
        )
    if result.is_equal:
        return "equal"
    if calls.note:
        return "different: answers are not the same"
    return (
        "different: the ordinary run's answers are not the same, though every watched call is "
        "right. The watched run has no graphs, no sampling and one sequence a step: try "
        "--enforce-eager, then cardan conformance"
    )


def print_diff(console: "Console", result: "DiffResult") -> None:
    """Who was compared, answers, layers, the calls around the first fault, and the verdict."""
    from rich.markup import escape

    for title, side in (("examined", result.subject), ("against", result.reference)):
        text = f"{title:<9} {side.platform}: {side.device}, {side.dtype}"
        console.print(escape(text), soft_wrap=True)
    _print_answers(console, result)
    calls = result.calls
    if calls.note:
        console.print(f"\n{escape(calls.note)}", soft_wrap=True)
    else:
        _print_layers(console, result)
        _print_first(console, result)
    style = "green" if result.is_equal else "bold red"
    console.print(f"\n[{style}]{escape(verdict(result))}[/]", soft_wrap=True)


def _print_answers(console: "Console", result: "DiffResult") -> None:
    table = _table(console, "Answers", ("request", "tokens", "log-prob. error", "first difference"))
    for item in result.answers:
        own = result.subject.answers[item.request]
        other = result.reference.answers[item.request]
        text = "none"
        if item.first is not None:
            text = (
                f"token {item.first}: {_token(result.subject, own, item.first)} instead of "
                f"{_token(result.reference, other, item.first)}, "
                + (
                    f"which is {item.margin:.3g} likelier"
                    if isfinite(item.margin)
                    else "far likelier"
                )
            )
        _row(table, str(item.request + 1), str(item.num_tokens), f"{item.logprob_error:.2g}", text)
    console.print(table)


def _print_layers(console: "Console", result: "DiffResult") -> None:
    groups: dict[str, list[CallDiff]] = {}
    for call in (call for found in result.calls.calls for call in found):
        groups.setdefault(layer_of(call.path), []).append(call)
    total = sum(map(len, groups.values()))
    title = f"Layers ({total} calls; errors in units of each operation's tolerance)"
    columns = ("layer", "worst call", "its error", f"{result.reference.platform}'s", "propagated")
    table = _table(console, title, columns)
    for name, found in groups.items():
        worst = max(found, key=lambda call: (call.is_faulty, call.error.ratio))
        _row(
            table,
            name,
            worst.op,
            f"{worst.error.ratio:.2g}",
            f"{worst.reference_error.ratio:.2g}",
            f"{max(call.propagated for call in found):.2g}",
            style="red" if worst.is_faulty else "",
        )
    console.print(table)
    errors = max(result.calls.logprob_errors, default=0.0)
    console.print(
        f"  log-probabilities on the same tokens: off by {errors:.2g} at most "
        f"(accepted: {result.logprob_tolerance:g})",
        soft_wrap=True,
    )


def _print_first(console: "Console", result: "DiffResult") -> None:
    from rich.markup import escape

    first = result.calls.first
    if first is None:
        return
    step = [item for item in result.calls.calls[first.request] if item.step == first.diff.step]
    around = step[max(0, first.diff.index - _BEFORE) : first.diff.index + _AFTER + 1]
    title = f"Calls of request {first.request + 1}, step {first.diff.step}"
    columns = ("op", "module", "by", "against", "error", f"{result.reference.platform}'s")
    table = _table(console, title, columns)
    for call in around:
        _row(
            table,
            call.op,
            call.path,
            call.provider,
            call.reference_provider,
            f"{call.error.ratio:.2g}",
            f"{call.reference_error.ratio:.2g}",
            style="bold red" if call.index == first.diff.index else "",
        )
    console.print(table)
    call = first.diff
    shapes = " ".join("x".join(map(str, shape)) for shape in call.shapes)
    console.print(f"  {escape(call.op)}: {escape(str(call.error))}", soft_wrap=True)
    console.print(f"  inputs: {shapes}, {call.dtype}", soft_wrap=True)
    for part in call.parts:
        text = f"  part {part.op} by {part.provider}: {part.error}"
        console.print(escape(text), soft_wrap=True)


def print_replay(console: "Console", call: "SavedCall", result: "ReplayResult") -> None:
    """The errors of one call."""
    from rich.markup import escape

    facts = call.facts
    lines = (
        f"{call.op} in {facts['module']} (request {facts['request'] + 1}, step {facts['step']})",
        f"  saved    {facts['platform']}, {call.provider}: {facts['error']}",
        f"  now      {result.platform}, {result.provider}: {result.error}",
        f"  its definition in this dtype: {result.body_error}",
    )
    for line in lines:
        console.print(escape(line), soft_wrap=True)
    if result.note:
        console.print(f"  [dim]{escape(result.note)}[/]", soft_wrap=True)
    console.print("[green]within tolerance[/]" if result.is_equal else "[bold red]off[/]")


def diff_fields(result: "DiffResult") -> dict[str, Any]:
    """Everything as plain data; infinite numbers are null."""
    calls = result.calls
    return {
        "equal": result.is_equal,
        "verdict": verdict(result),
        "subject": _side_fields(result.subject),
        "reference": _side_fields(result.reference),
        "logprob_tolerance": result.logprob_tolerance,
        "answers": [_finite(asdict(item)) for item in result.answers],
        "logprob_errors": _finite(calls.logprob_errors),
        "note": calls.note,
        "first": None
        if calls.first is None
        else {"request": calls.first.request, **_call_fields(calls.first.diff)},
        "calls": [[_call_fields(call) for call in found] for found in calls.calls],
    }


def layer_of(path: str) -> str:
    """``layers.3`` of ``layers.3.self_attn.o_proj``: up to the first number in it."""
    words = path.split(".")
    place = next((i for i, word in enumerate(words) if word.isdecimal()), 0)
    return ".".join(words[: place + 1]) or "the model"


def _side_fields(side: "Answers") -> dict[str, Any]:
    return {
        "platform": side.platform,
        "device": side.device,
        "dtype": side.dtype,
        "token_ids": [answer.token_ids for answer in side.answers],
    }


def _call_fields(call: "CallDiff") -> dict[str, Any]:
    fields: dict[str, Any] = _finite(asdict(call))
    return {**fields, "is_faulty": call.is_faulty}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value in (float("inf"), float("-inf")) else value


def _token(side: "Answers", answer: "Answer", place: int) -> str:
    if place >= len(answer.token_ids):
        return "the end"
    token = answer.token_ids[place]
    return f"{token} {side.texts[token]!r}"


def _table(console: "Console", title: str, columns: Sequence[str]) -> Any:
    from rich.table import Table

    console.print(f"\n[bold]{title}[/]")
    table = Table(box=None, header_style="dim", padding=(0, 1))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _row(table: Any, *cells: str, style: str = "") -> None:
    from rich.markup import escape

    table.add_row(*map(escape, cells), style=style)
