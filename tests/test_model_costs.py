"""Costs by formula against the module, PyTorch's FLOP counter, and the memory that is kept."""

import dataclasses

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from lib.config_training import ModelConfig
from lib.model import TransformerLM
from lib.model_costs import (
    activation_bytes,
    activation_bytes_by_part,
    flops_by_part,
    flops_per_token,
    num_parameters,
    parameters_by_part,
)
from lib.model_presets import MODEL_PRESETS, model_preset

SMALL = ModelConfig(
    vocab_size=101, context_length=16, d_model=24, num_layers=2, num_heads=3, d_ff=41
)
VARIANTS = {
    "default": {},
    "tied": {"tied_embeddings": True},
    "silu": {"feed_forward": "silu"},
    "qk_norm": {"qk_norm": True},
    "post": {"norm": "post"},
    "none": {"norm": "none"},
    "no rope": {"positions": "none"},
    "qk_norm, no rope": {"qk_norm": True, "positions": "none"},
    "all": {
        "tied_embeddings": True,
        "feed_forward": "silu",
        "qk_norm": True,
        "norm": "post",
        "positions": "none",
    },
}
ON_VARIANTS = pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
TEXTBOOK_KERNELS = ("scaled_dot_prod_attention", "vectorized_torch")


def count_weights(module: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_parameters_of_presets_are_those_of_the_module(name):
    assert num_parameters(model_preset(name)) == count_weights(
        TransformerLM(model_preset(name), device="meta")
    )


@ON_VARIANTS
def test_parameters_of_variants_are_those_of_the_module(settings):
    config = dataclasses.replace(SMALL, **settings)
    assert num_parameters(config) == count_weights(TransformerLM(config))


@ON_VARIANTS
def test_parameters_by_part_are_those_of_the_modules_parts(settings):
    config = dataclasses.replace(SMALL, **settings)
    model = TransformerLM(config)
    norms = [m for m in model.modules() if type(m).__name__ == "RMSNorm"]
    matrices = {"token_embeddings": [model.token_embeddings], "norms": norms}
    matrices["attention"] = [
        part for layer in model.layers for part in (layer.attn.qkv_proj, layer.attn.output_proj)
    ]
    matrices["feed_forward"] = [layer.ffn for layer in model.layers]
    matrices["lm_head"] = [] if model.lm_head is None else [model.lm_head]
    counted = {part: sum(map(count_weights, modules)) for part, modules in matrices.items()}
    assert parameters_by_part(config) == counted


def test_gpt2_preset_has_124_million_parameters():
    assert round(num_parameters(model_preset("gpt2-124m")) / 1e6) == 124


def test_unknown_preset_lists_the_known():
    with pytest.raises(ValueError, match=r"model preset is 'huge'; known: tiny, tinystories, .*xl"):
        model_preset("huge")


@pytest.mark.parametrize("function", [num_parameters, flops_per_token])
def test_costs_want_a_vocabulary(function):
    with pytest.raises(ValueError, match="vocab_size is None"):
        function(ModelConfig())


def counted_flops(config: ModelConfig, length: int, *, backward: bool, device: str = "cpu") -> int:
    """What PyTorch counts for the loss of three windows."""
    model = TransformerLM(config, device=device)
    token_ids = torch.zeros(3, length, dtype=torch.int64, device=device)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        loss = model.loss(token_ids, token_ids)
        if backward:
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kernel", TEXTBOOK_KERNELS)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("length", [1, 11, 16])
def test_flops_are_those_that_pytorch_counts(kernel, backward, length):
    config = dataclasses.replace(SMALL, attention_kernel=kernel)
    counted = counted_flops(config, length, backward=backward)
    assert flops_per_token(config, length, backward=backward) * 3 * length == counted


@ON_VARIANTS
def test_flops_of_variants_are_those_that_pytorch_counts(settings):
    config = dataclasses.replace(SMALL, attention_kernel="vectorized_torch", **settings)
    assert flops_per_token(config) * 3 * 16 == counted_flops(config, 16, backward=True)


def test_logits_take_as_many_flops_as_their_loss():
    config = dataclasses.replace(SMALL, attention_kernel="vectorized_torch")
    model = TransformerLM(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(3, 16, dtype=torch.int64))
    assert flops_per_token(config, backward=False) * 3 * 16 == counter.get_total_flops()


def test_flops_outside_attention_are_counted_with_sdpa_too():
    # PyTorch's counter does not know the fused kernel for CPUs
    attention = flops_by_part(SMALL)["attention"]
    counted = counted_flops(SMALL, 16, backward=False)
    assert (flops_per_token(SMALL, backward=False) - attention) * 3 * 16 == counted


def test_causal_attention_counts_the_scores_below_the_diagonal():
    length = 16
    seen = torch.ones(length, length).tril().sum().item()
    causal = flops_by_part(SMALL, length, is_causal=True)["attention"] * length
    full = flops_by_part(SMALL, length)["attention"] * length
    assert causal * length**2 == full * seen


def test_flops_of_a_large_model_are_near_six_for_each_weight():
    config = dataclasses.replace(model_preset("2.7b"), context_length=1)
    weights = num_parameters(config) - parameters_by_part(config)["token_embeddings"]
    assert flops_per_token(config) == pytest.approx(6 * weights, rel=1e-3)


DTYPES = {
    "float32": {"element_bytes": 4},
    "autocast": {"element_bytes": 2},
    "bfloat16 weights": {"element_bytes": 2, "autocast": False},
}


def kept_bytes(config: ModelConfig, batch_size: int, settings: dict) -> int:
    """Storages that autograd keeps after the loss, without the model's own."""
    is_short = settings["element_bytes"] == 2
    autocast = is_short and settings.get("autocast", True)
    model = TransformerLM(config, dtype=torch.bfloat16 if is_short and not autocast else None)
    own = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())
    }
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # held here, so that no address is used twice
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    token_ids = torch.zeros(batch_size, config.context_length, dtype=torch.int64)
    hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model.loss(token_ids, token_ids.clone())
    return sum(kept[place].untyped_storage().nbytes() for place in kept.keys() - own)


