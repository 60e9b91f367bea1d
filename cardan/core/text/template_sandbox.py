"""The Jinja environment of chat templates: a sandbox with bounds on time and memory.

Jinja's own sandbox keeps templates from Python's internals. This one also watches the clock at
loops and calls, and refuses what would make a text or a number beyond all need: repetition,
padding, formats with wide fields, repeated joining.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_MAX_POWER_BITS = 4096
_MAX_ITEMS = 1 << 20
# No identifiers of the language: templates cannot name them.
DEADLINE = "deadline of the rendering"
_WATCHED = "watched by the clock"
_MEASURED = "measured"
# Filters, and methods of strings, with numbers that say how much to write.
_SIZED_FILTERS = ("batch", "center", "indent", "slice", "truncate", "wordwrap")
_SIZED_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
# A field of a format that is this wide is an attack.
_WIDE_FIELD = re.compile(r"[0-9]{5}")
_WIDEST_FIELD = 9999


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The sandbox. A rendering needs the variable ``DEADLINE``, a time of ``time.monotonic``."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, max_chars: int) -> None:
        """``max_chars``: the longest text that any one operation may make."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationExtension, "jinja2.ext.loopcontrols"],
        )
        self._max_chars = max_chars
        self.filters["tojson"] = _to_json
        self.filters[_WATCHED] = _watched
        self.filters[_MEASURED] = self._measure
        for name in _SIZED_FILTERS:
            self.filters[name] = self._bounded(self.filters[name])
        self.filters["format"] = self._format
        self.filters["replace"] = self._replace
        self.globals.pop("lipsum")
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            dict=_Dict(),
            namespace=_Namespace,
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Watch().visit(super()._parse(source, name, filename))
        return tree

    def call(
        __self,
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call something. The names leave a template free to pass an argument ``self``."""
        _check_time(__context)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            if name in _SIZED_METHODS:
                __self._check_numbers(args)
            elif name == "replace" and len(args) > 1:
                __self._check_replacement(owner, *args[:2])
        return __self._measure(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandboxed method ``format`` or ``format_map`` of a string, if ``value`` is one."""
        sandboxed = super().wrap_str_format(value)
        if sandboxed is None:
            return None

        @wraps(sandboxed)
        def checked(*args: Any, **kwargs: Any) -> str:
            _check_fields(str(value.__self__), (*args, *kwargs.values()))
            return sandboxed(*args, **kwargs)

        return checked

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Apply an operator unless its result would be beyond all need."""
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(repeated, str) and isinstance(times, int):
                    self._check_size(len(repeated) * times)
                elif isinstance(repeated, list | tuple) and isinstance(times, int):
                    _check_items(len(repeated) * times)
        elif operator == "%" and isinstance(left, str):
            _check_fields(left, right if isinstance(right, tuple) else (right,))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_power(left, right)
        return self._measure(super().call_binop(context, operator, left, right))

    def _bounded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._check_numbers((*args, *kwargs.values()))
            return function(*args, **kwargs)

        return bounded

    def _format(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        _check_fields(str(text), (*args, *kwargs.values()))
        return str(text) % (kwargs or args)

    def _replace(self, text: Any, old: Any, new: Any, count: int | None = None) -> str:
        self._check_replacement(str(text), str(old), str(new))
        return str(text).replace(str(old), str(new), -1 if count is None else count)

    def _check_replacement(self, text: str, old: str, new: str) -> None:
        self._check_size(len(text) + text.count(old) * len(new))

    def _check_numbers(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, int):
                self._check_size(abs(value))

    def _measure(self, value: Any) -> Any:
        if isinstance(value, str):
            self._check_size(len(value))
        elif isinstance(value, list | tuple):
            _check_items(len(value))
        return value

    def _check_size(self, size: int) -> None:
        if size > self._max_chars:
            raise SecurityError("the result of an operation is too large")


class _Watch(NodeTransformer):
    """Lets every loop look at the clock, and measures what ``~`` joins."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _WATCHED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _MEASURED)


class _GenerationExtension(Extension):
    """Accepts ``{% generation %}``, which marks assistant text for training and changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse to a scope of its own that writes its body."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        scope: nodes.Node = nodes.CallBlock(self.call_method("_write"), [], [], body)
        return scope.set_lineno(lineno)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` is taken from the arguments so that a template may store that name.
        jinja2.utils.Namespace.__init__(*args, **kwargs)
        for name in dict(*args[1:], **kwargs):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """``dict`` for templates: it makes dictionaries and has no other attribute."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _check_time(context: jinja2.runtime.Context) -> None:
    if time.monotonic() > context.parent[DEADLINE]:
        raise SecurityError("it took too long; it may loop for ever")


def _check_items(count: int) -> None:
    if count > _MAX_ITEMS:
        raise SecurityError("the result of an operation is too large (items)")


def _check_power(base: int, exponent: int) -> None:
    if base.bit_length() * exponent > _MAX_POWER_BITS:
        raise SecurityError("the result of ** is too large")


def _check_fields(pattern: str, values: Iterable[Any]) -> None:
    """Refuse wide fields of a format, whether their width is written or an argument."""
    given: list[Any] = []
    for value in values:
        given += value.values() if isinstance(value, Mapping) else [value]
    wide = any(isinstance(value, int) and abs(value) > _WIDEST_FIELD for value in given)
    if _WIDE_FIELD.search(pattern) or (wide and ("*" in pattern or "{" in pattern)):
        raise SecurityError("a field of a format is too wide")


@jinja2.pass_context
def _watched(context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_time(context)
        yield item


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models have seen it in training: Jinja's own filter would escape HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
