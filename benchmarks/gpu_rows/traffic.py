"""Clients of one engine: requests of many kinds at random times, some of which leave early."""

import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field

from gpu_rows.agreement import answer_of

# Kind -> how often.
MIX = {
    "short": 8,
    "long prompt": 2,
    "long answer": 3,
    "shared prefix": 4,
    "sampled": 5,
    "with logprobs": 2,
    "several samples": 2,
    "aborted": 3,
    "gone": 3,
}
# Kinds whose answers can be asked for again alone.
_REPEATABLE = ("short", "long prompt", "long answer", "shared prefix")
# Arrivals a second, in spells of a second or two: calm, busy, and more than any engine does.
_RATES = (3.0, 30.0, 300.0)
_SPELL_S = 1.5
_NUM_PREFIXES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lengths in tokens of what clients ask for, and how many are on their way at most."""

    vocab_size: int
    max_model_len: int
    in_flight: int
    short_prompt: int = 64
    short_answer: int = 32
    long_answer: int = 250
    kept: int = 24


@dataclass(slots=True)
class Counts:
    """What became of requests. ``faults`` are in words; ``ends`` by kind."""

    ends: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def requests(self):
        return sum(self.ends.values())


class Traffic:
    """Sends requests and looks at what comes back. ``kept`` are answers to be asked for again:
    (prompt, number of tokens, (token ids, no tables))."""

    def __init__(self, engine, bounds, seed):
        self.kept = []
        self._engine = engine
        self._bounds = bounds
        self._rng = random.Random(seed)
        self._ids = itertools.count()
        self._seen = 0
        length = bounds.max_model_len // 3
        self._prefixes = [self._tokens(length) for _ in range(_NUM_PREFIXES)]

    async def run(self, seconds):
        """A rush, arrivals for so long, and the end of all of them; what became of them.

        The rush fills the engine, so that what only a full one does happens at any speed.
        """
        counts = Counts()
        rush = [self._visit(self._kind(), counts) for _ in range(self._bounds.in_flight)]
        live = {asyncio.create_task(visit) for visit in rush}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            rate = self._rng.choice(_RATES)
            spell = min(end, time.monotonic() + self._rng.expovariate(1 / _SPELL_S))
            while time.monotonic() < spell:
                live = {task for task in live if not task.done()}
                if len(live) >= self._bounds.in_flight:
                    await asyncio.wait(live, return_when=asyncio.FIRST_COMPLETED)
                    continue
                live.add(asyncio.create_task(self._visit(self._kind(), counts)))
                await asyncio.sleep(self._rng.expovariate(rate))
        if live:
            await asyncio.gather(*live)
        return counts

    def _kind(self):
        return self._rng.choices(list(MIX), list(MIX.values()))[0]

    def _tokens(self, count):
        return [self._rng.randrange(3, self._bounds.vocab_size) for _ in range(count)]

    def _request(self, kind):
        """Prompt, number of tokens to generate, and further settings."""
        rng, bounds = self._rng, self._bounds
        prompt = self._tokens(rng.randint(1, bounds.short_prompt))
        answer = rng.randint(1, bounds.short_answer)
        settings = {"temperature": 0}
        if kind == "long prompt":
            prompt = self._tokens(rng.randint(bounds.max_model_len // 2, bounds.max_model_len - 64))
        elif kind in ("long answer", "aborted", "gone"):
            answer = rng.randint(bounds.long_answer // 2, bounds.long_answer)
        elif kind == "shared prefix":
            prompt = rng.choice(self._prefixes) + prompt
        elif kind == "with logprobs":
            settings["logprobs"] = rng.choice((0, 5, 20))
            settings["prompt_logprobs"] = rng.choice((None, None, 2))
        elif kind in ("sampled", "several samples"):
            settings = self._sampling()
            settings["n"] = 1 if kind == "sampled" else rng.choice((2, 3))
        return prompt, min(answer, bounds.max_model_len - len(prompt)), settings

    def _sampling(self):
        rng = self._rng
        return {
            "temperature": rng.choice((0.3, 0.8, 1.3)),
            "top_p": rng.choice((1.0, 0.95, 0.5)),
            "top_k": rng.choice((0, 1, 50)),
            "min_p": rng.choice((0.0, 0.0, 0.05)),
            "repetition_penalty": rng.choice((1.0, 1.0, 1.2)),
            "presence_penalty": rng.choice((0.0, 0.5)),
            "seed": rng.choice((None, 7)),
        }

    async def _visit(self, kind, counts):
        prompt, answer, settings = self._request(kind)
        try:
            output = await self._ask(kind, prompt, answer, settings)
        except Exception as error:
            counts.faults.append(f"{kind}: {type(error).__name__}: {error}"[:300])
            return
        finally:
            counts.ends[kind] = counts.ends.get(kind, 0) + 1
        if output is None:
            return
        counts.tokens += output.num_output_tokens
        if fault := fault_of(output, answer, settings, is_aborted=kind == "aborted"):
            counts.faults.append(f"{kind}: {fault}")
        elif kind in _REPEATABLE:
            self._keep((prompt, answer, (answer_of(output)[0], [])))

    async def _ask(self, kind, prompt, answer, settings):
        """The last output; None: the client left before."""
        from cardan import SamplingParams, TokenPrompt

        params = SamplingParams(max_tokens=answer, ignore_eos=True, detokenize=False, **settings)
        request_id = f"soak-{next(self._ids)}"
        leaves_at = self._rng.randint(0, answer)
        stream = self._engine.generate(TokenPrompt(token_ids=prompt), params, request_id=request_id)
        last = None
        if kind in ("aborted", "gone") and self._rng.random() < 0.3:
            # Before it has run, or soon after.
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(self._rng.random() * 0.02)
            if kind == "gone":
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                await stream.aclose()
                return None
            await self._engine.abort(request_id)
            last = await first
        async for output in stream:
            last = output
            if kind in ("aborted", "gone") and output.num_output_tokens >= leaves_at:
                if kind == "gone":
                    await stream.aclose()
                    return None
                await self._engine.abort(request_id)
        return last

    def _keep(self, answer):
        """A fair choice among all so far."""
        self._seen += 1
        if len(self.kept) < self._bounds.kept:
            self.kept.append(answer)
        elif (place := self._rng.randrange(self._seen)) < self._bounds.kept:
            self.kept[place] = answer


def fault_of(output, answer, settings, *, is_aborted):
    """What is wrong with the last output of a request for ``answer`` tokens; empty: nothing."""
    if len(output.outputs) != settings.get("n", 1):
        return f"{len(output.outputs)} samples came"
    for item in output.outputs:
        count = len(item.token_ids)
        if is_aborted and item.finish_reason == "abort" and count <= answer:
            continue
        if (item.finish_reason, count) != ("length", answer):
            return f"{count} of {answer} tokens came, finish_reason {item.finish_reason}"
        if settings.get("logprobs") is not None and len(item.logprobs or ()) != count:
            return f"{len(item.logprobs or ())} tables of log-probabilities for {count} tokens"
    wants_prompt = settings.get("prompt_logprobs") is not None
    if wants_prompt and len(output.prompt_logprobs or ()) != len(output.prompt_token_ids):
        return "the prompt's log-probabilities are not one for each token"
    return ""
