"""Helpers of the sampling tests: an op table of plain bodies, rows, and a slow float64 oracle."""

from types import SimpleNamespace

import numpy as np
import torch

from cardan.core.ops.compare import compose
from cardan.core.ops.reference.sampling_ops import SAMPLING_OPS
from cardan.core.sampling.sampler import Sampler
from cardan.core.sampling.sampling_states import SamplingStates
from cardan.core.types.sampling_params import SamplingParams
from cardan.core.types.step import NewRow


class BodyTable:
    """Serves each operation by its body; counts calls, of composite ones those of their parts."""

    def __init__(self):
        self.calls = []

    def bind(self, op, **attributes):
        assert attributes["dtype"] == "float32"
        (spec,) = [spec for spec in SAMPLING_OPS if spec.name == op]
        if spec.parts:
            return compose(spec, {part: self.bind(part, **attributes) for part in spec.parts})
        body = spec.body

        def counted(*args):
            self.calls.append(op)
            return body(*args)

        return counted

    def explain(self):
        return ()


def new_row(row, params, tokens=(), num_prompt=None, seed=0, stops=(), bad_words=()):
    return NewRow(
        row=row,
        key=row,
        token_ids=np.asarray(tokens, np.int32),
        num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
        num_computed_tokens=0,
        params=params,
        seed=seed,
        stop_token_ids=tuple(stops),
        bad_words_token_ids=tuple(bad_words),
        block_ids=(),
    )


def make(vocab_size, rows=(), max_num_rows=64, processors=(), **kwargs):
    """States with the rows added, and their sampler."""
    ops = BodyTable()
    states = SamplingStates(max_num_rows, vocab_size, "cpu", ops, processors, **kwargs)
    for row in rows:
        states.add(row)
    return SimpleNamespace(states=states, sampler=Sampler(states, ops), ops=ops)


def sample(kit, logits, rows, num_outputs=0, mask=None):
    logits = torch.as_tensor(np.array(logits), dtype=torch.float32)
    counts = np.broadcast_to(np.asarray(num_outputs, np.int64), (len(rows),)).copy()
    return kit.sampler.sample(logits, np.asarray(rows), counts, mask)


def random_logits(num_rows, seed, vocab_size=40, ties=False):
    x = np.random.default_rng(seed).standard_normal((num_rows, vocab_size)) * 2
    return (np.round(x * 2) / 2 if ties else x).astype(np.float32)


# ---- the oracle: one row, float64, loops ----


def _oracle_bans(logits, row: NewRow):
    """Logits without the tokens that allowed ids, bad words and min_tokens forbid."""
    params = row.params
    output = [int(t) for t in row.token_ids[row.num_prompt_tokens :]]
    x = [float(v) for v in np.asarray(logits, np.float32)]
    for t in range(len(x)):
        if params.allowed_token_ids is not None and t not in params.allowed_token_ids:
            x[t] = -np.inf
    for word in row.bad_words_token_ids:
        head = list(word[:-1])
        if len(head) <= len(output) and output[len(output) - len(head) :] == head:
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        for t in row.stop_token_ids:
            if t < len(x):
                x[t] = -np.inf
    return x


def oracle_logits(logits, row: NewRow, allowed_bits=None):
    """Logits after all edits, before temperature. ``row.token_ids`` holds all tokens so far."""
    params: SamplingParams = row.params
    x = _oracle_bans(logits, row)
    prompt = [int(t) for t in row.token_ids[: row.num_prompt_tokens]]
    output = [int(t) for t in row.token_ids[row.num_prompt_tokens :]]
    for t, bias in (params.logit_bias or {}).items():
        x[t] += bias
    for t in sorted({*prompt, *output}):
        count = output.count(t)
        if count or t in prompt:
            r = params.repetition_penalty
            x[t] = x[t] / r if x[t] > 0 else x[t] * r
        x[t] -= count * params.frequency_penalty
        if count:
            x[t] -= params.presence_penalty
    if allowed_bits is not None:
        for t in range(len(x)):
            if not (int(allowed_bits[t // 32]) >> (t % 32)) & 1:
                x[t] = -np.inf
    return np.asarray(x, np.float64)


def oracle_filter(x, top_k=0, top_p=1.0, min_p=0.0):
    """Set of kept tokens; x float64 logits after temperature."""
    x = np.asarray(x, np.float64)
    order = np.lexsort((np.arange(len(x)), -x)).tolist()
    if 0 < top_k < len(x):
        kth = x[order[top_k - 1]]
        order = [t for t in order if x[t] >= kth]
    weight = {t: np.exp(x[t] - x.max()) for t in order}
    kept = list(order)
    if top_p < 1:
        total, kept, mass = sum(weight.values()), [], 0.0
        for t in order:
            kept.append(t)
            mass += weight[t]
            if mass >= top_p * total:
                break
    return {t for t in kept if weight[t] >= min_p * weight[order[0]] and weight[t] > 0}


def oracle_probabilities(x, params: SamplingParams):
    """Distribution [V] float64 that the row's token is drawn from."""
    x = np.asarray(x, np.float64)
    if params.is_greedy:
        kept, temperature = {int(np.argmax(x))}, 1.0
    else:
        temperature = params.temperature
        kept = oracle_filter(x / temperature, params.top_k, params.top_p, params.min_p)
    p = np.zeros(len(x))
    for t in kept:
        p[t] = np.exp((x[t] - x.max()) / temperature)
    return p / p.sum()


def oracle_token(x, params, uniform):
    """Token of the inverse distribution function, and the distance of the draw to an edge."""
    edges = np.cumsum(oracle_probabilities(x, params))
    token = int(np.searchsorted(edges, uniform, side="right"))
    return token, float(np.abs(edges - uniform).min())
