"""What no engine can go below on a device of given rates: weights read once a step or multiplied,
and the KV cache read once."""

# An H200, measured: bytes copied and operations of bfloat16 products, a second.
BYTES_PER_S = 4.31e12
FLOP_PER_S = 789e12


def layer_weights(shape, tokens=None):
    """Elements of one layer's matrices that a token is multiplied with, or (``tokens``) that a
    step of so many reads: as many experts as are hit in the mean by independent, even choices."""
    hidden, dim = shape["hidden_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    attention = dim * (2 * heads + 2 * kv_heads)
    num_experts = shape.get("num_experts")
    if num_experts is None:
        return hidden * (attention + 3 * shape["intermediate_size"])
    hit = shape["num_experts_per_tok"]
    if tokens is not None:
        hit = num_experts * (1 - (1 - hit / num_experts) ** tokens)
    return hidden * (attention + num_experts + 3 * hit * shape["moe_intermediate_size"])


def kv_bytes(shape):
    """Of one token."""
    return 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]


def decode_floor_s(shape, batch, context):
    head = shape["vocab_size"] * shape["hidden_size"]
    layers = shape["num_hidden_layers"]
    read = layers * layer_weights(shape, batch) + head
    multiplied = layers * layer_weights(shape) + head
    products = max(2 * read / BYTES_PER_S, 2 * multiplied * batch / FLOP_PER_S)
    return products + batch * context * kv_bytes(shape) / BYTES_PER_S


def prefill_floor_s(shape, length):
    """Attention's half under the causal mask is counted; the head is needed for one token."""
    layers = shape["num_hidden_layers"]
    width = shape["num_attention_heads"] * shape["head_dim"]
    operations = 2 * length * layers * layer_weights(shape) + 2 * layers * length**2 * width
    return operations / FLOP_PER_S


def throughput_floor_s(shape, requests, prompt, answer):
    """Prompts at the rate of matrix products, then decode steps of all requests at once."""
    prompts = requests * prefill_floor_s(shape, prompt)
    return prompts + answer * decode_floor_s(shape, requests, prompt + answer / 2)
