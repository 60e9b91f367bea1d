"""Engines on the fake executor, without a model's files or a tokenizer."""

import time

from cardan.core.config.cache import CacheConfig
from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.config.scheduler import SchedulerConfig
from cardan.core.engine.client import EngineParts
from cardan.core.engine.engine import Engine
from cardan.core.kvcache.manager import KVCacheManager
from cardan.core.kvcache.sizing import size_cache
from cardan.core.scheduler.intake import Intake
from cardan.core.scheduler.scheduler import Scheduler
from cardan.core.types.engine_info import EngineInfo
from cardan.core.types.model import ModelSummary
from cardan.core.types.request import EngineRequest
from cardan.core.types.sampling_params import SamplingParams
from cardan.plugins.policies import FirstComePolicy
from cardan.testing.fake.platform import FakePlatform
from cardan.testing.fake.settings import FakeSettings

VOCAB = 997
BASE, MODULUS = 0x9E3779B97F4A7C15, 2**64


class FakeEngine:
    """An engine of the digest model, and the parts to look at."""

    def __init__(
        self,
        settings: FakeSettings,
        max_num_seqs: int = 8,
        num_blocks: int = 64,
        budget: int = 64,
        max_model_len: int = 256,
    ) -> None:
        self.config = EngineConfig(
            model=ModelConfig(model="digest"),
            cache=CacheConfig(block_size=16),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
        )
        platform = FakePlatform(settings)
        self.device = platform.open(platform.devices()[0])
        self.executor = platform.executor(self.device, self.config)
        summary = ModelSummary(
            architecture="Digest",
            vocab_size=VOCAB,
            hidden_size=1,
            num_layers=1,
            max_model_len=max_model_len,
            dtype="float32",
            config={},
        )
        self.executor.load(summary, None)
        kv = size_cache(self.executor.kv_specs(), 1 << 30, num_blocks, 1)
        self.executor.bind_kv(kv)
        self.cache = KVCacheManager(kv, enable_prefix_caching=True)
        intake = Intake(
            self.config.scheduler,
            FirstComePolicy(),
            self.cache,
            max_model_len,
            veto=lambda view: None,
            check_params=lambda params: None,
        )
        self.scheduler = Scheduler(self.config.scheduler, self.cache, intake, max_model_len, budget)
        self.engine = Engine(self.scheduler, self.executor, settings.depth)

    @property
    def counters(self):
        return self.device.counters

    def parts(self) -> EngineParts:
        """For a client; closes the device in the end."""
        info = EngineInfo(
            model="digest", architecture="Digest", platform="fake", device="fake",
            dtype="float32", vocab_size=VOCAB, max_model_len=256, max_num_seqs=8,
            max_num_batched_tokens=64, max_logprobs=0, block_size=16, num_blocks=64,
            kv_cache_bytes=0, weight_bytes=0,
        )  # fmt: skip

        class Nobody:
            def step_completed(self, stats) -> None: ...

        return EngineParts(
            self.engine,
            info,
            Nobody(),
            self.cache.reset_prefix_cache,
            lambda reason: self.executor.close(),
        )

    def run(self, requests: list[EngineRequest]) -> tuple[dict, dict]:
        """Tokens and ends of each key, in one go."""
        for request in requests:
            self.engine.add(request)
        tokens: dict[int, list[int]] = {}
        finished: dict[int, object] = {}
        while self.engine.has_work:
            outputs = self.engine.step()
            for key, token_id in zip(outputs.keys, outputs.token_ids, strict=True):
                tokens.setdefault(key, []).append(token_id)
            finished.update(outputs.finished)
        return tokens, finished

    def assert_idle(self) -> None:
        self.device.queue.drain()
        assert self.executor.num_live_rows == 0
        assert self.cache.num_used == 0
        assert self.scheduler.num_live == 0


def digest_request(
    key: int, prompt: list[int], max_tokens: int, seed: int | None = None, **params
) -> EngineRequest:
    return EngineRequest(
        key=key,
        request_id=str(key),
        prompt_token_ids=prompt,
        params=SamplingParams(
            temperature=0.0 if seed is None else 1.0, seed=seed, max_tokens=max_tokens, **params
        ),
        max_tokens=max_tokens,
        arrival_time=time.monotonic(),
    )


def digest_answer(prompt: list[int], max_tokens: int, seed: int | None = None) -> list[int]:
    """What the digest model answers, by its definition, in whole numbers."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        total = sum((token + 1) * pow(BASE, i, MODULUS) for i, token in enumerate(tokens))
        tokens.append(_mix(total % MODULUS ^ _mix((seed or 0) % MODULUS)) % VOCAB)
    return tokens[len(prompt) :]


def _mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
    value = (value ^ value >> 27) * 0x94D049BB133111EB % MODULUS
    return value ^ value >> 31
