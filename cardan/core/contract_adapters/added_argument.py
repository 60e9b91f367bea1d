"""A member that takes one more argument than it did."""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

from cardan.core.interfaces.version import version_text


@dataclass(frozen=True, slots=True)
class AddedArgument:
    """``member`` of ``interface`` takes ``argument`` since contract ``since``.

    A class whose own member does not take it is called without it, until contract ``removed_in``.
    ``loss`` says what the plugin does without meanwhile.
    """

    interface: type
    member: str
    argument: str
    since: tuple[int, int]
    removed_in: tuple[int, int]
    loss: str

    def fits(self, loaded: type) -> bool:
        """Whether ``loaded`` implements the member in its former shape."""
        own = getattr(loaded, self.member, None)
        if not issubclass(loaded, self.interface) or own is getattr(self.interface, self.member):
            return False
        parameters = inspect.signature(own).parameters if callable(own) else {}
        takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
        return callable(own) and self.argument not in parameters and not takes_any

    def adapt(self, loaded: type) -> type:
        """A class that is ``loaded`` but for the member, which takes the argument and drops it."""
        former = getattr(loaded, self.member)
        num_taken = len(inspect.signature(former).parameters)

        @functools.wraps(former)
        def adapted(*args: Any, **kwargs: Any) -> Any:
            # New arguments are the last; the core may name them or not.
            kwargs.pop(self.argument, None)
            return former(*args[:num_taken], **kwargs)

        members = {
            self.member: adapted,
            "__module__": loaded.__module__,
            "__qualname__": loaded.__qualname__,
            "__doc__": loaded.__doc__,
        }
        return type(loaded)(loaded.__name__, (loaded,), members)

    def notice(self) -> str:
        """What the plugin's author is to change, and until when."""
        return (
            f"{self.member}() takes {self.argument!r} since contract {version_text(self.since)} "
            f"and is called without it ({self.loss}); add the argument before contract "
            f"{version_text(self.removed_in)}, which drops this help"
        )
