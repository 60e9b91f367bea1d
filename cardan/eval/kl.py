"""``cardan eval kl``: how far a model's predictions are from another's, the base's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from cardan.bench.offline import Report, changed_settings
from cardan.bench.result import Result
from cardan.core.config.engine import EngineConfig
from cardan.core.types.engine_info import EngineInfo
from cardan.core.types.errors import ConfigError
from cardan.eval.logits import Comparison, LogitsOfWindow
from cardan.eval.run import EvalOptions, eval_result, score_windows
from cardan.eval.scorer import Float64, Scorer
from cardan.eval.statistics import divergence_figures, likelihood_figures, standard_error
from cardan.eval.text import Text, begin_token, encode_text, read_text
from cardan.eval.windows import Window, cut_windows


@dataclass(frozen=True, slots=True)
class _Scores:
    """What was seen of scored tokens; likelihoods are negative logarithms."""

    base_nll: Float64
    model_nll: Float64
    divergences: Float64
    same_top: npt.NDArray[np.bool_]

    def figures(self, num_bytes: int) -> dict[str, Any]:
        """``nll_increase`` is what the model's mean negative log-likelihood is above the base's."""
        increase = self.model_nll - self.base_nll
        return {
            "kl": divergence_figures(self.divergences),
            "kl_mean_se": standard_error(self.divergences),
            "same_top_token_fraction": float(self.same_top.mean()),
            "nll_increase": float(increase.mean()),
            "nll_increase_se": standard_error(increase),
            "model": likelihood_figures(self.model_nll, num_bytes),
            "against": likelihood_figures(self.base_nll, num_bytes),
        }


def _joined(scores: Sequence[_Scores]) -> _Scores:
    return _Scores(
        *(
            np.concatenate([getattr(score, item.name) for score in scores])
            for item in fields(_Scores)
        )
    )


def run_kl(
    config: EngineConfig, against: EngineConfig, options: EvalOptions, report: Report
) -> Result:
    """Compare the model of ``config`` with the base ``against``; both are open at once.

    An interrupt after the first window keeps what was compared.

    Raises:
        CardanError: a model cannot be opened, the two do not share a vocabulary, or the text does
            not fit the options.
        KeyboardInterrupt: before the first window was done.
    """
    options.windows.check()
    text = read_text(options.text)
    kept = LogitsOfWindow()
    comparison = Comparison(kept)
    with Scorer(against, kept.show) as base, Scorer(config, comparison.show) as model:
        for scorer in (base, model):
            scorer.check_context(options.windows.context)
        token_ids = common_tokens(base, model, text)
        windows = cut_windows(token_ids, options.windows, begin_token(model.tokenizer))

        def score(window: Window) -> _Scores:
            kept.begin(window, base.info.vocab_size)
            base_nll = -base.score(window)
            comparison.begin()
            model_nll = -model.score(window)
            return _Scores(base_nll, model_nll, comparison.divergences, comparison.same_top)

        scores, progress = score_windows(windows, score, report)
        metrics = _joined(scores).figures(progress.num_bytes(model.tokenizer))
        result = eval_result("kl", config, options, model.info, text, progress, metrics)
    result.config["against"] = {
        "model": against.model.model,
        "dtype": base.info.dtype,
        "engine": changed_settings(against),
    }
    result.notes.append(_base_note(base.info, result.config["against"]))
    return result


def _base_note(info: EngineInfo, against: dict[str, Any]) -> str:
    changed = [
        f"{name}={value}"
        for section in against["engine"].values()
        for name, value in section.items()
        if name != "dtype"
    ]
    return f"the base: {' '.join([info.model, info.dtype, *changed])}"


def common_tokens(base: Scorer, model: Scorer, text: Text) -> list[int]:
    """The text's token ids, the same for both models.

    Raises:
        ConfigError: they have different vocabularies or write the text differently.
    """
    sizes = base.info.vocab_size, model.info.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{base.info.model} has a vocabulary of {sizes[0]} tokens and {model.info.model} one "
            f"of {sizes[1]}: their predictions cannot be compared; choose models of one family"
        )
    ids = encode_text(base.tokenizer, text), encode_text(model.tokenizer, text)
    begins = begin_token(base.tokenizer), begin_token(model.tokenizer)
    if ids[0] != ids[1] or begins[0] != begins[1]:
        raise ConfigError(
            f"the tokenizers of {base.info.model} and {model.info.model} write the text "
            "differently: their predictions cannot be compared; choose models that share a "
            "tokenizer, or give both one with --tokenizer"
        )
    return ids[1]
