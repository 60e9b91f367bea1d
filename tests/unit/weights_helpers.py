"""Writes GGUF files byte by byte, so that tests can also write broken ones."""

import struct

import numpy as np

from cardan.core.weights.gguf_checkpoint import GGUFCheckpoint

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_PACK = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "?",
    U64: "Q",
    I64: "q",
    F64: "d",
}


def gguf_string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(type_id, value):
    """`value` of an array is (item type, items)."""
    if type_id == STRING:
        return gguf_string(value)
    if type_id == ARRAY:
        item_type, items = value
        body = b"".join(gguf_value(item_type, item) for item in items)
        return struct.pack("<IQ", item_type, len(items)) + body
    return struct.pack("<" + _PACK[type_id], value)


def tensor_entry(name, dims, type_id, offset):
    """A table entry; `dims` in file order, the fastest first."""
    packed = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return gguf_string(name) + packed + struct.pack("<IQ", type_id, offset)


def gguf_bytes(
    metadata=(), entries=(), data=b"", *, version=3, num_tensors=None, num_entries=None, align=32
):
    """A file from (key, type, value) triples, table entries and the data section."""
    num_tensors = len(entries) if num_tensors is None else num_tensors
    num_entries = len(metadata) if num_entries is None else num_entries
    out = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)
    for key, type_id, value in metadata:
        out += gguf_string(key) + struct.pack("<I", type_id) + gguf_value(type_id, value)
    out += b"".join(entries)
    return out + b"\0" * (-len(out) % align) + data


def model_bytes(metadata, tensors):
    """A whole file of float32 tensors, `tensors` mapping names to arrays."""
    entries, data = [], b""
    for name, array in tensors.items():
        entries.append(tensor_entry(name, array.shape[::-1], 0, len(data)))
        raw = np.ascontiguousarray(array, np.float32).tobytes()
        data += raw + b"\0" * (-len(raw) % 32)
    return gguf_bytes(metadata, entries, data)


def model_metadata(arch, **changes):
    """A small model's metadata as triples; a change of None drops a key, dots are `__`."""
    fields = {
        "block_count": (U32, 2),
        "context_length": (U32, 512),
        "embedding_length": (U32, 32),
        "feed_forward_length": (U32, 64),
        "attention.head_count": (U32, 4),
        "attention.head_count_kv": (U32, 2),
        "attention.layer_norm_rms_epsilon": (F32, 1e-6),
        "rope.freq_base": (F32, 500000.0),
    }
    for key, change in changes.items():
        fields[key.replace("__", ".")] = change
    given = [(f"{arch}.{key}", *field) for key, field in fields.items() if field is not None]
    return [("general.architecture", STRING, arch), *given]


def llama_checkpoint(tmp_path, tensors=None, extra=(), **changes):
    """A tiny llama file's checkpoint."""
    base = {
        "token_embd.weight": np.zeros((96, 32)),
        "blk.0.attn_norm.weight": np.zeros(32),
        "blk.1.attn_norm.weight": np.zeros(32),
    }
    path = tmp_path / "m.gguf"
    metadata = [*model_metadata("llama", **changes), *extra]
    path.write_bytes(model_bytes(metadata, base | (tensors or {})))
    return GGUFCheckpoint(path)
