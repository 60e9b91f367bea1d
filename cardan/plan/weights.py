"""A model's weights on one rank: how many bytes, in which form, and what a token costs of them."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from cardan.core.types.errors import ConfigError
from cardan.core.types.ggml import BLOCK_TYPES, block_format
from cardan.core.types.kv import DTYPE_BYTES
from cardan.core.weights.tensor_table import StoredTensor
from cardan.plan.shape import ExpertShape, ModelShape

Role = Literal["embedding", "head", "linear", "experts", "replicated"]
# Whether an operation (block_linear, block_embedding, int8_linear) has a kernel for a form of
# weights of this many inputs and outputs.
HasKernel = Callable[[str, str, int, int], bool]

# Scheme -> the format of linear layers, and of the head.
_BLOCK_SCHEMES = {"q8": ("q8_0", "q8_0"), "q4": ("q4_1", "q8_0")}
KNOWN_SCHEMES = ("none", "gguf", "q8", "q4", "int8")
# Schemes whose linear layers keep full precision where they do not find blocks.
_KEEP_PRECISION = ("none", "gguf")
_INT8_SCALE_BYTES = 4
_ROW_PARALLEL = re.compile(r"\.(o_proj|down_proj)\.weight")
_KV_PROJECTION = re.compile(r"\.[kv]_proj\.")
_ROUTER = re.compile(r"\.(mlp|block_sparse_moe)\.gate\.weight")


@dataclass(frozen=True, slots=True)
class ServedTensor:
    """A tensor on one rank.

    ``dtype``: of the numbers that are multiplied, ``int8`` for blocks. ``is_shared``: its bytes are
    another tensor's, too, and take memory there.
    """

    role: Role
    elements: float
    nbytes: float
    dtype: str
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """All weights of one rank."""

    tensors: tuple[ServedTensor, ...]
    experts: ExpertShape | None

    @property
    def nbytes(self) -> int:
        """Of memory."""
        return math.ceil(sum(item.nbytes for item in self.tensors if not item.is_shared))

    def share_hit(self, tokens: int) -> float:
        """Of all experts, those that any of ``tokens`` go to in the mean, if choices are
        independent and even."""
        if self.experts is None:
            return 0.0
        return 1.0 - (1.0 - self.experts.top_k / self.experts.num_experts) ** tokens

    def read_bytes(self, tokens: int) -> float:
        """What a step of ``tokens`` reads: all but the table of embeddings, and the experts hit."""
        hit = self.share_hit(tokens)
        return sum(
            tensor.nbytes * (hit if tensor.role == "experts" else 1.0)
            for tensor in self.tensors
            if tensor.role != "embedding"
        )

    def operations(self, tokens: int, heads: int) -> dict[str, float]:
        """Of matrix products, by dtype; the head is applied to ``heads`` of the tokens."""
        found: dict[str, float] = {}
        for tensor in self.tensors:
            if tensor.role == "embedding":
                continue
            used = heads if tensor.role == "head" else tokens * self._share_used(tensor.role)
            found[tensor.dtype] = found.get(tensor.dtype, 0.0) + 2.0 * tensor.elements * used
        return found

    def _share_used(self, role: Role) -> float:
        if role != "experts" or self.experts is None:
            return 1.0
        return self.experts.top_k / self.experts.num_experts


def tensors_of_shape(shape: ModelShape, form: str) -> tuple[StoredTensor, ...]:
    """What a checkpoint of ``shape`` in ``form`` (``bf16``) holds, without biases and
    norms of heads."""
    nbytes = {"f32": 4, "bf16": 2, "f16": 2}[form]
    hidden, width = shape.hidden_size, shape.attention_width
    kv_width = shape.num_kv_heads * shape.head_dim

    def tensor(name: str, *sizes: int) -> StoredTensor:
        return StoredTensor(name, sizes, form, math.prod(sizes) * nbytes)

    def layer(prefix: str, experts: ExpertShape | None) -> Iterator[StoredTensor]:
        attention = f"{prefix}self_attn."
        yield tensor(f"{attention}q_proj.weight", width, hidden)
        yield tensor(f"{attention}k_proj.weight", kv_width, hidden)
        yield tensor(f"{attention}v_proj.weight", kv_width, hidden)
        yield tensor(f"{attention}o_proj.weight", hidden, width)
        size = shape.intermediate_size
        if experts is not None:
            size = experts.intermediate_size
            yield tensor(f"{prefix}mlp.gate.weight", experts.num_experts, hidden)
        stack = () if experts is None else (experts.num_experts,)
        mlp = f"{prefix}mlp." if experts is None else f"{prefix}mlp.experts."
        for name in ("gate_proj", "up_proj"):
            yield tensor(f"{mlp}{name}.weight", *stack, size, hidden)
        yield tensor(f"{mlp}down_proj.weight", *stack, hidden, size)
        yield tensor(f"{prefix}input_layernorm.weight", hidden)
        yield tensor(f"{prefix}post_attention_layernorm.weight", hidden)

    tensors = [
        tensor("model.embed_tokens.weight", shape.vocab_size, hidden),
        tensor("model.norm.weight", hidden),
    ]
    if not shape.is_tied:
        tensors.append(tensor("lm_head.weight", shape.vocab_size, hidden))
    num_sparse = 0 if shape.experts is None else shape.experts.num_layers
    for index in range(shape.num_layers):
        experts = shape.experts if index < num_sparse else None
        tensors += layer(f"model.layers.{index}.", experts)
    return tuple(tensors)


@dataclass(frozen=True, slots=True)
class WeightForms:
    """How weights are served: in ``dtype``, or by ``scheme`` where ``has_kernel``, on ``ranks``.

    ``copies_head``: the head's kernel has a form of its own, which a tied head cannot share with
    the embeddings.
    """

    dtype: str
    scheme: str
    ranks: int
    has_kernel: HasKernel
    copies_head: bool

    def serve(self, tensors: Iterable[StoredTensor], shape: ModelShape) -> ServedWeights:
        """One rank's share of a model's tensors.

        Raises:
            ConfigError: ranks cannot have equal shares, or the scheme's sizes are not known.
        """
        if self.scheme not in KNOWN_SCHEMES:
            raise ConfigError(
                f"model.quantization {self.scheme}: sizes of this scheme are not known here; "
                f"choose one of {', '.join(KNOWN_SCHEMES)} (none: the most that it can take)"
            )
        self._check_ranks(shape)
        served: list[ServedTensor] = []
        for tensor in tensors:
            role = _role(tensor)
            if role == "head" and shape.is_tied:
                continue
            one = self._served(tensor, role, shape)
            served.append(one)
            if role == "embedding" and shape.is_tied:
                head = self._served(tensor, "head", shape)
                served.append(self._tied_head(head, one))
        return ServedWeights(tuple(served), shape.experts)

    def _check_ranks(self, shape: ModelShape) -> None:
        kv_heads, ranks = shape.num_kv_heads, self.ranks
        sizes = {"num_attention_heads": shape.num_heads}
        if shape.experts is None:
            sizes["intermediate_size"] = shape.intermediate_size
        else:
            sizes["moe_intermediate_size"] = shape.experts.intermediate_size
        for name, size in sizes.items():
            if size % ranks:
                raise ConfigError(
                    f"tensor_parallel_size is {ranks}, which does not divide {name} ({size}); use "
                    f"a divisor of {size}"
                )
        if kv_heads % ranks and ranks % kv_heads:
            raise ConfigError(
                f"tensor_parallel_size is {ranks}, neither a divisor nor a multiple of "
                f"num_key_value_heads ({kv_heads})"
            )

    def _served(self, tensor: StoredTensor, role: Role, shape: ModelShape) -> ServedTensor:
        share = self._share(tensor, role, shape)
        elements = tensor.num_elements * share
        form = self._form(tensor, role)
        if form == "int8":
            # A scale for each output, whose number is the share's unless inputs are shared out.
            scales = tensor.shape[0] * (1.0 if _ROW_PARALLEL.search(tensor.name) else share)
            return ServedTensor(role, elements, elements + _INT8_SCALE_BYTES * scales, "int8")
        if form is not None:
            block = block_format(form)
            return ServedTensor(role, elements, elements / block.elements * block.nbytes, "int8")
        return ServedTensor(role, elements, elements * DTYPE_BYTES[self.dtype], self.dtype)

    def _tied_head(self, head: ServedTensor, embedding: ServedTensor) -> ServedTensor:
        """The head of a tied model, which shares the embeddings' table if both are in full
        precision and neither the scheme nor the kernel wants a copy."""
        is_full = head.dtype == embedding.dtype == self.dtype
        is_kept = self.scheme in _KEEP_PRECISION and not self.copies_head
        return replace(head, is_shared=is_full and is_kept)

    def _share(self, tensor: StoredTensor, role: Role, shape: ModelShape) -> float:
        if role == "replicated" or self.ranks == 1:
            return 1.0
        if role in ("embedding", "head"):
            rows = tensor.shape[0]
            return -(-rows // self.ranks) / rows
        if _KV_PROJECTION.search(tensor.name):
            return max(1, shape.num_kv_heads // self.ranks) / shape.num_kv_heads
        return 1.0 / self.ranks

    def _form(self, tensor: StoredTensor, role: Role) -> str | None:
        """Format of blocks, or ``int8``; None: the model's dtype."""
        if self.scheme == "none" or role in ("experts", "replicated") or len(tensor.shape) != 2:
            return None
        rows, columns = tensor.shape
        if _ROW_PARALLEL.search(tensor.name):
            columns //= self.ranks
        stored = tensor.form if tensor.form in BLOCK_TYPES else None
        if role == "embedding":
            is_served = stored is not None and self.has_kernel(
                "block_embedding", stored, columns, rows
            )
            return stored if is_served and not rows % self.ranks else None
        if self.scheme == "int8":
            return "int8" if self.has_kernel("int8_linear", "int8", columns, rows) else None
        form = stored
        if self.scheme in _BLOCK_SCHEMES:
            form = _BLOCK_SCHEMES[self.scheme][role == "head"]
        if form is None or columns % block_format(form).elements:
            return None
        return form if self.has_kernel("block_linear", form, columns, rows) else None


def _role(tensor: StoredTensor) -> Role:
    if "embed_tokens" in tensor.name:
        return "embedding"
    if tensor.name.startswith("lm_head."):
        return "head"
    if ".experts." in tensor.name:
        return "experts"
    if len(tensor.shape) != 2 or _ROUTER.search(tensor.name):
        return "replicated"
    return "linear"
