"""Llama's layout of a model: the names, shapes and order of weights that other tools read.

Our model with its default variants computes the same function as Llama (Touvron et al. 2023): a
pre-norm Transformer with RMSNorm, RoPE and SwiGLU, and no biases. Three things differ on disk:

- names, such as `layers.0.ffn.w2.weight` and `model.layers.0.mlp.down_proj.weight`;
- ours stacks the projections that read the same input: queries, keys and values in `qkv_proj`,
  SwiGLU's gate and value in `w13`;
- the pairs of coordinates that RoPE rotates: see `pairs_to_halves`.

Sources: `modeling_llama.py` and `configuration_llama.py` of Hugging Face's `transformers` 5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lib.core.settings import check, require
from lib.model.config import ModelConfig

# Our name -> Llama's; `{}` is the layer. Where Llama has several matrices, ours stacks their rows.
NAMES: dict[str, tuple[str, ...]] = {
    "token_embeddings.weight": ("model.embed_tokens.weight",),
    "ln_final.weight": ("model.norm.weight",),
    "lm_head.weight": ("lm_head.weight",),
}
LAYER_NAMES: dict[str, tuple[str, ...]] = {
    "layers.{}.ln1.weight": ("model.layers.{}.input_layernorm.weight",),
    "layers.{}.attn.qkv_proj.weight": tuple(
        f"model.layers.{{}}.self_attn.{name}_proj.weight" for name in "qkv"
    ),
    "layers.{}.attn.output_proj.weight": ("model.layers.{}.self_attn.o_proj.weight",),
    "layers.{}.ln2.weight": ("model.layers.{}.post_attention_layernorm.weight",),
    "layers.{}.ffn.w13.weight": (
        "model.layers.{}.mlp.gate_proj.weight",
        "model.layers.{}.mlp.up_proj.weight",
    ),
    "layers.{}.ffn.w2.weight": ("model.layers.{}.mlp.down_proj.weight",),
}
ROTATED = ("q_proj.weight", "k_proj.weight")


# Weights


def pairs_to_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of a query or key projection from our RoPE's layout to Llama's.

    RoPE rotates the coordinates of a head in pairs, and the layouts differ in the pairs. Ours
    pairs neighbors, as the paper does: (0, 1), (2, 3), … Hugging Face's Llama pairs each coordinate
    of the first half with one of the second: (0, head_dim / 2), (1, head_dim / 2 + 1), … So our
    coordinate 2i becomes i, and 2i + 1 becomes head_dim / 2 + i. Queries and keys are reordered
    alike, so their dot products, and with them the model's logits, stay the same.

    (num_heads · head_dim, d_model) -> the same; `halves_to_pairs` reverses it.
    """
    pairs = weight.unflatten(0, (num_heads, -1, 2))  # (heads, head_dim / 2, 2, d_model)
    return pairs.transpose(1, 2).flatten(0, 2)  # (heads · head_dim, d_model)


def halves_to_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of a query or key projection from Llama's RoPE layout to ours."""
    halves = weight.unflatten(0, (num_heads, 2, -1))  # (heads, 2, head_dim / 2, d_model)
    return halves.transpose(1, 2).flatten(0, 2)  # (heads · head_dim, d_model)


