"""Each part of the model against PyTorch's own, and what the whole promises."""

import cmath
import dataclasses
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.config_training import ATTENTION_KERNELS, ModelConfig
from lib.model import (
    CausalSelfAttention,
    Embedding,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    SiLUFeedForward,
    SwiGLU,
    TransformerBlock,
    TransformerLM,
    stack_projections,
    truncated_normal_,
)

ROOT = Path(__file__).resolve().parent.parent
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
# The tests that take `device` try the kernels: on a GPU, and in a process of their own
# (`test_the_kernels_in_the_interpreter`) on the CPU.
KERNEL_DEVICES = ["cpu"] if INTERPRETING else [pytest.param("cuda", marks=pytest.mark.gpu)]
ON_KERNEL_DEVICES = pytest.mark.parametrize("device", KERNEL_DEVICES)
# The interpreter gets bfloat16 wrong.
SHORT_TYPES = [torch.float16] if INTERPRETING else [torch.float16, torch.bfloat16]
ON_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, *SHORT_TYPES], ids=str)

CONFIG = ModelConfig(
    vocab_size=61, context_length=16, d_model=32, num_layers=2, num_heads=4, d_ff=44
)
VARIANTS = [
    {},
    {"norm": "post"},
    {"norm": "none"},
    {"positions": "none"},
    {"feed_forward": "silu"},
    {"tied_embeddings": True},
    {"qk_norm": True},
    {"qk_norm": True, "positions": "none", "tied_embeddings": True, "feed_forward": "silu"},
    {"attention_kernel": "scaled_dot_prod_attention"},
    {"attention_kernel": "vectorized_torch"},
]
ON_VARIANTS = pytest.mark.parametrize("settings", VARIANTS, ids=str)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_model(**settings) -> TransformerLM:
    return TransformerLM(dataclasses.replace(CONFIG, **settings), generator=seeded())


def make_token_ids(batch_size: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (batch_size, length), generator=seeded(seed))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 3, 5)])
def test_linear_is_pytorchs(shape):
    ours, theirs = Linear(5, 7), nn.Linear(5, 7, bias=False)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(shape, generator=seeded())
    assert ours(x).equal(theirs(x))


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_embedding_is_pytorchs(shape):
    ours, theirs = Embedding(11, 5), nn.Embedding(11, 5)
    theirs.load_state_dict(ours.state_dict())
    token_ids = torch.randint(11, shape, generator=seeded())
    assert ours(token_ids).equal(theirs(token_ids))


