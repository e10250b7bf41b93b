"""Costs by formula against the module, PyTorch's FLOP counter, and what autograd keeps."""

import dataclasses

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from lib.model.config import ModelConfig, model_preset
from lib.model.costs import (
    activation_bytes,
    activation_bytes_by_part,
    flops_by_part,
    flops_per_token,
    num_parameters,
    parameters_by_part,
)
from lib.model.transformer import RMSNorm, TransformerLM

SMALL = ModelConfig(
    vocab_size=101, context_length=16, d_model=24, num_layers=2, num_heads=3, d_ff=41
)
NAIVE = dataclasses.replace(SMALL, attention_kernel="vectorized_torch")
VARIANTS = [
    {},
    {"tied_embeddings": True},
    {"feed_forward": "silu"},
    {"qk_norm": True},
    {"norm": "post"},
    {"norm": "none"},
    {"positions": "none"},
    {"qk_norm": True, "positions": "none"},
]
ON_VARIANTS = pytest.mark.parametrize("changes", VARIANTS, ids=str)


def count_weights(*modules: torch.nn.Module) -> int:
    return sum(weight.numel() for module in modules for weight in module.parameters())


@ON_VARIANTS
def test_parameters_by_part_are_those_of_the_modules_parts(changes):
    config = dataclasses.replace(SMALL, **changes)
    model = TransformerLM(config)
    attention = [
        getattr(layer.attn, f"{n}_proj") for layer in model.layers for n in ("qkv", "output")
    ]
    assert parameters_by_part(config) == {
        "token_embeddings": count_weights(model.token_embeddings),
        "attention": count_weights(*attention),
        "feed_forward": count_weights(*(layer.ffn for layer in model.layers)),
        "norms": count_weights(*(m for m in model.modules() if isinstance(m, RMSNorm))),
        "lm_head": 0 if model.lm_head is None else count_weights(model.lm_head),
    }
    assert num_parameters(config) == count_weights(model)


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"one of tiny, tinystories, .*xl.*, got 'huge'"):
        model_preset("huge")


@pytest.mark.parametrize("function", [num_parameters, flops_per_token, TransformerLM])
def test_costs_and_the_model_need_a_vocabulary(function):
    with pytest.raises(ValueError, match="vocab_size must be"):
        function(ModelConfig())


def counted_flops(config: ModelConfig, length: int, *, backward: bool, device: str = "cpu") -> int:
    """PyTorch's count for the loss of three sequences."""
    model = TransformerLM(config, device=device)
    token_ids = torch.zeros(3, length, dtype=torch.int64, device=device)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        loss = model.loss(token_ids, token_ids)
        if backward:
            loss.backward()
    return counter.get_total_flops()


@ON_VARIANTS
@pytest.mark.parametrize(("length", "backward"), [(1, True), (11, True), (16, False)])
def test_flops_are_those_that_pytorch_counts(changes, length, backward):
    config = dataclasses.replace(NAIVE, **changes)
    counted = counted_flops(config, length, backward=backward)
    assert flops_per_token(config, length, backward=backward) * 3 * length == counted


DTYPES = {
    "float32": {"element_bytes": 4},
    "autocast": {"element_bytes": 2},
    "bfloat16 weights": {"element_bytes": 2, "autocast": False},
}
ON_DTYPES = pytest.mark.parametrize("options", DTYPES.values(), ids=DTYPES)


def model_and_autocast(config: ModelConfig, options: dict, device: str = "cpu"):
    is_short, autocast = options["element_bytes"] == 2, options.get("autocast", True)
    dtype = torch.bfloat16 if is_short and not autocast else None
    model = TransformerLM(config, dtype=dtype, device=device)
    return model, torch.autocast(device, torch.bfloat16, enabled=is_short and autocast)


def kept_bytes(config: ModelConfig, options: dict) -> int:
    """Storages that autograd keeps after the loss of three sequences, without the model's own."""
    model, autocast = model_and_autocast(config, options)
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # held here, so that no address is used twice
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    token_ids = torch.zeros(3, config.context_length, dtype=torch.int64)
    with saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        model.loss(token_ids, token_ids.clone())
    return sum(kept[address].untyped_storage().nbytes() for address in kept.keys() - own)


