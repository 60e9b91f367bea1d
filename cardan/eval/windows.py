"""Cuts a text's tokens into the windows that are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cardan.core.types.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Window:
    """What the model is given at once: ``token_ids``, of which those from ``first`` on are scored.

    Each scored token is predicted from all tokens before it in the window, so ``first`` is at
    least 1.
    """

    token_ids: tuple[int, ...]
    first: int

    @property
    def scored(self) -> tuple[int, ...]:
        return self.token_ids[self.first :]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions:
    """How a text is cut.

    Attributes:
        context: tokens of a window, a begin token included.
        stride: tokens from one window's start to the next's, and at most scored in each; None:
            half of ``context``.
        max_tokens: tokens of the text that are used; 0: all.
    """

    context: int = 512
    stride: int | None = None
    max_tokens: int = 4096

    @property
    def step(self) -> int:
        return self.context // 2 if self.stride is None else self.stride

    def check(self) -> None:
        """Raise ConfigError, naming the option, for windows that cannot be."""
        if self.context < 2:
            raise ConfigError(
                f"context is {self.context}; it must be at least 2, a token and one before it"
            )
        if not 1 <= self.step <= self.context:
            raise ConfigError(
                f"stride is {self.step}; it must be from 1 to the context of {self.context} tokens"
            )
        if self.max_tokens and self.max_tokens < self.context:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}, less than one window of {self.context} tokens; "
                "raise --max-tokens or lower --context"
            )


def cut_windows(
    token_ids: Sequence[int], options: WindowOptions, bos_token_id: int | None
) -> list[Window]:
    """Windows over the tokens of a text, in order; no token is scored twice.

    Each window begins with ``bos_token_id`` where there is one. Every scored token has at least
    ``context - stride`` tokens before it in its window, and at least one; the last window may be
    shorter. This is the strided evaluation of Hugging Face's perplexity guide, but without the
    first tokens of the first window, which would have less context than all others.

    Raises:
        ConfigError: the options cannot be, or the text is shorter than one window.
    """
    options.check()
    begin = () if bos_token_id is None else (bos_token_id,)
    length = options.context - len(begin)
    used = tuple(token_ids[: options.max_tokens or None])
    if len(used) < length:
        raise ConfigError(
            f"the text has {len(used)} tokens, a window needs {length}; give a longer text, or "
            "a smaller --context"
        )
    step = min(options.step, length)
    windows: list[Window] = []
    scored_to = length - step
    for start in range(0, len(used), step):
        end = min(start + length, len(used))
        first = max(scored_to - start + len(begin), 1)
        windows.append(Window((*begin, *used[start:end]), first))
        scored_to = end
        if end == len(used):
            break
    return [window for window in windows if window.scored]