@pytest.mark.parametrize("scale", [1e-4, 1, 1e4])
def test_rms_norm_is_pytorchs(scale):
    norm = RMSNorm(6, eps=1e-5)
    nn.init.normal_(norm.weight, generator=seeded(1))
    x = (torch.randn(2, 3, 6, generator=seeded()) * scale).requires_grad_()
    right = F.rms_norm(x, (6,), norm.weight, 1e-5)
    torch.testing.assert_close(norm(x), right)
    weights = torch.randn(2, 3, 6, generator=seeded(2))
    (ours,) = torch.autograd.grad((norm(x) * weights).sum(), x)
    torch.testing.assert_close(ours, torch.autograd.grad((right * weights).sum(), x)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_computes_in_float32(dtype):
    # its square overflows in float16 and swallows eps in bfloat16
    x = torch.randn(4, 64, generator=seeded()).to(dtype) * 1000
    out = RMSNorm(64)(x)
    assert out.dtype == dtype
    assert out.equal(F.rms_norm(x.double(), (64,), eps=1e-5).to(dtype))


def test_swiglu_is_the_papers():
    ffn, x = SwiGLU(6, 10), torch.randn(2, 3, 6, generator=seeded())
    w1, w3 = ffn.w13.weight.chunk(2)
    right = (F.silu(x @ w1.T) * (x @ w3.T)) @ ffn.w2.weight.T
    torch.testing.assert_close(ffn(x), right)


def test_silu_feed_forward_is_the_papers():
    ffn, x = SiLUFeedForward(6, 10), torch.randn(2, 3, 6, generator=seeded())
    hidden = x @ ffn.w1.weight.T
    torch.testing.assert_close(ffn(x), (hidden / (1 + (-hidden).exp())) @ ffn.w2.weight.T)


@pytest.mark.parametrize("head_dim", [2, 8, 20])
@pytest.mark.parametrize("theta", [100.0, 10000.0])
def test_rope_multiplies_complex_numbers(head_dim, theta):
    rope = RotaryEmbedding(head_dim, 300, theta)
    x = torch.randn(2, 300, head_dim, generator=seeded())
    turned = rope(x)
    for position in (0, 1, 7, 299):
        for pair in range(head_dim // 2):
            turn = cmath.exp(1j * position * theta ** (-2 * pair / head_dim))
            even, odd = 2 * pair, 2 * pair + 1
            for batch in range(2):
                number = complex(x[batch, position, even], x[batch, position, odd]) * turn
                ours = complex(turned[batch, position, even], turned[batch, position, odd])
                assert abs(ours - number) < 1e-6 * max(1, abs(number))


def test_rope_makes_products_depend_on_the_distance_alone():
    rope = RotaryEmbedding(8, 1000)
    q, k = torch.randn(2, 8, generator=seeded())
    for distance in (0, 1, 17, 500):
        places = torch.arange(0, 1000 - distance, 99)
        turned_q = rope(q.expand(len(places), 8), places + distance)
        turned_k = rope(k.expand(len(places), 8), places)
        products = (turned_q * turned_k).sum(-1)
        torch.testing.assert_close(products, products[:1].expand_as(products), rtol=0, atol=2e-5)


def test_rope_keeps_lengths():
    x = torch.randn(3, 50, 16, generator=seeded())
    torch.testing.assert_close(RotaryEmbedding(16, 50)(x).norm(dim=-1), x.norm(dim=-1))


def test_rope_turns_at_the_positions_given():
    rope, x = RotaryEmbedding(4, 20), torch.randn(2, 9, 4, generator=seeded())
    positions = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 19])
    right = torch.stack([rope(row.expand(20, 4))[p] for row, p in zip(x[1], positions)])
    torch.testing.assert_close(rope(x, positions)[1], right)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rope_rounds_once(dtype):
    rope, x = RotaryEmbedding(8, 50), torch.randn(2, 50, 8, generator=seeded()).to(dtype)
    assert rope(x).equal(rope(x.float()).to(dtype))


def test_rope_wants_pairs():
    with pytest.raises(ValueError, match="head_dim is 7; right is: an even number"):
        RotaryEmbedding(7, 10)


