"""Llama's layout: the same function as ours, by an implementation that shares no code with it."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from lib.model.config import ModelConfig
from lib.model.llama import (
    from_llama,
    from_llama_config,
    to_llama,
    to_llama_config,
)
from lib.model.transformer import TransformerLM

SHAPE = ModelConfig(
    vocab_size=61, context_length=32, d_model=48, num_layers=2, num_heads=4, d_ff=80
)


def llama(weights, config, ids):
    """Logits as in Hugging Face's modeling_llama.py, from its fields and names."""

    def norm(x, name):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])
        return weights[name] * (x * scale)

    def rotate(x):
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    head_dim, heads = config["head_dim"], config["num_attention_heads"]
    frequencies = config["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(ids.shape[1]), frequencies).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        h = norm(x, f"{at}input_layernorm.weight")
        q, k, v = (
            (h @ weights[f"{at}self_attn.{name}_proj.weight"].T)
            .unflatten(-1, (-1, head_dim))
            .transpose(1, 2)
            for name in "qkv"
        )
        k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
        out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + out.transpose(1, 2).flatten(2) @ weights[f"{at}self_attn.o_proj.weight"].T
        h = norm(x, f"{at}post_attention_layernorm.weight")
        gate = F.silu(h @ weights[f"{at}mlp.gate_proj.weight"].T)
        value = h @ weights[f"{at}mlp.up_proj.weight"].T
        x = x + (gate * value) @ weights[f"{at}mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm.weight") @ weights[head].T


def make_model(config=SHAPE):
    torch.manual_seed(0)
    model = TransformerLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln" in name:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_with_our_weights_gives_our_logits_and_gradients(tied):
    config = dataclasses.replace(SHAPE, tied_embeddings=tied, rope_theta=500.0, norm_eps=1e-3)
    # each token id at least once
    model, ids = make_model(config), torch.arange(64).view(2, 32) % 61
    weights = to_llama(model.state_dict(), config)
    assert ("lm_head.weight" in weights) is not tied
    weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    ours, theirs = model(ids), llama(weights, to_llama_config(config), ids)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
    upstream = torch.randn(2, 32, 61)
    for logits in (ours, theirs):
        logits.backward(upstream)
    right = from_llama({name: weight.grad for name, weight in weights.items()}, config)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, right[name], atol=1e-4, rtol=1e-4)


def test_weights_and_settings_come_back_bit_for_bit():
    model = make_model()
    assert from_llama_config(to_llama_config(SHAPE)) == SHAPE
    back = from_llama(to_llama(model.state_dict(), SHAPE), SHAPE)
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], weight) for name, weight in model.state_dict().items())


def test_shared_key_heads_are_repeated():
    model, ids = make_model(), torch.randint(61, (2, 32))
    weights = to_llama(model.state_dict(), SHAPE)
    for name in weights:
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            weights[name] = weights[name][:24]  # two heads for four queries
    # first, since `weights` are views of the model's
    expected = llama(weights, to_llama_config(SHAPE), ids)
    model.load_state_dict(from_llama(weights, SHAPE))
    torch.testing.assert_close(model(ids), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("norm", "post"), ("positions", "none"), ("feed_forward", "silu"), ("qk_norm", True)],
)
def test_variants_that_llama_lacks_are_refused_by_name(field, value):
    config = dataclasses.replace(SHAPE, **{field: value})
    with pytest.raises(ValueError, match=rf"^{field} must be .* Llama's layout, got"):
        to_llama_config(config)
    with pytest.raises(ValueError, match=f"^{field} must be"):
        to_llama(TransformerLM(config).state_dict(), config)
    with pytest.raises(ValueError, match=f"^{field} must be"):
        from_llama(to_llama(make_model().state_dict(), SHAPE), config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("model_type", "mistral"), ("hidden_act", "gelu"), ("attention_bias", True)),
        *(("mlp_bias", True), ("head_dim", 16)),
        ("rope_type", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
        ("rope_type", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}),
    ],
)
def test_llamas_that_our_model_cannot_be_are_refused_by_name(field, value):
    changed = value if isinstance(value, dict) else {field: value}
    with pytest.raises(ValueError, match=rf"^{field} must be .* for our model, got"):
        from_llama_config(to_llama_config(SHAPE) | changed)


def test_ropes_base_is_read_from_old_and_new_files():
    fields = to_llama_config(SHAPE)
    assert from_llama_config(fields | {"rope_theta": 7.0, "rope_scaling": None}).rope_theta == 7
    del fields["rope_theta"]
    new = {"rope_parameters": {"rope_theta": 9.0, "rope_type": "default"}}
    assert from_llama_config(fields | new).rope_theta == 9


def test_missing_unknown_and_misshapen_weights_are_named():
    weights = to_llama(make_model().state_dict(), SHAPE)
    some = {name: weight for name, weight in weights.items() if name != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"model\.norm\.weight, which is missing"):
        from_llama(some, SHAPE)
    with pytest.raises(ValueError, match=r"got also model\.layers\.0\.self_attn\.q_proj\.bias"):
        from_llama(weights | {"model.layers.0.self_attn.q_proj.bias": torch.ones(1)}, SHAPE)
    for name in weights:
        with pytest.raises(ValueError, match=rf"{name} must be \("):
            from_llama(weights | {name: weights[name][1:]}, SHAPE)
        with pytest.raises(ValueError, match=rf"{name} must be \("):
            from_llama(weights | {name: weights[name][:0]}, SHAPE)


@pytest.mark.parametrize("layers", [-1, 1])
def test_weights_of_another_number_of_layers_are_not_written_in_part(layers):
    other = dataclasses.replace(SHAPE, num_layers=SHAPE.num_layers + layers)
    with pytest.raises(ValueError, match=r"those of config, which differ in layers\.\d"):
        to_llama(make_model().state_dict(), other)
