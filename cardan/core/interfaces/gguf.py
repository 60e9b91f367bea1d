"""How the GGUF files of one architecture are read, for models that are not cardan's own."""

from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar


class GGUFArchitecture(ABC):
    """What a file calls tensors and settings. Found in the entry-point group ``cardan.gguf`` by
    the ``general.architecture`` of files; architectures that cardan reads itself come first.

    Nothing is instantiated. The module is imported by processes that have no torch: keep it apart
    from the model's.
    """

    contract: ClassVar[tuple[int, int]]
    # The model's name in ``cardan.models``, and the ``model_type`` of its ``config.json``.
    model: ClassVar[str]
    model_type: ClassVar[str]
    # What ``X`` of a tensor ``blk.N.X.weight`` (or bias) is behind ``model.layers.N.`` in Hugging
    # Face checkpoints: ``"attn_q": "self_attn.q_proj"``. The embeddings, the last norm and the head
    # have the same names in all architectures.
    layer_tensors: ClassVar[Mapping[str, str]]
    # Whether rows of each head of ``q_proj`` and ``k_proj`` are stored in the order of llama.cpp's
    # Llama (0, d/2, 1, d/2 + 1, ...).
    interleaves_heads: ClassVar[bool] = False
    # Whether what norms scale by is stored with 1 added to it.
    adds_one_to_norms: ClassVar[bool] = False

    @classmethod
    def config(cls, metadata: Mapping[str, object]) -> Mapping[str, Any]:
        """Entries of ``config.json`` beside, or in place of, what all architectures have: sizes,
        heads, norm's epsilon, rotary base, biases, tied embeddings, token ids.

        ``metadata``: the file's settings of its architecture, without the prefix
        (``attention.scale``). Values are numbers, strings, booleans, and lists or arrays of them.

        Raises:
            WeightsError: a setting is missing, or has a value that the model cannot have.
        """
        return {}
