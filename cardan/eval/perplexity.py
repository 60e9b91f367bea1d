"""``cardan eval perplexity``: how well a model, as it is served, predicts a text."""

from __future__ import annotations

import numpy as np

from cardan.bench.offline import Report
from cardan.bench.result import Result
from cardan.core.config.engine import EngineConfig
from cardan.eval.run import EvalOptions, eval_result, score_windows
from cardan.eval.scorer import Scorer
from cardan.eval.statistics import likelihood_figures
from cardan.eval.text import begin_token, encode_text, read_text
from cardan.eval.windows import cut_windows


def run_perplexity(config: EngineConfig, options: EvalOptions, report: Report) -> Result:
    """Score the text. An interrupt after the first window keeps what was scored.

    Raises:
        CardanError: the model cannot be opened, or the text does not fit the options.
        KeyboardInterrupt: before the first window was done.
    """
    options.windows.check()
    text = read_text(options.text)
    with Scorer(config) as scorer:
        scorer.check_context(options.windows.context)
        tokenizer = scorer.tokenizer
        token_ids = encode_text(tokenizer, text)
        windows = cut_windows(token_ids, options.windows, begin_token(tokenizer))
        logprobs, progress = score_windows(windows, scorer.score, report)
        metrics = likelihood_figures(-np.concatenate(logprobs), progress.num_bytes(tokenizer))
        return eval_result(
            "perplexity", config, options, scorer.info, text, progress, dict(metrics)
        )