def to_llama(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Convert the state dict of a `TransformerLM` to Llama's names and layout; dtypes stay.

    The tensors returned are views of `weights` where possible.

    Raises:
        ValueError: `config` has a variant that Llama lacks, or is not that of `weights`.
    """
    check_is_llama(config)
    names = _names(config)
    # those of a layer that `config` lacks would be lost
    others = sorted({*weights} ^ {*names})
    require(not others, f"weights must be those of config, which differ in {', '.join(others[:3])}")

    # stacked matrices are cut into Llama's, and the rows of queries and keys reordered for its RoPE
    converted = {}
    for ours, theirs in names.items():
        for name, part in zip(theirs, weights[ours].chunk(len(theirs))):
            is_rotated = name.endswith(ROTATED)
            part = pairs_to_halves(part, config.num_heads) if is_rotated else part
            converted[name] = part.contiguous()
    return converted


def from_llama(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Convert Llama's weights to the state dict of a `TransformerLM`; norms become float32.

    Our model has a key and a value head for each query head. Where queries share them (grouped-
    query attention, Ainslie et al. 2023), they are repeated: the same function, in more memory.

    Args:
        weights: as in a Llama folder; tables of RoPE and, with tied embeddings, a head are ignored.

    Raises:
        ValueError: a weight is missing, unknown, or of another shape than `config` says; or
            `config` has a variant that Llama lacks, which would compute another function.
    """
    check_is_llama(config)
    names = _names(config)

    # every weight of Llama is used, and none is missing
    known = {name for theirs in names.values() for name in theirs}
    unknown = sorted(
        name for name in {*weights} - known if name != "lm_head.weight" and "rotary_emb" not in name
    )
    missing = sorted(known - {*weights})
    require(not unknown, f"weights must be those of a Llama, got also {', '.join(unknown[:3])}")
    require(not missing, f"weights must have {', '.join(missing[:3])}, which is missing")

    # Llama's matrices are reordered and stacked into ours
    converted = {}
    for ours, theirs in names.items():
        parts = [_our_part(name, weights[name], config) for name in theirs]
        converted[ours] = torch.cat(parts)
        # our norms are float32, and so is RMSNorm's arithmetic
        if converted[ours].ndim == 1:
            converted[ours] = converted[ours].float()
    return converted


def _our_part(name: str, weight: Tensor, config: ModelConfig) -> Tensor:
    """Bring one of Llama's weights into our layout, checked against `config`."""
    shape = _shape(name, config)
    # fewer key heads than query heads: each is repeated for the queries that share it
    if name.endswith(("k_proj.weight", "v_proj.weight")) and len(weight) % config.head_dim == 0:
        heads = weight.unflatten(0, (-1, config.head_dim))  # (key heads, head_dim, d_model)
        repeats = max(config.num_heads // max(len(heads), 1), 1)
        weight = heads.repeat_interleave(repeats, dim=0).flatten(0, 1)
    require(tuple(weight.shape) == shape, f"{name} must be {shape}, got {tuple(weight.shape)}")
    return halves_to_pairs(weight, config.num_heads) if name.endswith(ROTATED) else weight


def _shape(name: str, config: ModelConfig) -> tuple[int, ...]:
    """The shape of one of Llama's weights, with as many key heads as query heads."""
    d_model = config.d_model
    if "norm" in name:
        return (d_model,)
    if "self_attn" in name:
        return (d_model, d_model)
    if "down_proj" in name:
        return (d_model, config.d_ff)
    return (config.d_ff if "mlp" in name else config.vocab_size, d_model)


def _names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Our name of each weight -> Llama's names, in the order of the rows."""
    names = dict(NAMES)
    if config.tied_embeddings:
        del names["lm_head.weight"]
    for layer in range(config.num_layers):
        for ours, theirs in LAYER_NAMES.items():
            names[ours.format(layer)] = tuple(name.format(layer) for name in theirs)
    return names


# Settings


def check_is_llama(config: ModelConfig) -> None:
    """Raise `ValueError`, naming the field, unless `config` is a model that Llama's layout has."""
    for field, value in {
        "norm": "pre",
        "positions": "rope",
        "feed_forward": "swiglu",
        "qk_norm": False,
    }.items():
        is_same = getattr(config, field) == value
        check(config, field, is_same, f"{value!r} in Llama's layout")


def to_llama_config(config: ModelConfig) -> dict[str, Any]:
    """The fields of Llama's `config.json` that describe the shape of `config`."""
    check_is_llama(config)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_ff,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    }


def from_llama_config(fields: dict[str, Any]) -> ModelConfig:
    """The shape that Llama's `config.json` describes; what it leaves out has Llama's defaults.

    Raises:
        ValueError: the model is no Llama, or has something that ours lacks.
    """
    shape = {
        "vocab_size": fields.get("vocab_size", 32000),
        "context_length": fields.get("max_position_embeddings", 2048),
        "d_model": fields.get("hidden_size", 4096),
        "num_layers": fields.get("num_hidden_layers", 32),
        "num_heads": fields.get("num_attention_heads", 32),
        "d_ff": fields.get("intermediate_size", 11008),
        "norm_eps": fields.get("rms_norm_eps", 1e-6),
        "tied_embeddings": fields.get("tie_word_embeddings", False),
    }
    # newer files have all of RoPE's settings in `rope_parameters`
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    require(isinstance(rope, dict), f"rope_parameters must be an object, got {rope!r}")
    shape["rope_theta"] = rope.get("rope_theta", fields.get("rope_theta", 10000.0))
    config = ModelConfig(**shape)

    # what would be another function
    activation = fields.get("hidden_act", "silu")
    for name, value, expected in (
        ("model_type", fields.get("model_type"), "llama"),
        ("hidden_act", "silu" if activation == "swish" else activation, "silu"),
        ("attention_bias", fields.get("attention_bias", False), False),
        ("mlp_bias", fields.get("mlp_bias", False), False),
        ("head_dim", fields.get("head_dim") or config.head_dim, config.head_dim),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0),
    ):
        require(value == expected, f"{name} must be {expected!r} for our model, got {value!r}")
    return config