def test_rope_tables_are_not_saved():
    assert not [name for name in make_model().state_dict() if "rope" in name]


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("positions", ["rope", "none"])
def test_self_attention_is_pytorchs_head_by_head(qk_norm, positions):
    config = dataclasses.replace(CONFIG, qk_norm=qk_norm, positions=positions)
    attn, x = CausalSelfAttention(config), torch.randn(2, 9, 32, generator=seeded())
    rope = RotaryEmbedding(8, 16) if positions == "rope" else None
    if qk_norm:
        nn.init.normal_(attn.q_norm.weight, 1, 0.3, generator=seeded(3))
        nn.init.normal_(attn.k_norm.weight, 1, 0.3, generator=seeded(4))
    heads = []
    for head in range(4):
        rows = slice(8 * head, 8 * head + 8)
        q, k, v = (x @ weight[rows].T for weight in attn.qkv_proj.weight.chunk(3))
        if qk_norm:
            q = F.rms_norm(q, (8,), attn.q_norm.weight, config.norm_eps)
            k = F.rms_norm(k, (8,), attn.k_norm.weight, config.norm_eps)
        if rope is not None:
            q, k = rope(q), rope(k)
        heads.append(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    right = torch.cat(heads, dim=-1) @ attn.output_proj.weight.T
    torch.testing.assert_close(attn(x, rope), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_the_block_puts_norms_where_the_config_says(norm):
    block = TransformerBlock(dataclasses.replace(CONFIG, norm=norm))
    x = torch.randn(2, 5, 32, generator=seeded())
    for name, weight in block.named_parameters():
        if name.startswith("ln"):
            nn.init.normal_(weight, 1, 0.3, generator=seeded(len(name)))
    if norm == "pre":
        middle = x + block.attn(block.ln1(x))
        right = middle + block.ffn(block.ln2(middle))
    elif norm == "post":
        middle = block.ln1(x + block.attn(x))
        right = block.ln2(middle + block.ffn(middle))
    else:
        middle = x + block.attn(x)
        right = middle + block.ffn(middle)
    torch.testing.assert_close(block(x), right)


@ON_VARIANTS
def test_a_later_token_changes_no_earlier_logits(settings):
    model, token_ids = make_model(**settings), make_token_ids(2, 16)
    before = model(token_ids)
    for place in (1, 8, 15):
        changed = token_ids.clone()
        changed[:, place] = (changed[:, place] + 1) % CONFIG.vocab_size
        after = model(changed)
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-6)
        assert not after[:, place].isclose(before[:, place]).all()


def test_without_positions_attention_does_not_see_the_order():
    model, token_ids = make_model(positions="none", num_layers=1), make_token_ids(1, 9)
    swapped = token_ids[:, [1, 0, 2, 3, 4, 5, 6, 7, 8]]
    torch.testing.assert_close(model(swapped)[:, 2:], model(token_ids)[:, 2:])


def test_with_rope_attention_sees_the_order():
    model, token_ids = make_model(num_layers=1), make_token_ids(1, 9)
    swapped = token_ids[:, [1, 0, 2, 3, 4, 5, 6, 7, 8]]
    assert not model(swapped)[:, 2:].isclose(model(token_ids)[:, 2:]).all()


@ON_VARIANTS
def test_every_weight_gets_a_gradient(settings):
    model, token_ids = make_model(**settings), make_token_ids(3, 16)
    model.loss(token_ids[:, :-1], token_ids[:, 1:]).backward()
    for name, gradient in gradients(model).items():
        assert gradient.isfinite().all(), name
        assert gradient.any(), name


@ON_VARIANTS
def test_the_loss_is_the_cross_entropy_of_the_logits(settings):
    model, token_ids = make_model(**settings), make_token_ids(3, 16)
    model.loss(token_ids[:, :-1], token_ids[:, 1:], z_loss=0.01).backward()
    ours = gradients(model)
    model.zero_grad()
    logits = model(token_ids[:, :-1]).flatten(0, 1)
    right = F.cross_entropy(logits, token_ids[:, 1:].flatten())
    right = right + 0.01 * logits.logsumexp(-1).square().mean()
    right.backward()
    with torch.no_grad():
        loss = model.loss(token_ids[:, :-1], token_ids[:, 1:], z_loss=0.01)
    torch.testing.assert_close(loss, right.detach())
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("d_ff", [44, 64])
def test_silu_and_swiglu_have_equally_many_parameters(d_ff):
    counts = [
        sum(weight.numel() for weight in make_model(feed_forward=name, d_ff=d_ff).parameters())
        for name in ("silu", "swiglu")
    ]
    assert counts[0] == counts[1]


def test_tied_embeddings_are_one_matrix():
    model = make_model(tied_embeddings=True)
    assert model.output_weight is model.token_embeddings.weight
    assert not [name for name in model.state_dict() if "lm_head" in name]


def test_gradients_of_tied_embeddings_add_up():
    tied, token_ids = make_model(tied_embeddings=True), make_token_ids(2, 16)
    parts = make_model()
    parts.load_state_dict({**tied.state_dict(), "lm_head.weight": tied.output_weight})
    for model in (tied, parts):
        model.loss(token_ids[:, :-1], token_ids[:, 1:]).backward()
    both = parts.token_embeddings.weight.grad + parts.lm_head.weight.grad
    torch.testing.assert_close(tied.token_embeddings.weight.grad, both)


@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (3, 1), (2, 16)])
def test_logits_have_the_shape_of_the_tokens(shape):
    assert make_model()(make_token_ids(*shape)).shape == (*shape, CONFIG.vocab_size)