@ON_VARIANTS
@ON_DTYPES
@pytest.mark.parametrize("kernel", ["sdpa", "scaled_dot_prod_attention", "vectorized_torch"])
def test_activation_bytes_are_those_that_autograd_keeps(changes, options, kernel):
    config = dataclasses.replace(SMALL, attention_kernel=kernel, **changes)
    assert activation_bytes(config, 3, **options) == kept_bytes(config, options)


def test_each_part_has_its_cost():
    assert flops_by_part(SMALL) == {
        "projections": 2 * 8 * 24 * 24,
        "attention": 2 * 4 * 16 * 24,
        "feed_forward": 2 * 6 * 24 * 41,
        "lm_head": 2 * 101 * 24,
    }
    assert flops_per_token(SMALL) == 3 * sum(flops_by_part(SMALL).values())
    assert activation_bytes_by_part(SMALL, 3) == {
        "token_ids": 8 * 48,
        "norms": 5 * 48 * (4 * 24 + 4) + 4 * 48 * 24 * 4,
        "attention": 2 * (6 * 48 * 24 * 4 + 2 * 4 * 16 * 8),
        "scores": 2 * 4 * 48 * 3,
        "feed_forward": 2 * 3 * 48 * 41 * 4,
        "loss": (48 + 101) * 24 * 4,
        "weight_copies": 0,
    }
    assert activation_bytes(SMALL, 3) == sum(activation_bytes_by_part(SMALL, 3).values())
    copies = activation_bytes_by_part(SMALL, 3, element_bytes=2)["weight_copies"]
    assert copies == 2 * 2 * (4 * 24 * 24 + 3 * 24 * 41)


ON_CUDA = [
    ("norms", {}, {"element_bytes": 2}, 48 * (8 * 24 + 4) + 4 * 48 * (2 * 24 + 4) + 9216),
    ("norms", {}, {"element_bytes": 2, "around_block": True}, 5 * 48 * (2 * 24 + 4) + 9216),
    ("attention", {}, {}, 2 * 6 * 48 * 24 * 4),
    ("attention", {"qk_norm": True}, {"element_bytes": 2}, 2 * (13824 + 1024 + 8 * (2304 + 144))),
    # the norms keep the projection, which copies by head would have let go
    (
        "attention",
        {"qk_norm": True, "attention_kernel": "vectorized_torch"},
        {},
        2 * (7 * 48 * 24 * 4 + 1024 + 8 * (1152 + 144)),
    ),
]


@pytest.mark.parametrize(("part", "changes", "options", "expected"), ON_CUDA)
def test_kernels_on_cuda_keep_other_tensors(part, changes, options, expected):
    config = dataclasses.replace(SMALL, **changes)
    assert activation_bytes_by_part(config, 3, cuda=True, **options)[part] == expected


def test_naive_scores_grow_with_the_square_of_the_length_and_the_rest_with_the_tokens():
    scores = [activation_bytes_by_part(NAIVE, 1, n)["scores"] for n in (1 << 12, 1 << 13)]
    assert scores[1] / scores[0] == pytest.approx(4, rel=0.01)
    config = dataclasses.replace(SMALL, positions="none")
    assert activation_bytes(config, 8, 16) == activation_bytes(config, 2, 64)


def test_activation_bytes_of_a_compiled_kernel_are_refused():
    config = dataclasses.replace(SMALL, attention_kernel="vectorized_torch_compiled")
    with pytest.raises(ValueError, match="up to the compiler"):
        activation_bytes(config, 1)


@pytest.mark.gpu
@ON_DTYPES
@pytest.mark.parametrize("kernel", ["sdpa", "vectorized_torch"])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"feed_forward": "silu"}], ids=str)
def test_activation_bytes_are_those_that_the_gpu_allocates(kernel, changes, options):
    config = ModelConfig(vocab_size=5000, num_layers=3, attention_kernel=kernel, **changes)
    model, autocast = model_and_autocast(config, options, "cuda")
    token_ids = torch.zeros(8, config.context_length, dtype=torch.int64, device="cuda")
    # the first call also allocates what libraries keep for themselves
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        with autocast:
            loss = model.loss(token_ids, token_ids)
            kept = torch.cuda.memory_allocated() - before + token_ids.nbytes
        del loss
    expected = activation_bytes(config, 8, cuda=True, **options)
    assert expected == pytest.approx(kept, rel=0.05)
