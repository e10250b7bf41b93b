"""With a KV cache the model computes what it computes without one."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.config_training import ModelConfig
from lib.kv_cache import KVCache
from lib.model import TransformerLM

CONFIG = ModelConfig(
    vocab_size=31, context_length=12, d_model=16, num_layers=2, num_heads=2, d_ff=24
)
VARIANTS = [
    {},
    {"positions": "none"},
    {"qk_norm": True},
    {"norm": "post"},
    {"attention_kernel": "vectorized_torch"},
    {"attention_kernel": "scaled_dot_prod_attention"},
]


def make_model(**settings) -> TransformerLM:
    config = dataclasses.replace(CONFIG, **settings)
    return TransformerLM(config, generator=torch.Generator().manual_seed(0)).requires_grad_(False)


def make_token_ids(batch_size: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(CONFIG.vocab_size, (batch_size, length), generator=generator)


def logits_in_parts(
    model: TransformerLM, token_ids: torch.Tensor, lengths: list[int], cache: KVCache
) -> torch.Tensor:
    parts = [model(part, cache=cache) for part in token_ids.split(lengths, dim=1)]
    return torch.cat(parts, dim=1)


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1).filter(lambda lengths: sum(lengths) <= 12),
    batch_size=st.integers(1, 3),
    variant=st.sampled_from(VARIANTS),
)
@settings(max_examples=60)
def test_every_split_of_the_tokens_gives_the_same_logits(lengths, batch_size, variant):
    model, token_ids = make_model(**variant), make_token_ids(batch_size, sum(lengths))
    cache = KVCache(model.config, batch_size)
    ours = logits_in_parts(model, token_ids, lengths, cache)
    torch.testing.assert_close(ours, model(token_ids), rtol=1e-4, atol=1e-5)
    assert cache.length == sum(lengths)


def test_a_cache_fills_up_to_the_context_length_and_no_further():
    model, token_ids = make_model(), make_token_ids(1, 12)
    cache = KVCache(CONFIG, 1)
    model(token_ids[:, :11], cache=cache)
    model(token_ids[:, 11:], cache=cache)
    message = r"token_ids has 12 cached \+ 1 new tokens; right is: at most context_length 12"
    with pytest.raises(ValueError, match=message):
        model(token_ids[:, :1], cache=cache)


def test_a_refused_token_leaves_the_cache_as_it_was():
    model, token_ids = make_model(), make_token_ids(1, 12)
    cache = KVCache(CONFIG, 1)
    model(token_ids[:, :7], cache=cache)
    before = cache.keys.clone()
    with pytest.raises(ValueError, match="7 cached"):
        model(token_ids[:, :6], cache=cache)
    assert cache.length == 7
    assert cache.keys.equal(before)


def test_what_lies_beyond_the_length_does_not_count():
    model, token_ids = make_model(), make_token_ids(2, 8)
    cache = KVCache(CONFIG, 2)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    ours = logits_in_parts(model, token_ids, [3, 5], cache)
    torch.testing.assert_close(ours, model(token_ids), rtol=1e-4, atol=1e-5)


def test_a_cache_set_back_takes_other_tokens():
    model, token_ids = make_model(), make_token_ids(1, 8)
    cache = KVCache(CONFIG, 1)
    model(token_ids, cache=cache)
    cache.length = 3
    other = (token_ids[:, 3:5] + 1) % CONFIG.vocab_size
    right = model(torch.cat([token_ids[:, :3], other], dim=1))[:, 3:]
    torch.testing.assert_close(model(other, cache=cache), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_another_number_of_sequences_is_an_error(batch_size):
    cache = KVCache(CONFIG, 2)
    with pytest.raises(ValueError, match=f"k has {batch_size} sequences; right is: the cache's 2"):
        make_model()(make_token_ids(batch_size, 4), cache=cache)


def test_a_cache_takes_as_much_memory_as_it_says():
    cache = KVCache(CONFIG, 3, dtype=torch.bfloat16)
    elements = 2 * CONFIG.num_layers * 3 * CONFIG.context_length * CONFIG.d_model
    assert cache.keys.nbytes + cache.values.nbytes == 2 * elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["sdpa", "vectorized_torch"])
def test_a_cache_of_either_type_serves_under_autocast(dtype, kernel):
    model, token_ids = make_model(attention_kernel=kernel), make_token_ids(2, 9)
    cache = KVCache(CONFIG, 2, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        ours = logits_in_parts(model, token_ids, [4, 1, 4], cache)
    assert (ours.float() - model(token_ids)).norm() < 0.02 * model(token_ids).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_on_a_gpu_gives_the_same_logits(dtype):
    model, token_ids = make_model().to("cuda"), make_token_ids(2, 12).cuda()
    cache = KVCache(CONFIG, 2, device="cuda", dtype=dtype)
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        ours = logits_in_parts(model, token_ids, [5, 1, 1, 5], cache)
    right = model(token_ids)
    assert (ours.float() - right).norm() < (1e-4 if dtype == torch.float32 else 0.02) * right.norm()