def test_sequences_of_a_batch_do_not_meet():
    model, token_ids = make_model(), make_token_ids(3, 16)
    alone = torch.cat([model(row[None]) for row in token_ids])
    torch.testing.assert_close(model(token_ids), alone, rtol=1e-4, atol=1e-5)


def test_more_tokens_than_the_context_are_an_error():
    message = r"0 cached \+ 17 new tokens; right is: at most context_length 16"
    with pytest.raises(ValueError, match=message):
        make_model()(make_token_ids(1, 17))


def test_a_model_wants_a_vocabulary():
    with pytest.raises(ValueError, match="vocab_size is None"):
        TransformerLM(ModelConfig())


@pytest.mark.parametrize("deviation", [0.02, 1.0])
def test_the_truncated_normal_has_its_deviation_and_ends_at_three(deviation):
    weight = torch.empty(500, 500)
    truncated_normal_(weight, deviation, seeded())
    # what is cut off takes 1.35% of the deviation along
    assert weight.std().item() == pytest.approx(0.9866 * deviation, rel=0.01)
    assert weight.mean().abs() < 0.01 * deviation
    assert 2.9 * deviation < weight.abs().max() <= 3 * deviation


def test_initial_deviations_are_those_of_the_assignment():
    config = ModelConfig(vocab_size=300, d_model=128, num_layers=1, num_heads=2, d_ff=512)
    model = TransformerLM(config, generator=seeded())
    block = model.layers[0]
    deviations = {
        model.token_embeddings: 1,
        model.lm_head: math.sqrt(2 / (128 + 300)),
        # each of the stacked matrices is drawn as one of its own
        block.attn.qkv_proj: math.sqrt(2 / (128 + 128)),
        block.attn.output_proj: math.sqrt(2 / (128 + 128)),
        block.ffn.w13: math.sqrt(2 / (128 + 512)),
        block.ffn.w2: math.sqrt(2 / (512 + 128)),
    }
    for module, deviation in deviations.items():
        assert module.weight.std().item() == pytest.approx(0.9866 * deviation, rel=0.03)
    for norm in (block.ln1, block.ln2, model.ln_final):
        assert (norm.weight == 1).all()


def test_the_loss_starts_near_that_of_guessing():
    for tied in (False, True):
        model, token_ids = make_model(tied_embeddings=tied), make_token_ids(8, 16)
        loss = model.loss(token_ids, make_token_ids(8, 16, seed=2)).item()
        assert math.log(CONFIG.vocab_size) - 0.1 < loss < math.log(CONFIG.vocab_size) + 1


def test_the_generator_decides_the_weights():
    first, again, other = (
        TransformerLM(CONFIG, generator=seeded(seed)).state_dict() for seed in (0, 0, 1)
    )
    assert all(first[name].equal(again[name]) for name in first)
    assert all(not first[n].equal(other[n]) for n in first if "ln" not in n)


def test_a_generator_leaves_the_global_one_alone():
    state = torch.random.get_rng_state()
    make_model().reset_parameters(seeded())
    assert torch.random.get_rng_state().equal(state)


@ON_VARIANTS
def test_without_a_generator_the_global_one_draws_the_same(settings):
    config = dataclasses.replace(CONFIG, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = TransformerLM(config)
    assert all(a.equal(b) for a, b in zip(model.parameters(), make_model(**settings).parameters()))


@pytest.mark.parametrize("generator", [None, seeded()], ids=["global", "given"])
@pytest.mark.parametrize("draw", [True, False])
def test_weights_are_drawn_once_or_not_at_all(generator, draw, monkeypatch):
    drawn, draw_weights = [], nn.init.trunc_normal_

    def count(weight, *arguments, **keywords):
        drawn.append(0 if weight.is_meta else weight.numel())
        return draw_weights(weight, *arguments, **keywords)

    monkeypatch.setattr(nn.init, "trunc_normal_", count)
    model = TransformerLM(CONFIG, generator=generator, draw=draw)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.ndim == 2)
    assert sum(drawn) == (matrices if draw else 0)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}


