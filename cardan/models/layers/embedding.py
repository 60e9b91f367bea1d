"""Token embeddings and the language-model head, their vocabulary shared out among the ranks."""

from collections.abc import Iterator

import torch
from torch import nn

from cardan.core.interfaces.model import BuildContext, WeightSlot
from cardan.core.interfaces.quantization import LinearMethod
from cardan.models.layers.decoder_config import DecoderConfig
from cardan.models.layers.linear import DenseLinear, dtype_name, frozen, quantized_method
from cardan.models.layers.sharding import vocab_span

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head"


class TokenEmbedding(nn.Module):
    """token_ids [T] -> [T, hidden_size], scaled where the architecture says so."""

    def __init__(self, config: DecoderConfig, build: BuildContext) -> None:
        super().__init__()
        self._span, rows = vocab_span(config.vocab_size, build.rank, build.world_size)
        self._communicator = build.communicator
        self._scale: float | None = None
        if config.embedding_scale is not None:
            self._scale = torch.tensor(config.embedding_scale, dtype=build.dtype).item()
        self.weight = frozen(
            torch.empty(rows, config.hidden_size, dtype=build.dtype, device=build.device)
        )
        self._embedding = build.ops.bind(
            "embedding", dtype=dtype_name(build.dtype), hidden=config.hidden_size
        )

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = self._lookup(token_ids)
        return x if self._scale is None else x * self._scale

    def load(self, whole: torch.Tensor) -> None:
        """Take this rank's rows of the whole table; rows that pad it to equal shares are zero."""
        self.weight[: self._span.size].copy_(whole[self._span.start : self._span.stop])
        self.weight[self._span.size :].zero_()

    def _lookup(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._communicator is None:
            out: torch.Tensor = self._embedding(token_ids, self.weight)
            return out
        rows = token_ids - self._span.start
        foreign = (rows < 0) | (rows >= self._span.size)
        own = self._embedding(rows.masked_fill(foreign, 0), self.weight)
        return self._communicator.all_reduce(own.masked_fill(foreign[:, None], 0.0))


class LMHead(nn.Module):
    """hidden [N, hidden_size] -> logits [N, vocab_size] float32, whole on every rank.

    A tied head shares the embedding's weight. If a quantisation scheme takes the head, it has
    storage of its own even when tied, since embeddings are looked up in full precision.
    """

    def __init__(
        self, config: DecoderConfig, embedding: TokenEmbedding, build: BuildContext
    ) -> None:
        super().__init__()
        self._vocab_size = config.vocab_size
        self._span, self._rows = vocab_span(config.vocab_size, build.rank, build.world_size)
        self._communicator = build.communicator
        method = quantized_method(_HEAD, config.hidden_size, self._rows, build)
        self._shares_storage = method is None and config.tie_word_embeddings
        if method is None:
            self.weight = embedding.weight
            if not self._shares_storage:
                self.weight = frozen(torch.empty_like(embedding.weight))
            method = DenseLinear(self.weight, build.ops)
        self.method: LinearMethod = method
        self._cap = config.logit_softcap
        self._soft_cap = build.ops.bind("soft_cap", dtype="float32", hidden=config.vocab_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.method.apply(hidden, None)
        if self._communicator is not None:
            logits = self._communicator.all_gather(logits, dim=-1)[:, : self._vocab_size]
        logits = logits.float()
        return logits if self._cap is None else self._soft_cap(logits, self._cap)

    def load(self, whole: torch.Tensor) -> None:
        """Take this rank's rows, unless the embedding has them in storage that is shared."""
        if self._shares_storage:
            return
        own = whole[self._span.start : self._span.stop]
        self.method.load(0, own)
        if self._rows > self._span.size:
            self.method.load(own.shape[0], own.new_zeros(self._rows - own.shape[0], own.shape[1]))

    def finish_loading(self) -> None:
        """Called once after every slot was loaded."""
        self.method.finish()


def vocabulary_slots(
    config: DecoderConfig, embedding: TokenEmbedding, head: LMHead
) -> Iterator[WeightSlot]:
    """The slots of both; a single one feeds both where they are tied."""
    shape = (config.vocab_size, config.hidden_size)
    if not config.tie_word_embeddings:
        yield WeightSlot(_EMBEDDING, shape, embedding.load)
        yield WeightSlot(f"{_HEAD}.weight", shape, head.load)
        return

    def load_both(whole: torch.Tensor) -> None:
        embedding.load(whole)
        head.load(whole)

    yield WeightSlot(_EMBEDDING, shape, load_both)
