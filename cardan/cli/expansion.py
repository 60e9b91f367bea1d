"""Commands that take a whole dataclass of options as their first argument."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints


def with_options(
    options: type[Any],
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Let a command that takes ``options`` as its first argument have all its fields as options.

    The fields come before the command's other parameters.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        names = {field.name: field for field in fields(options)}
        hints = get_type_hints(options, include_extras=True)
        own_hints = get_type_hints(command, include_extras=True)
        own = list(inspect.signature(command).parameters.values())[1:]

        def wrapper(**values: Any) -> int:
            given = options(**{name: values.pop(name) for name in names})
            return command(given, **values)

        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[name],
            )
            for name, field in names.items()
        ]
        parameters += [
            parameter.replace(
                kind=inspect.Parameter.KEYWORD_ONLY, annotation=own_hints[parameter.name]
            )
            for parameter in own
        ]
        wrapper.__name__ = command.__name__
        wrapper.__doc__ = command.__doc__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {item.name: item.annotation for item in parameters}
        return wrapper

    return decorate
