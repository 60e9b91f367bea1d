"""What evaluations share: their options, their way through the windows, and the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cardan.bench.offline import Report, changed_settings
from cardan.bench.result import Result, engine_facts, flatten
from cardan.core.config.engine import EngineConfig
from cardan.core.text.tokenizer import Tokenizer
from cardan.core.types.engine_info import EngineInfo
from cardan.eval.text import Text
from cardan.eval.windows import Window, WindowOptions

Score = TypeVar("Score")

# Most lines that tell of the progress of one run.
_REPORTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """An evaluation.

    Attributes:
        windows: How the text is cut.
        text: File of the text; None: the one in the package.
        label: What the run is called in tables.
        metadata: What else to remember.
    """

    windows: WindowOptions = field(default_factory=WindowOptions)
    text: Path | None = None
    label: str = ""
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """The windows that were scored, in how many seconds, and whether that is all of them."""

    windows: Sequence[Window]
    seconds: float
    interrupted: bool

    def figures(self) -> dict[str, float]:
        """How much was scored and how fast; ``computed_tokens`` counts context as well."""
        computed = sum(len(window.token_ids) for window in self.windows)
        return {
            "tokens": sum(len(window.scored) for window in self.windows),
            "computed_tokens": computed,
            "seconds": self.seconds,
            "computed_tokens_per_s": computed / self.seconds,
        }

    def num_bytes(self, tokenizer: Tokenizer) -> int:
        """Bytes of text that the scored tokens stand for."""
        tokens = (token for window in self.windows for token in window.scored)
        return sum(len(tokenizer.token_bytes(token)) for token in tokens)


def score_windows(
    windows: Sequence[Window], score: Callable[[Window], Score], report: Report
) -> tuple[list[Score], Progress]:
    """What ``score`` says of one window after the other. An interrupt keeps what was said.

    Raises:
        KeyboardInterrupt: before the first window was done.
    """
    began = time.perf_counter()
    every = -(-len(windows) // _REPORTS)
    scores: list[Score] = []
    try:
        for window in windows:
            scores.append(score(window))
            if len(scores) % every == 0 or len(scores) == len(windows):
                report(f"window {len(scores)} of {len(windows)} done")
    except KeyboardInterrupt:
        if not scores:
            report("interrupted before the first window was done: nothing was measured")
            raise
    done = len(scores)
    seconds = time.perf_counter() - began
    return scores, Progress(windows[:done], seconds, interrupted=done < len(windows))


def eval_result(
    kind: str,
    config: EngineConfig,
    options: EvalOptions,
    info: EngineInfo,
    text: Text,
    progress: Progress,
    metrics: dict[str, Any],
) -> Result:
    """The result of an evaluation; what must be equal to compare two is in its ``config``."""
    cut = options.windows
    load = {
        "text": text.name,
        "text_digest": text.digest,
        "context": cut.context,
        "stride": cut.step,
        "max_tokens": cut.max_tokens,
    }
    return Result(
        kind=kind,
        model=config.model.model,
        config={"load": load, "engine": changed_settings(config)},
        metrics={**metrics, **progress.figures()},
        samples=[flatten({**metrics, **progress.figures()})],
        device=engine_facts(info),
        label=options.label,
        metadata=options.metadata,
        interrupted=progress.interrupted,
    )