@pytest.mark.parametrize("by_context", [False, True])
def test_a_model_on_the_meta_device_takes_no_memory(by_context):
    config = dataclasses.replace(CONFIG, d_model=1 << 15, d_ff=1 << 17)
    if by_context:
        with torch.device("meta"):
            model = TransformerLM(config)
    else:
        model = TransformerLM(config, device="meta")
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}


def test_dtype_is_that_of_the_matrices_and_norms_stay_in_float32():
    model = TransformerLM(dataclasses.replace(CONFIG, qk_norm=True), dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        is_norm = "ln" in name or "norm" in name
        assert weight.dtype == (torch.float32 if is_norm else torch.bfloat16), name


@pytest.mark.parametrize("kernel", ["sdpa", "vectorized_torch", "scaled_dot_prod_attention"])
@pytest.mark.parametrize("has_short_weights", [False, True])
def test_bfloat16_is_close_to_float32(kernel, has_short_weights):
    model, token_ids = make_model(attention_kernel=kernel), make_token_ids(4, 16)
    targets = make_token_ids(4, 16, seed=2)
    model.loss(token_ids, targets).backward()
    short = TransformerLM(model.config, dtype=torch.bfloat16 if has_short_weights else None)
    short.load_state_dict(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16, enabled=not has_short_weights):
        loss = short.loss(token_ids, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(model.loss(token_ids, targets).item(), rel=0.01)
    for name, gradient in gradients(model).items():
        assert (gradients(short)[name] - gradient).norm() < 0.05 * gradient.norm(), name


@ON_VARIANTS
def test_weights_round_trip(settings):
    model = make_model(**settings)
    other = TransformerLM(model.config, generator=seeded(7))
    other.load_state_dict(model.state_dict())
    token_ids = make_token_ids(2, 16)
    assert other(token_ids).equal(model(token_ids))


@pytest.mark.parametrize("settings", [{}, {"feed_forward": "silu"}, {"tied_embeddings": True}])
def test_separate_projections_are_stacked(settings):
    model = make_model(**settings)
    published = {}
    for name, weight in model.state_dict().items():
        names = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "w13": ["w1", "w3"]}
        whole = next((whole for whole in names if whole in name), None)
        parts = names.get(whole, [whole])
        for part, piece in zip(parts, weight.chunk(len(parts))):
            published[name.replace(str(whole), str(part))] = piece
    stacked = stack_projections(published)
    assert stacked.keys() == model.state_dict().keys()
    assert all(weight.equal(stacked[name]) for name, weight in model.state_dict().items())


def test_names_of_weights_are_those_of_the_assignment():
    names = {
        name.replace("layers.1.", "layers.0.").replace("layers.0.", "")
        for name in make_model().state_dict()
    }
    assert names == {
        "token_embeddings.weight",
        "ln1.weight",
        "ln2.weight",
        "attn.qkv_proj.weight",
        "attn.output_proj.weight",
        "ffn.w13.weight",
        "ffn.w2.weight",
        "ln_final.weight",
        "lm_head.weight",
    }


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_compiled_model_has_the_same_loss_and_gradients():
    model, token_ids = make_model(), make_token_ids(2, 16)
    model.loss(token_ids, token_ids).backward()
    eager = gradients(model)
    model.zero_grad()
    torch.compile(model.loss)(token_ids, token_ids).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, eager[name], rtol=1e-3, atol=1e-5)


