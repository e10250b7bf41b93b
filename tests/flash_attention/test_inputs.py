"""Inputs that attention refuses by name: at every door alike, or at one of them."""

import math
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from lib.flash_attention import reference
from lib.flash_attention.cuda import attention as cuda
from lib.model.attention import attention

MASKED = ("scaled_dot_prod_attention", "vectorized_torch", "sdpa", "flash_attention_torch")
DOORS: dict[str, Callable[..., Tensor]] = {
    **{kernel: partial(attention, kernel=kernel) for kernel in MASKED},
    "reference": reference.flash_attention,
    "cuda": cuda.flash_attention,
}
ANY = (*DOORS, "triton")
FLASH = ("reference", "triton", "cuda")
SCALED = tuple(door for door in ANY if door != "reference")


def of(*shape: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.new_zeros(shape)


def mask(*shape: int, dtype: torch.dtype = torch.bool) -> dict:
    return {"mask": torch.ones(shape, dtype=dtype), "is_causal": False}


# doors, what is another q, k or v than one of (2, 4, 5, 8) or another option, and what is said
REFUSED = [
    (ANY, {"q": of(4, 5, 8)}, "(batch, heads, tokens, head_dim), got q (4, 5, 8)"),
    (ANY, {"v": of(2, 4, 6, 8)}, "v must have the batch size, heads and keys of k, got"),
    (ANY, {"v": of(2, 1, 5, 8)}, "v must have the batch size, heads and keys of k, got"),
    (ANY, {"q": of(3, 4, 5, 8)}, "one batch size and one head_dim, got q (3, 4, 5, 8)"),
    (ANY, {"q": of(2, 4, 5, 16)}, "one batch size and one head_dim, got q (2, 4, 5, 16)"),
    (ANY, {"q": of(2, 6, 5, 8)}, "heads of q must be divisible by heads of k and v, got q (2, 6,"),
    (ANY, {"q": of(2, 2, 5, 8)}, "heads of q must be divisible by heads of k and v, got q (2, 2,"),
    (ANY, {"q": of(2, 0, 5, 8)}, "heads of q must be divisible by heads of k and v, got q (2, 0,"),
    (ANY, {"kv": of(2, 0, 5, 8)}, "heads of q must be divisible by heads of k and v"),
    (ANY, {"qkv": of(2, 4, 5, 0)}, "head_dim must be at least 1, got 0"),
    (ANY, {"qkv": Tensor.long}, "must be floating-point numbers, got torch.int64"),
    (ANY, {"k": lambda x: x.to("meta")}, "must be on one device, got cpu, meta, cpu"),
    (ANY, {"scale": torch.ones(())}, "scale must be a number, got a tensor, which would get no"),
    (SCALED, {"scale": 0.0}, "scale must be more than 0 and finite, got 0.0"),
    (SCALED, {"scale": math.nan}, "scale must be more than 0 and finite, got nan"),
    (FLASH, {"v": of(2, 4, 5, 16)}, "v must have the shape of k, got q (2, 4, 5, 8), k (2, 4, 5,"),
    (FLASH, {"k": Tensor.double}, "one dtype of torch."),
    (("triton",), {"qkv": Tensor.double}, "torch.float32, got torch.float64"),
    (("cuda",), {"qkv": Tensor.float}, "got torch.float32, torch.float32, torch.float32; flash"),
    (("triton",), {"qkv": of(2, 4, 5, 257)}, "head_dim must be from 1 to 256, got 257"),
    (("cuda",), {"qkv": of(2, 4, 5, 129)}, "head_dim must be from 1 to 128, got 129; flash"),
    (("cuda",), {}, "on a CUDA device, got cpu; flash_attention_torch and sdpa run there"),
    (("triton",), {"precision": "tf16"}, "precision must be tf32x3, ieee, tf32, got 'tf16'"),
    (("reference",), {"query_tile": 0}, "query_tile must be at least 1, got 0"),
    (("reference",), {"key_tile": -1}, "key_tile must be at least 1, got -1"),
    (MASKED, mask(5, 5) | {"is_causal": True}, "is_causal must be False where a mask is given"),
    (MASKED, mask(5, 5, dtype=torch.float32), "mask must be bool, True where a query sees a key"),
    *(
        (MASKED, mask(*shape), f"mask must broadcast to .*, got {shape} for (2, 4, 5, 5)")
        for shape in [(4, 5), (1, 1, 1, 5, 5), (3, 1, 5, 5), (2, 5), (1, 3, 5, 5)]
    ),
]


@pytest.fixture(scope="module")
def doors() -> dict[str, Callable[..., Tensor]]:
    triton = pytest.importorskip("lib.flash_attention.triton_attention")
    return DOORS | {"triton": triton.flash_attention}


@pytest.mark.parametrize(
    ("names", "changes", "words"), REFUSED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_what_does_not_fit_is_refused_by_name_at_every_door(doors, names, changes, words):
    for name in names:
        x = torch.zeros(2, 4, 5, 8, dtype=torch.half if name == "cuda" else torch.float32)
        arguments = dict.fromkeys("qkv", x)
        for key, value in changes.items():
            is_tensors = set(key) <= set("qkv")
            arguments |= dict.fromkeys(key, value(x)) if is_tensors else {key: value}
        with pytest.raises(ValueError, match=re.escape(words).replace(r"\.\*", ".*")):
            doors[name](**arguments)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([(2, 5, 8), (3, 5, 8), (3, 5, 8)], "one batch size and one head_dim, got q (2, 5, 8), k"),
        ([(2, 5, 8), (2, 5, 8), (2, 6, 8)], "v must have the batch size, heads and keys of k, got"),
        ([(2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)], "must be (batch, tokens, head_dim), got q"),
        ([(5, 8), (5, 8), (5, 8)], "must be (batch, tokens, head_dim), got q (5, 8)"),
    ],
)
def test_the_classes_refuse_by_name_what_does_not_fit(shapes, words):
    for flash_class in (reference.FlashAttention, cuda.FlashAttentionCUDA):
        with pytest.raises(ValueError, match=re.escape(words)):
            flash_class.apply(*(torch.zeros(shape, dtype=torch.half) for shape in shapes))


def test_an_unknown_kernel_is_refused_with_the_known_ones():
    q = torch.zeros(1, 1, 1, 2)
    known = "kernel must be one of scaled_dot_prod_attention, .*flash_attention_cuda.*, got 'flash'"
    with pytest.raises(ValueError, match=known):
        attention(q, q, q, kernel="flash", **mask(1, 1))
