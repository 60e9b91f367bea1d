"""From a byte budget to blocks, with numbers worked out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cardan.bootstrap.model_source import normal_kv_dtype
from cardan.core.kvcache.sizing import fit_model_len, format_bytes, group_layers, size_cache
from cardan.core.types.errors import ConfigError
from cardan.core.types.kv import KVCacheSpec

# 16 tokens, 2 heads, 8 + 8 elements of 2 bytes: 1024 bytes a block and layer.
SPEC = KVCacheSpec("full", 16, 2, 8, 8, "bfloat16")
WIDE = KVCacheSpec("full", 16, 4, 8, 8, "bfloat16")


def test_layers_with_equal_specs_share_a_group_in_order():
    groups = group_layers([WIDE, SPEC, WIDE, SPEC, SPEC])
    assert [group.layers for group in groups] == [(0, 2), (1, 3, 4)]
    assert [group.spec for group in groups] == [WIDE, SPEC]
    assert [group.bytes_per_block for group in groups] == [4096, 3072]


def test_scales_and_lone_latents_count():
    scaled = KVCacheSpec("full", 16, 2, 8, 8, "int8", scale_bytes=4)
    latent = KVCacheSpec("mla", 16, 1, 576, 0, "bfloat16")
    assert scaled.bytes_per_token == 2 * 2 * (8 + 4)
    # Scales are aligned to their size.
    odd = KVCacheSpec("full", 16, 2, 5, 9, "int8", scale_bytes=4)
    assert (odd.content_size, odd.bytes_per_token) == (16, 2 * 2 * 16)
    assert latent.bytes_per_token == 1152


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.integers(2048, 10**6), st.integers(1, 5000))
def test_blocks_fill_the_budget_or_what_can_be_used(budget, most_tokens):
    if budget // 3072 < 2:
        return
    config = size_cache([SPEC, WIDE], budget, None, most_tokens)
    assert config.num_bytes <= budget
    assert config.block_size == 16
    if config.num_tokens < most_tokens:
        assert config.num_bytes + 3072 > budget
    else:
        assert config.num_tokens - most_tokens < 16


def test_a_number_of_blocks_overrides_the_budget():
    config = size_cache([SPEC] * 3, 1, 7, 16)
    assert (config.num_blocks, config.num_usable_blocks, config.num_tokens) == (7, 6, 96)
    assert config.num_bytes == 7 * 3 * 1024


@pytest.mark.parametrize("budget", [0, 2047, -5])
def test_no_room_says_how_much_is_needed_and_what_to_do(budget):
    with pytest.raises(ConfigError) as caught:
        size_cache([SPEC], budget, None, 100)
    text = str(caught.value)
    assert "one block of 16 tokens needs 1.0 KiB (two at least)" in text
    assert format_bytes(budget) in text
    assert "--kv-cache-memory-bytes" in text


def test_a_context_that_fits_stays():
    config = size_cache([SPEC], 1, 5, 1)
    assert fit_model_len(config, 64, explicit=True) == (64, None)
    assert fit_model_len(config, 10, explicit=False) == (10, None)


def test_a_context_that_was_asked_for_and_does_not_fit_is_an_error():
    config = size_cache([SPEC], 1, 5, 1)
    with pytest.raises(ConfigError) as caught:
        fit_model_len(config, 65, explicit=True)
    text = str(caught.value)
    # 65 tokens need 5 blocks and the null block.
    assert "context of 65 tokens needs a KV cache of 6.0 KiB, available are 5.0 KiB" in text
    assert "(64 tokens)" in text
    assert "--max-model-len 64 or less" in text


def test_a_default_context_shrinks_with_a_warning():
    config = size_cache([SPEC], 1, 5, 1)
    length, warning = fit_model_len(config, 1000, explicit=False)
    assert length == 64
    assert "limited to 64 tokens" in warning


def test_what_is_needed_is_enough():
    """Following the message's advice on memory makes the context fit."""
    for wanted in (1, 15, 16, 17, 64, 65, 1000):
        needed = (-(-wanted // 16) + 1) * 1024
        config = size_cache([SPEC], needed, None, 10**6)
        assert fit_model_len(config, wanted, explicit=True) == (wanted, None)
        if needed > 2048:
            less = size_cache([SPEC], needed - 1, None, 10**6)
            with pytest.raises(ConfigError, match=format_bytes(needed)):
                fit_model_len(less, wanted, explicit=True)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (2**30, "1.00 GiB"),
        (5 * 2**40, "5120.00 GiB"),
    ],
)
def test_bytes_in_words(count, text):
    assert format_bytes(count) == text


def test_dtypes_of_caches_have_names():
    assert [normal_kv_dtype(name) for name in ("auto", "bf16", "int8", "torch.float16")] == [
        "auto",
        "bfloat16",
        "int8",
        "float16",
    ]
    with pytest.raises(ConfigError, match=r"cache\.kv_cache_dtype 'int4' is unknown; choose auto"):
        normal_kv_dtype("int4")
