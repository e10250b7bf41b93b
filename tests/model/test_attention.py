"""Every attention kernel against the formula in float64, and the KV cache against no cache."""

import dataclasses
import os
import shutil
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.model.attention import (
    KVCache,
    attention,
    kernel_function,
    scaled_dot_product_attention,
)
from lib.model.config import ATTENTION_KERNELS, ModelConfig
from lib.model.transformer import TransformerLM
from tests.flash_attention.cases import (
    Case,
    assert_error_at_most_twice_pytorchs,
    make_inputs,
    with_gradients,
)

EAGER_KERNELS = ("scaled_dot_prod_attention", "vectorized_torch", "sdpa")
CPU_KERNELS = (*EAGER_KERNELS, "flash_attention_torch")
NEEDS_COMPILER = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.slow,
]
COMPILED = pytest.param("vectorized_torch_compiled", marks=NEEDS_COMPILER)
ON_CPU_KERNELS = pytest.mark.parametrize("kernel", [*CPU_KERNELS, COMPILED])
CASES = [
    Case(1, 1, 2, heads=1, key_heads=1, batch=1),
    Case(97, 97, 32),
    Case(17, 17, 8, is_causal=False, heads=3, key_heads=3, scale=0.5),
    Case(5, 12, 16),
    Case(12, 5, 4, is_causal=False),
    Case(12, 5, 4),
    # neighboring heads share keys
    Case(5, 5, 8, heads=6),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        *((kernel, torch.float32) for kernel in EAGER_KERNELS),
        # the error of SDPA in bfloat16 is PyTorch's
        *((kernel, torch.bfloat16) for kernel in EAGER_KERNELS if kernel != "sdpa"),
        pytest.param("vectorized_torch_compiled", torch.float32, marks=NEEDS_COMPILER),
    ],
    ids=str,
)
def test_error_is_at_most_twice_pytorchs(kernel, case, dtype):
    assert_error_at_most_twice_pytorchs(partial(attention, kernel=kernel), case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [name for name in ATTENTION_KERNELS if name != "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_on_a_gpu_is_at_most_twice_pytorchs(kernel, dtype):
    if kernel == "flash_attention_cuda" and dtype == torch.float32:
        pytest.skip("16-bit numbers only")
    if dtype == torch.bfloat16 and os.environ.get("WORKBOOK_CUDA_ARCHITECTURE") == "compute_75":
        pytest.skip("a T4 has no bfloat16")
    for case in (CASES[1], CASES[2]):
        assert_error_at_most_twice_pytorchs(
            partial(attention, kernel=kernel), case, dtype, "cuda", roundings=2
        )


@ON_CPU_KERNELS
@pytest.mark.parametrize("shape", [(7, 9), (2, 1, 7, 9), (1, 3, 7, 9), (7, 1), (9,), ()], ids=str)
def test_masks_broadcast(kernel, shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[(..., 0) if shape else ()] = True
    ours = partial(attention, kernel=kernel, is_causal=False, mask=mask)
    settings = {"attn_mask": mask.expand(2, 3, 7, 9), "enable_gqa": True}
    right = partial(F.scaled_dot_product_attention, **settings)
    for key_heads in (3, 1):
        inputs = make_inputs(Case(7, 9, 4, heads=3, key_heads=key_heads), torch.float32)
        wide = [x.detach().double().requires_grad_() for x in inputs]
        for a, b in zip(with_gradients(ours, inputs), with_gradients(right, wide)):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-6)


@ON_CPU_KERNELS
def test_a_query_that_sees_no_key_gives_zeros_and_finite_gradients(kernel):
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[2] = False
    inputs = make_inputs(Case(4, 5, 8, batch=1), torch.float32)
    out, *gradients = with_gradients(
        partial(attention, kernel=kernel, is_causal=False, mask=mask), inputs
    )
    assert (out[:, :, 2] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][:, :, 2] == 0).all()


@pytest.mark.parametrize("leading", [(), (2, 3, 4)])
def test_the_naive_kernel_takes_any_leading_dimensions(leading):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(*leading, n, 8, generator=generator) for n in (5, 7, 7))
    mask = torch.ones(5, 7, dtype=torch.bool).tril()
    peer = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), peer)