@ON_VARIANTS
@pytest.mark.parametrize("settings_of_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kernel", ["sdpa", *TEXTBOOK_KERNELS])
def test_activation_bytes_are_those_that_autograd_keeps(settings, settings_of_dtype, kernel):
    config = dataclasses.replace(SMALL, attention_kernel=kernel, **settings)
    expected = activation_bytes(config, 3, **settings_of_dtype)
    # equal in PyTorch 2.13; another release may keep a small tensor more or less
    assert expected == pytest.approx(kept_bytes(config, 3, settings_of_dtype), rel=0.05)


def test_activation_bytes_but_scores_grow_with_the_batch_and_not_with_its_shape():
    config = dataclasses.replace(SMALL, positions="none")
    assert activation_bytes(config, 8, 16) == activation_bytes(config, 2, 64)


def test_textbook_scores_grow_with_the_square_of_the_length():
    config = dataclasses.replace(SMALL, attention_kernel="vectorized_torch")
    scores = [activation_bytes_by_part(config, 1, n)["scores"] for n in (1 << 12, 1 << 13)]
    assert scores[1] / scores[0] == pytest.approx(4, rel=0.01)


def test_activation_bytes_of_a_compiled_kernel_are_refused():
    config = dataclasses.replace(SMALL, attention_kernel="vectorized_torch_compiled")
    with pytest.raises(ValueError, match="up to the compiler"):
        activation_bytes(config, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["sdpa", "vectorized_torch"])
@pytest.mark.parametrize("settings", [{}, {"qk_norm": True}, {"feed_forward": "silu"}], ids=str)
@pytest.mark.parametrize("settings_of_dtype", DTYPES.values(), ids=DTYPES)
def test_activation_bytes_are_those_that_the_gpu_allocates(kernel, settings, settings_of_dtype):
    config = ModelConfig(vocab_size=5000, num_layers=3, attention_kernel=kernel, **settings)
    is_short = settings_of_dtype["element_bytes"] == 2
    autocast = is_short and settings_of_dtype.get("autocast", True)
    dtype = torch.bfloat16 if is_short and not autocast else None
    model = TransformerLM(config, device="cuda", dtype=dtype)
    token_ids = torch.zeros(8, config.context_length, dtype=torch.int64, device="cuda")
    # the first call also allocates what libraries keep for themselves
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model.loss(token_ids, token_ids)
            kept = torch.cuda.memory_allocated() - before + token_ids.nbytes
        del loss
    expected = activation_bytes(config, 8, cuda=True, **settings_of_dtype)
    assert expected == pytest.approx(kept, rel=0.05)


@pytest.mark.gpu
def test_flops_with_sdpa_are_those_that_pytorch_counts_on_a_gpu():
    counted = counted_flops(SMALL, 16, backward=False, device="cuda")
    assert flops_per_token(SMALL, backward=False) * 3 * 16 == counted