LAYOUTS = ["tokens first", "heads first", "reversed", "expanded"]
# (batch, length, heads, head_dim)
QKV_SHAPES = [(1, 1, 1, 2), (2, 5, 3, 20), (2, 3, 1, 80), (1, 7, 4, 8), (3, 2, 5, 6)]


def make_qkv(shape, dtype, device) -> Tensor:
    batch, length, heads, head_dim = shape
    qkv = torch.randn(batch, length, 3, heads, head_dim, generator=seeded())
    return qkv.to(device, dtype).requires_grad_()


def rotated_by_the_module(qkv: Tensor, rope: RotaryEmbedding) -> list[Tensor]:
    """What the kernel should give, each (batch, length, heads, head_dim)."""
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return [part.transpose(1, 2) for part in (rope(q), rope(k), v)]


def in_layout(gradient: Tensor, layout: str) -> Tensor:
    """The same numbers, laid out as attention kernels leave them."""
    if layout == "heads first":
        return gradient.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "reversed":
        return gradient.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    if layout == "expanded":
        return gradient[:, :, :, :1].expand_as(gradient)
    return gradient.contiguous()


@ON_KERNEL_DEVICES
@ON_DTYPES
@pytest.mark.parametrize("shape", QKV_SHAPES, ids=str)
@pytest.mark.parametrize("first_layout", LAYOUTS)
def test_the_rope_kernel_is_the_module(device, dtype, shape, first_layout):
    from lib.model_triton import rotated_qkv

    rope = RotaryEmbedding(shape[3], shape[1] + 3, device=device)
    qkv = make_qkv(shape, dtype, device)
    ours = rotated_qkv(qkv, rope.cos, rope.sin)
    right = rotated_by_the_module(qkv, rope)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    for a, b in zip(ours, right):
        torch.testing.assert_close(a, b, **tolerance)

    # each in a layout of its own
    start = LAYOUTS.index(first_layout)
    upstream = [
        in_layout(torch.randn(shape, generator=seeded(i)).to(device, dtype), layout)
        for i, layout in enumerate((LAYOUTS * 2)[start : start + 3])
    ]
    (gradient,) = torch.autograd.grad(ours, qkv, upstream)
    (peer,) = torch.autograd.grad(right, qkv, upstream)
    torch.testing.assert_close(gradient, peer, **tolerance)


@ON_KERNEL_DEVICES
@ON_DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 70, 3, 20), (1, 129, 1, 80)], ids=str)
def test_attention_turned_in_the_kernels_is_the_module_and_attention(device, dtype, shape):
    from lib.model_triton import rotated_attention

    rope = RotaryEmbedding(shape[3], shape[1] + 3, device=device)
    qkv = make_qkv(shape, dtype, device)
    wide = qkv.detach().double().requires_grad_()
    q, k, v = (part.transpose(1, 2) for part in rotated_by_the_module(wide, rope))
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    ours = rotated_attention(qkv, rope.cos, rope.sin)
    upstream = torch.randn(shape, generator=seeded(1)).to(device, dtype)
    (gradient,) = torch.autograd.grad(ours, qkv, upstream)
    (peer,) = torch.autograd.grad(right, wide, upstream.double())
    for a, b in ((ours, right), (gradient, peer)):
        error = (a.double() - b).norm() / b.norm()
        assert error < (4e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)


@ON_KERNEL_DEVICES
@pytest.mark.parametrize("name", ["rotated_qkv", "rotated_attention"])
def test_the_rope_kernels_refuse_more_tokens_than_they_have_angles_for(device, name):
    from lib import model_triton

    rope = RotaryEmbedding(4, 5, device=device)
    with pytest.raises(ValueError, match="qkv has 6 tokens; right is: at most 5"):
        getattr(model_triton, name)(
            make_qkv((1, 6, 2, 4), torch.float32, device), rope.cos, rope.sin
        )


