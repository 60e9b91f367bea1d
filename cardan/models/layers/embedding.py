"""Token embeddings and the language-model head, their vocabulary shared out among the ranks."""

from collections.abc import Iterator

import torch
from torch import nn

from cardan.core.interfaces.model import BuildContext, WeightSlot
from cardan.core.interfaces.quantization import EmbeddingMethod, StoredBlocks
from cardan.core.interfaces.torch_linear import DenseEmbedding
from cardan.models.layers.decoder_config import DecoderConfig
from cardan.models.layers.linear import dtype_name, linear_method
from cardan.models.layers.sharding import vocab_span

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head"


class TokenEmbedding(nn.Module):
    """token_ids [T] -> [T, hidden_size], scaled where the architecture says so."""

    def __init__(self, config: DecoderConfig, build: BuildContext) -> None:
        super().__init__()
        self._span, self._rows = vocab_span(config.vocab_size, build.rank, build.world_size)
        self._communicator = build.communicator
        self._scale: float | None = None
        if config.embedding_scale is not None:
            self._scale = torch.tensor(config.embedding_scale, dtype=build.dtype).item()
        self.method = _embedding_method(self._rows, config.hidden_size, build)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = self._lookup(token_ids)
        return x if self._scale is None else x * self._scale

    def load(self, whole: torch.Tensor) -> None:
        """Take this rank's rows of the whole table; rows that pad it to equal shares are zero."""
        own = whole[self._span.start : self._span.stop]
        if self._rows > self._span.size:
            padding = own.new_zeros(self._rows - self._span.size, own.shape[1])
            own = torch.cat((own, padding))
        self.method.load(own)

    def load_stored(self, whole: StoredBlocks) -> bool:
        """Take this rank's rows as they are stored, unless they would have to be padded."""
        if self._rows > self._span.size:
            return False
        return self.method.load_stored(whole.rows(self._span.start, self._span.stop))

    def finish_loading(self) -> None:
        """Called once after every slot was loaded."""
        self.method.finish()

    def _lookup(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._communicator is None:
            return self.method.lookup(token_ids)
        rows = token_ids - self._span.start
        foreign = (rows < 0) | (rows >= self._span.size)
        own = self.method.lookup(rows.masked_fill(foreign, 0))
        return self._communicator.all_reduce(own.masked_fill(foreign[:, None], 0.0))


def _embedding_method(num_rows: int, hidden: int, build: BuildContext) -> EmbeddingMethod:
    scheme = build.quantization
    method = None
    if scheme is not None:
        dtype = dtype_name(build.dtype)
        method = scheme.embedding(build.ops, num_rows, hidden, dtype, build.device)
    return method or DenseEmbedding(build.ops, hidden, build.dtype, build.device)


class LMHead(nn.Module):
    """hidden [N, hidden_size] -> logits [N, vocab_size] float32, whole on every rank.

    A tied head shares the embedding's table where both keep it in the model's dtype and the head's
    kernel takes it as it is; a kernel with a form of its own has a copy in that form.
    """

    def __init__(self, config: DecoderConfig, build: BuildContext) -> None:
        super().__init__()
        self._vocab_size = config.vocab_size
        self._span, self._rows = vocab_span(config.vocab_size, build.rank, build.world_size)
        self._communicator = build.communicator
        self.method = linear_method(
            _HEAD,
            config.hidden_size,
            self._rows,
            build,
            float32_results=build.communicator is None,
        )
        self._widen = build.ops.bind(
            "to_float32", dtype=dtype_name(build.dtype), hidden=config.vocab_size
        )
        self._cap = config.logit_softcap
        self._soft_cap = build.ops.bind("soft_cap", dtype="float32", hidden=config.vocab_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = self._wide_logits(hidden)
        return wide if self._cap is None else self._soft_cap(wide, self._cap)

    def _wide_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._communicator is None:
            wide = self.method.apply_float32(hidden)
            if wide is not None:
                return wide
        logits = self.method.apply(hidden, None)
        if self._communicator is not None:
            # In the model's dtype, which is half as many bytes.
            logits = self._communicator.all_gather(logits, dim=-1)[:, : self._vocab_size]
        widened: torch.Tensor = self._widen(logits)
        return widened

    def load(self, whole: torch.Tensor) -> None:
        """Take this rank's rows; rows that pad them to equal shares are zero."""
        own = whole[self._span.start : self._span.stop]
        self.method.load(0, own)
        self._load_padding(own.dtype, own.shape[1])

    def load_stored(self, whole: StoredBlocks) -> bool:
        """Take this rank's rows as they are stored."""
        if not self.method.load_stored(0, whole.rows(self._span.start, self._span.stop)):
            return False
        self._load_padding(torch.float32, whole.in_features)
        return True

    def finish_loading(self) -> None:
        """Called once after every slot was loaded."""
        self.method.finish()

    def _load_padding(self, dtype: torch.dtype, hidden: int) -> None:
        count = self._rows - self._span.size
        if count:
            self.method.load(self._span.size, torch.zeros(count, hidden, dtype=dtype))


class _TiedTable:
    """One checkpoint tensor that is both the embedding's and the head's."""

    def __init__(self, embedding: TokenEmbedding, head: LMHead) -> None:
        self._embedding = embedding
        self._head = head
        # Who took the stored blocks and needs no more.
        self._is_embedded = False
        self._has_head = False

    def load_stored(self, whole: StoredBlocks) -> bool:
        self._is_embedded = self._embedding.load_stored(whole)
        self._has_head = self._head.load_stored(whole)
        return self._is_embedded and self._has_head

    def load(self, whole: torch.Tensor) -> None:
        if not self._is_embedded:
            self._embedding.load(whole)
        if self._has_head:
            return
        table = self._embedding.method.table
        if table is not None and self._head.method.keeps_precision:
            # This rank's rows, padded.
            self._head.method.load(0, table)
        else:
            self._head.load(whole)


def vocabulary_slots(
    config: DecoderConfig, embedding: TokenEmbedding, head: LMHead
) -> Iterator[WeightSlot]:
    """The slots of both; a single one feeds both where they are tied."""
    shape = (config.vocab_size, config.hidden_size)
    if config.tie_word_embeddings:
        tied = _TiedTable(embedding, head)
        yield WeightSlot(_EMBEDDING, shape, tied.load, load_stored=tied.load_stored)
        return
    yield WeightSlot(_EMBEDDING, shape, embedding.load, load_stored=embedding.load_stored)
    yield WeightSlot(f"{_HEAD}.weight", shape, head.load, load_stored=head.load_stored)