@pytest.mark.parametrize("kernel", ["flash_attention_triton", "flash_attention_cuda"])
def test_gpu_kernels_on_a_cpu_are_refused(kernel):
    with pytest.raises(ValueError, match=r"device must be a CUDA GPU for .*, got cpu; use sdpa"):
        kernel_function(kernel, torch.device("cpu"))


CONFIG = ModelConfig(
    vocab_size=31, context_length=12, d_model=16, num_layers=2, num_heads=2, d_ff=24
)
VARIANTS = [
    {},
    {"positions": "none"},
    {"qk_norm": True},
    {"norm": "post", "tied_embeddings": True},
    {"norm": "none", "feed_forward": "silu"},
    {"attention_kernel": "vectorized_torch"},
    {"attention_kernel": "scaled_dot_prod_attention"},
]


def make_model(**changes) -> TransformerLM:
    config = dataclasses.replace(CONFIG, **changes)
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
@settings(max_examples=40)
def test_every_split_of_the_tokens_gives_the_same_logits(lengths, batch_size, variant):
    """So no logits depend on a later token, which the cache has not seen."""
    model, token_ids = make_model(**variant), make_token_ids(batch_size, sum(lengths))
    cache = KVCache(model.config, batch_size)
    ours = logits_in_parts(model, token_ids, lengths, cache)
    torch.testing.assert_close(ours, model(token_ids), rtol=1e-4, atol=1e-5)
    assert cache.length == sum(lengths)


def test_a_cache_fills_up_to_the_context_length_and_refuses_more_unchanged():
    model, token_ids = make_model(), make_token_ids(1, 12)
    cache = KVCache(CONFIG, 1)
    model(token_ids[:, :7], cache=cache)
    before = cache.keys.clone()
    with pytest.raises(ValueError, match=r"context_length 12, got 7 cached \+ 6 new tokens"):
        model(token_ids[:, :6], cache=cache)
    assert cache.length == 7
    assert cache.keys.equal(before)
    model(token_ids[:, 7:], cache=cache)
    assert cache.length == 12


def test_what_a_cache_holds_beyond_its_length_does_not_count_nor_after_a_reset():
    model, token_ids = make_model(), make_token_ids(2, 8)
    cache = KVCache(CONFIG, 2)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    for ids in (token_ids, token_ids.flip(1)):
        ours = logits_in_parts(model, ids, [3, 5], cache)
        torch.testing.assert_close(ours, model(ids), rtol=1e-4, atol=1e-5)
        cache.reset()


@pytest.mark.parametrize(
    ("changes", "batch_size", "dtype", "message"),
    [
        ({"num_heads": 4}, 2, None, r"\(2, 2, 4, 8\) torch.float32, got \(2, 4, 4, 4\)"),
        # which would be broadcast
        ({}, 1, None, r"\(2, 2, 4, 8\) torch.float32, got \(1, 2, 4, 8\)"),
        ({}, 2, torch.bfloat16, "torch.bfloat16, got .* torch.float32"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(changes, batch_size, dtype, message):
    model = make_model(**changes)
    with pytest.raises(ValueError, match=f"k must fit the cache, .*{message}"):
        model(make_token_ids(batch_size, 4), cache=KVCache(CONFIG, 2, dtype=dtype))


def test_values_unlike_the_keys_and_tokens_beyond_its_end_are_refused():
    cache, k = KVCache(CONFIG, 1), torch.ones(1, 2, 5, 8)
    for v in (k[:, :, :1], k.double()):
        with pytest.raises(ValueError, match="v must fit the cache"):
            cache.append(0, k, v)
    cache.advance(8)
    with pytest.raises(ValueError, match=r"k must fit the cache, \(1, 2, 4, 8\)"):
        cache.append(0, k, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_either_dtype_works_under_autocast(dtype):
    model, token_ids = make_model(attention_kernel="vectorized_torch"), make_token_ids(2, 9)
    cache = KVCache(CONFIG, 2, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        ours = logits_in_parts(model, token_ids, [4, 1, 4], cache)
    assert (ours.float() - model(token_ids)).norm() < 0.02 * model(token_ids).norm()
