"""An engine on the fake executor, without a model's files or a tokenizer.

For tests and measurements of the loop: what its device computes costs next to nothing, and its
answers follow from a definition that fits into three lines (``digest_answer``).
"""

import time

from cardan.core.config.cache import CacheConfig
from cardan.core.config.engine import EngineConfig
from cardan.core.config.fallbacks import with_fallbacks
from cardan.core.config.model import ModelConfig
from cardan.core.config.scheduler import SchedulerConfig
from cardan.core.discovery import POLICIES, Discovery
from cardan.core.engine.client import EngineParts
from cardan.core.engine.engine import Engine
from cardan.core.engine.loop import Unobserved
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.kvcache.manager import KVCacheManager
from cardan.core.kvcache.sizing import size_cache
from cardan.core.scheduler.intake import Intake
from cardan.core.scheduler.scheduler import Scheduler
from cardan.core.types.engine_info import EngineInfo
from cardan.core.types.model import ModelSummary
from cardan.core.types.outputs import Finish
from cardan.core.types.request import EngineRequest
from cardan.core.types.sampling_params import SamplingParams
from cardan.testing.fake.counters import DeviceCounters
from cardan.testing.fake.executor import FakeExecutor
from cardan.testing.fake.opaque_device import OpaqueDevice
from cardan.testing.fake.platform import FakePlatform
from cardan.testing.fake.settings import FakeSettings
from cardan.testing.fake.step_models import DigestModel

VOCAB_SIZE = 997
BLOCK_SIZE = 16
_MODULUS = 2**64


class DigestEngine:
    """An engine of the digest model, and the parts to look at."""

    def __init__(
        self,
        settings: FakeSettings,
        max_num_seqs: int = 8,
        num_blocks: int = 64,
        budget: int = 64,
        max_model_len: int = 256,
    ) -> None:
        """``settings`` are of the executor tier and the digest model; ``budget`` tokens a step."""
        self.config = with_fallbacks(
            EngineConfig(
                model=ModelConfig(model="digest"),
                cache=CacheConfig(block_size=BLOCK_SIZE),
                scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
            )
        )
        self._max_num_seqs = max_num_seqs
        self._budget = budget
        self._max_model_len = max_model_len
        self.device, self.executor = _open(settings, self.config)
        self.executor.load(_summary(max_model_len), None)
        kv = size_cache(self.executor.kv_specs(), 1 << 30, num_blocks, 1)
        self.executor.bind_kv(kv)
        self.cache = KVCacheManager(kv, enable_prefix_caching=True)
        intake = Intake(
            self.config.scheduler,
            Discovery().load(POLICIES, self.config.scheduler.policy)(),
            self.cache,
            max_model_len,
            veto=lambda view: None,
            check_params=lambda params: None,
        )
        self.scheduler = Scheduler(self.config.scheduler, self.cache, intake, max_model_len, budget)
        self.engine = Engine(self.scheduler, self.executor, settings.depth)

    @property
    def counters(self) -> DeviceCounters:
        return self.device.counters

    def parts(self) -> EngineParts:
        """For a client, which closes the device in the end."""
        info = EngineInfo(
            model="digest",
            architecture="Digest",
            platform="fake",
            device=self.device.info.name,
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_model_len=self._max_model_len,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._budget,
            max_logprobs=0,
            block_size=BLOCK_SIZE,
            num_blocks=self.cache.config.num_blocks,
            kv_cache_bytes=self.cache.config.num_bytes,
            weight_bytes=0,
        )
        return EngineParts(
            self.engine,
            info,
            Unobserved(),
            self.cache.reset_prefix_cache,
            lambda reason: self.executor.close(),
        )

    def run(self, requests: list[EngineRequest]) -> tuple[dict[int, list[int]], dict[int, Finish]]:
        """Tokens and ends of each key, in one go."""
        for request in requests:
            self.engine.add(request)
        tokens: dict[int, list[int]] = {}
        finished: dict[int, Finish] = {}
        while self.engine.has_work:
            outputs = self.engine.step()
            for key, token_id in zip(outputs.keys, outputs.token_ids, strict=True):
                tokens.setdefault(key, []).append(token_id)
            finished.update(outputs.finished)
        return tokens, finished

    def idle_facts(self) -> dict[str, int]:
        """What must read zero when nothing is asked for."""
        self.device.queue.drain()
        return {
            "rows": self.executor.num_live_rows,
            "blocks": self.cache.num_used,
            "sequences": self.scheduler.num_live,
        }


def _open(settings: FakeSettings, config: EngineConfig) -> tuple[OpaqueDevice, FakeExecutor]:
    platform = FakePlatform(settings)
    device = platform.open(platform.devices()[0])
    if not isinstance(device, OpaqueDevice):
        raise UnsupportedError("the digest model needs the settings tier=executor model=digest")
    return device, FakeExecutor(device, settings, config)


def _summary(max_model_len: int) -> ModelSummary:
    return ModelSummary(
        architecture="Digest",
        vocab_size=VOCAB_SIZE,
        hidden_size=1,
        num_layers=1,
        max_model_len=max_model_len,
        dtype="float32",
        config={},
    )


def digest_request(
    key: int, prompt: list[int], max_tokens: int, seed: int | None = None, n: int = 1
) -> EngineRequest:
    """Greedy without a seed; with one, tokens depend on it."""
    return EngineRequest(
        key=key,
        request_id=str(key),
        prompt_token_ids=prompt,
        params=SamplingParams(
            temperature=0.0 if seed is None else 1.0, seed=seed, max_tokens=max_tokens, n=n
        ),
        max_tokens=max_tokens,
        arrival_time=time.monotonic(),
    )


def digest_answer(prompt: list[int], max_tokens: int, seed: int | None = None) -> list[int]:
    """What the digest model answers, by its definition, in whole numbers of any length."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        total = sum(
            (token + 1) * pow(DigestModel.BASE, i, _MODULUS) for i, token in enumerate(tokens)
        )
        tokens.append(_mix(total % _MODULUS ^ _mix((seed or 0) % _MODULUS)) % VOCAB_SIZE)
    return tokens[len(prompt) :]


def _mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % _MODULUS
    value = (value ^ value >> 27) * 0x94D049BB133111EB % _MODULUS
    return value ^ value >> 31