@ON_KERNEL_DEVICES
@ON_DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 44), (2, 2 * 2049), (4, 2 * 63)], ids=str)
def test_the_swiglu_kernel_is_the_formula(device, dtype, shape):
    from lib.model_triton import swiglu

    x = torch.randn(shape, generator=seeded()).to(device, dtype).requires_grad_()
    wide = x.detach().float().requires_grad_()
    gate, value = wide.chunk(2, dim=-1)
    right = F.silu(gate) * value
    ours = swiglu(x)
    # its inner dimension does not lie densely
    upstream = torch.randn(*right.shape, 2, generator=seeded(1)).to(device, dtype)[..., 0]
    (gradient,) = torch.autograd.grad(ours, x, upstream)
    (peer,) = torch.autograd.grad(right, wide, upstream.float())
    tolerance = {"rtol": max(torch.finfo(dtype).eps, 1e-5), "atol": 1e-6}
    torch.testing.assert_close(ours.float(), right, **tolerance)
    torch.testing.assert_close(gradient.float(), peer, **tolerance)


# The last one is of three programs in the backward pass, the third with fewer rows than it takes;
# the interpreter takes a millisecond for each row.
NORM_SHAPES = [(1, 2), (2, 3, 44), (1, 5, 65), (70, 128) if INTERPRETING else (1500, 8)]


@ON_KERNEL_DEVICES
@ON_DTYPES
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, None], ids=str)
def test_the_norm_kernel_is_the_sum_and_the_module(device, dtype, shape, weight_dtype):
    from lib.model_triton import add_rms_norm

    x, branch, grad_total, grad_normed = (
        torch.randn(shape, generator=seeded(i)).to(device, dtype) for i in range(4)
    )
    weight = (1 + 0.3 * torch.randn(shape[-1], generator=seeded(4))).to(
        device, weight_dtype or dtype
    )
    inputs = [tensor.requires_grad_() for tensor in (x, branch, weight)]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]

    ours = add_rms_norm(*inputs, 1e-5)
    assert ours[0].equal(x + branch)
    # the norm sees the rounded sum
    total = wide[0] + wide[1] + (ours[0].detach().double() - (wide[0] + wide[1]).detach())
    right = [total, F.rms_norm(total, shape[-1:], wide[2], 1e-5)]
    upstream = [grad_total, grad_normed]
    gradients = torch.autograd.grad(ours, inputs, upstream)
    peers = torch.autograd.grad(right, wide, [gradient.double() for gradient in upstream])
    step = torch.finfo(dtype).eps
    for a, b in zip((*ours, *gradients), (*right, *peers)):
        torch.testing.assert_close(
            a.double(), b, rtol=4 * step, atol=4 * step * b.abs().max().item()
        )


@pytest.mark.skipif(INTERPRETING, reason="this is the process inside")
def test_the_kernels_in_the_interpreter(run_in_interpreter):
    run_in_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [*VARIANTS, {"d_model": 80, "num_heads": 4}, {"d_model": 80, "num_heads": 1}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_gives_the_loss_and_gradients_of_the_cpu(settings, dtype):
    model, token_ids = make_model(**settings), make_token_ids(3, 16)
    targets = make_token_ids(3, 16, seed=2)
    right = model.loss(token_ids, targets, z_loss=0.01)
    right.backward()
    on_gpu = TransformerLM(model.config, device="cuda")
    on_gpu.load_state_dict(model.state_dict())
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        loss = on_gpu.loss(token_ids.cuda(), targets.cuda(), z_loss=0.01)
    loss.backward()
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    assert loss.item() == pytest.approx(right.item(), rel=tolerance)
    for name, gradient in gradients(model).items():
        error = gradients(on_gpu)[name].cpu() - gradient
        assert error.norm() < tolerance * gradient.norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ATTENTION_KERNELS)
def test_kernels_of_attention_agree_in_the_model_on_a_gpu(kernel):
    model, token_ids = make_model(attention_kernel=kernel).cuda(), make_token_ids(3, 16)
    right = make_model()(token_ids)
    torch.testing.assert_close(model(token_ids.cuda()).cpu(), right, rtol=1e-4, atol=1e-4)
