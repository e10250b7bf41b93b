"""Parts of the model against PyTorch's own, and the properties of the whole.

The standard model as a whole is compared with another implementation in `test_llama`.
"""

import dataclasses
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.model import transformer
from lib.model.config import ModelConfig
from lib.model.transformer import (
    CausalSelfAttention,
    Linear,
    MeanLoss,
    RMSNorm,
    RotaryEmbedding,
    SiLUFeedForward,
    TransformerBlock,
    TransformerLM,
    swiglu,
    truncated_normal_,
)
from tests.flash_attention.cases import rotated
from tests.operators import Operators

CONFIG = ModelConfig(
    vocab_size=61, context_length=16, d_model=32, num_layers=2, num_heads=4, d_ff=44
)
# every field once or twice, in few combinations
VARIANTS = [
    {},
    {"norm": "post", "tied_embeddings": True},
    {"norm": "none", "attention_kernel": "scaled_dot_prod_attention"},
    {"qk_norm": True, "attention_kernel": "vectorized_torch"},
    {"qk_norm": True, "positions": "none", "tied_embeddings": True, "feed_forward": "silu"},
]
ON_VARIANTS = pytest.mark.parametrize("settings", VARIANTS, ids=str)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def count_compilations(backend: str):
    """A backend that counts what it compiles; loading the compiler takes seconds, so only here."""
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend(backend)


def make_model(**settings) -> TransformerLM:
    return TransformerLM(dataclasses.replace(CONFIG, **settings), generator=seeded())


def make_token_ids(batch_size: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (batch_size, length), generator=seeded(seed))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_computes_in_float32(dtype):
    # its square overflows in float16 and swallows eps in bfloat16
    x = torch.randn(4, 64, generator=seeded()).to(dtype) * 1000
    out = RMSNorm(64)(x)
    assert out.dtype == dtype
    assert out.equal(F.rms_norm(x.double(), (64,), eps=1e-5).to(dtype))


def test_the_feed_forward_layer_without_a_gate_is_its_formula():
    layer, x = SiLUFeedForward(6, 10), torch.randn(2, 3, 6, generator=seeded())
    hidden = x @ layer.w1.weight.T
    right = (hidden / (1 + (-hidden).exp())) @ layer.w2.weight.T
    torch.testing.assert_close(layer(x), right)


@pytest.mark.parametrize(
    ("head_dim", "theta", "dtype"),
    [(2, 100.0, torch.float32), (20, 10000.0, torch.float32), (6, 100.0, torch.float64)],
)
def test_rope_multiplies_complex_numbers(head_dim, theta, dtype):
    x = torch.randn(2, 1, 300, head_dim, generator=seeded(), dtype=dtype)
    ours = RotaryEmbedding(head_dim, 300, theta)(x)
    frequencies = theta ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    right = rotated(x.double(), torch.arange(300)[:, None] * frequencies)
    assert ours.dtype == dtype
    tolerance = 9 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), right, rtol=tolerance, atol=tolerance)


def test_rope_rotates_at_the_positions_given():
    rope, x = RotaryEmbedding(4, 20), torch.randn(2, 9, 4, generator=seeded())
    positions = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 19])
    right = torch.stack([rope(row.expand(20, 4))[p] for row, p in zip(x[1], positions)])
    torch.testing.assert_close(rope(x, positions)[1], right)
    for wrong in (-1, 20):
        positions[4] = wrong
        with pytest.raises(IndexError, match="index out of range"):
            rope(x, positions)


@pytest.mark.parametrize(
    "move",
    [
        lambda rope: rope.to(torch.bfloat16).float(),
        lambda rope: rope.double(),
        lambda rope: rope.to("meta").to_empty(device="cpu"),
    ],
    ids=["bfloat16 and back", "double", "meta and back"],
)
def test_rope_keeps_its_angles_whatever_becomes_of_the_model(move):
    rope, moved = RotaryEmbedding(8, 300), move(RotaryEmbedding(8, 300))
    assert moved.cos.equal(rope.cos)
    assert moved.sin.equal(rope.sin)


STRIDED = {
    "every other column": lambda x: torch.stack([x, -x], -1).flatten(-2)[..., ::2],
    "rows of odd length": lambda x: torch.cat([x, -x[..., :1]], -1)[..., :-1],
    "from the second number on": lambda x: torch.cat([x, x], -1)[..., 1:9],
}


@pytest.mark.parametrize("layout", STRIDED)
def test_rope_takes_any_strides(layout):
    rope, x = RotaryEmbedding(8, 3), STRIDED[layout](torch.randn(2, 3, 8, generator=seeded()))
    assert rope(x).equal(rope(x.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rope_rounds_once(dtype):
    rope, x = RotaryEmbedding(8, 50), torch.randn(2, 50, 8, generator=seeded()).to(dtype)
    assert rope(x).equal(rope(x.float()).to(dtype))


@pytest.mark.parametrize("positions", ["rope", "none"])
def test_self_attention_with_norms_is_pytorchs_head_by_head(positions):
    config = dataclasses.replace(CONFIG, qk_norm=True, positions=positions)
    attn, x = CausalSelfAttention(config), torch.randn(2, 9, 32, generator=seeded())
    rope = RotaryEmbedding(8, 16) if positions == "rope" else None
    nn.init.normal_(attn.q_norm.weight, 1, 0.3, generator=seeded(3))
    nn.init.normal_(attn.k_norm.weight, 1, 0.3, generator=seeded(4))
    heads = []
    for head in range(4):
        rows = slice(8 * head, 8 * head + 8)
        q, k, v = (x @ weight[rows].T for weight in attn.qkv_proj.weight.chunk(3))
        q = F.rms_norm(q, (8,), attn.q_norm.weight, config.norm_eps)
        k = F.rms_norm(k, (8,), attn.k_norm.weight, config.norm_eps)
        if rope is not None:
            q, k = rope(q), rope(k)
        heads.append(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    right = torch.cat(heads, dim=-1) @ attn.output_proj.weight.T
    torch.testing.assert_close(attn(x, rope), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_size", [4, 3])
def test_each_sequence_can_have_positions_of_its_own(batch_size):
    # a batch as large as there are heads, and another
    attn, rope = CausalSelfAttention(CONFIG), RotaryEmbedding(8, 16)
    x = torch.randn(batch_size, 9, 32, generator=seeded())
    # two documents packed into a row
    positions = torch.arange(9).repeat(batch_size, 1)
    positions[0, 5:] -= 5
    positions[-1] += 3
    rows = [attn(x[i : i + 1], rope, positions[i]) for i in range(batch_size)]
    torch.testing.assert_close(attn(x, rope, positions), torch.cat(rows), rtol=1e-4, atol=1e-5)
    # the row's own rotation does count
    assert not attn(x, rope, positions)[0].allclose(attn(x, rope)[0], atol=1e-3)


def test_other_shapes_than_those_of_the_formula_are_refused():
    model, token_ids = make_model(), make_token_ids(2, 8)
    with pytest.raises(ValueError, match=r"token_ids must be \(batch, length\), got shape \(8,\)"):
        model(token_ids[0])
    # as many targets, in another order
    with pytest.raises(ValueError, match=r"targets must have shape \(2, 8\) .*, got \(8, 2\)"):
        model.loss(token_ids, token_ids.T)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        # one number would be multiplied by all weights
        (lambda: RMSNorm(8)(torch.ones(3, 1)), r"got \(3, 1\) torch.float32"),
        (lambda: RMSNorm(2)(torch.ones(3, 2, dtype=torch.int64)), "torch.int64"),
        (lambda: swiglu(torch.ones(3, 7)), "an even number of columns, got 7"),
        (lambda: Linear(4, 4, stacked=3), "stacked must be a divisor of d_out 4, got 3"),
        (lambda: RotaryEmbedding(7, 4), "head_dim must be even, and at least 2, got 7"),
        (lambda: RotaryEmbedding(2, 0), "max_length must be at least 1"),
        (lambda: RotaryEmbedding(2, 4, 0.0), "theta more than 0, got 4 and 0.0"),
        # a single row of cosines would serve any length
        (lambda: RotaryEmbedding(8, 1)(torch.ones(2, 5, 8)), "at most max_length 1, got 5"),
        (lambda: RotaryEmbedding(8, 5)(torch.ones(2, 5, 6)), r"x must be \(\.\.\., length, 8\) fl"),
        (lambda: RotaryEmbedding(8, 9)(torch.ones(2, 3, 8), torch.arange(1)), "positions must be"),
    ],
)
def test_parts_refuse_by_name_what_they_would_compute_wrongly(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("tied_embeddings", [False, True])
def test_a_model_on_the_meta_device_becomes_real_by_loading(tied_embeddings):
    right, token_ids = make_model(tied_embeddings=tied_embeddings), make_token_ids(2, 8)
    with torch.device("meta"):
        model = TransformerLM(right.config)
    assert model(token_ids.to("meta")).is_meta
    model.to_empty(device="cpu").load_state_dict(right.state_dict())
    assert model(token_ids).equal(right(token_ids))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@ON_VARIANTS
def test_a_model_in_float64_never_computes_in_less(settings, device):
    model, token_ids = make_model(**settings).double().to(device), make_token_ids(2, 9).to(device)
    positions_of_blocks = torch.arange(9, device=device)
    with Operators() as operators:
        model.loss(token_ids, token_ids, z_loss=0.01).backward()
        x = torch.ones(2, 9, 32, dtype=torch.float64, device=device)
        model.layers[0](x, model.rope, positions_of_blocks)
    assert {x for x in operators.made if x.is_floating_point} == {torch.float64}


@pytest.mark.parametrize("norm", ["post", "none"])
def test_the_block_puts_norms_where_the_config_says(norm):
    block = TransformerBlock(dataclasses.replace(CONFIG, norm=norm))
    x = torch.randn(2, 5, 32, generator=seeded())
    for name, weight in block.named_parameters():
        if name.startswith("ln"):
            nn.init.normal_(weight, 1, 0.3, generator=seeded(len(name)))
    if norm == "post":
        middle = block.ln1(x + block.attn(x))
        right = block.ln2(middle + block.ffn(middle))
    else:
        middle = x + block.attn(x)
        right = middle + block.ffn(middle)
    torch.testing.assert_close(block(x), right)


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
        assert gradient.any(), name
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6)


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
        model.token_embeddings: 1.0,
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


def test_a_generator_decides_the_weights_and_leaves_the_global_one_alone():
    state = torch.random.get_rng_state()
    first, again, other = (
        TransformerLM(CONFIG, generator=seeded(seed)).state_dict() for seed in (0, 0, 1)
    )
    assert all(first[name].equal(again[name]) for name in first)
    assert all(not first[name].equal(other[name]) for name in first if "ln" not in name)
    assert torch.random.get_rng_state().equal(state)


@pytest.mark.parametrize("draw", [True, False])
def test_weights_are_drawn_once_or_not_at_all(draw, monkeypatch):
    drawn, draw_weights = [], nn.init.trunc_normal_

    def count(weight, *arguments, **keywords):
        drawn.append(0 if weight.is_meta else weight.numel())
        return draw_weights(weight, *arguments, **keywords)

    monkeypatch.setattr(nn.init, "trunc_normal_", count)
    model = TransformerLM(CONFIG, draw=draw)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.ndim == 2)
    assert sum(drawn) == (matrices if draw else 0)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}


def test_dtype_is_that_of_the_matrices_and_norms_stay_in_float32():
    model = TransformerLM(dataclasses.replace(CONFIG, qk_norm=True), dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        is_norm = "ln" in name or "norm" in name
        assert weight.dtype == (torch.float32 if is_norm else torch.bfloat16), name


@pytest.mark.parametrize(
    ("kernel", "has_short_weights"), [("sdpa", True), ("vectorized_torch", False)]
)
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


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
            ],
        ),
    ],
)
def test_a_compiled_loss_is_the_plain_one_in_one_graph_up_to_the_head(backend, monkeypatch):
    torch.compiler.reset()
    counter, compile = count_compilations(backend), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kw: compile(f, backend=counter, **kw))
    model, token_ids = make_model(num_layers=1), make_token_ids(2, 16)
    results = []
    for is_compiled in (False, True):
        mean_loss = MeanLoss(model, torch.device("cpu"), None, 0.01)
        if is_compiled:
            model.compile_whole()
        model.zero_grad()
        loss = mean_loss(token_ids[:, :-1], token_ids[:, 1:])
        loss.backward()
        results.append({"loss": loss.detach()} | gradients(model))
    plain, compiled = results
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-3, atol=1e-5)
    # the model itself stays as it was, for evaluation and generation
    assert counter.frame_count == 1
    model(token_ids)
    assert counter.frame_count == 1
    torch.compiler.reset()


@pytest.fixture
def fused_on_cpu(monkeypatch):
    """Let a model take its path for GPUs on a CPU, with the fused kernels in plain PyTorch."""
    elementwise_triton = pytest.importorskip("lib.model.elementwise_triton")

    def rms_norm(x, weight, eps):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def add_rms_norm(x, branch, weight, eps):
        x = x + branch
        return x, rms_norm(x, weight, eps)

    def switch(model: TransformerLM) -> None:
        # blocks and norms, but neither attention nor feed-forward
        monkeypatch.setattr(transformer, "kernels_for", lambda x: "triton")
        for layer in model.layers:
            layer.attn.uses_kernels = False
        monkeypatch.setattr(elementwise_triton, "rms_norm", rms_norm)
        monkeypatch.setattr(elementwise_triton, "add_rms_norm", add_rms_norm)

    return switch


def just_run(index, block, *arguments):
    """What `around_block` may be."""
    return block(*arguments)


@pytest.mark.parametrize("path", ["plain", "fused", "around blocks"])
@pytest.mark.parametrize("tied", [False, True])
def test_each_part_is_announced_before_its_parameters_are_read(path, tied, fused_on_cpu):
    model, token_ids = make_model(tied_embeddings=tied), make_token_ids(2, 8)
    if path != "plain":
        fused_on_cpu(model)
    if path == "around blocks":
        model.around_block = just_run
    announced, ready, operators = [], set(), Operators()

    def before_part(part: nn.Module) -> None:
        assert operators.read & own <= ready
        announced.append(part)
        ready.update(weight.data_ptr() for weight in part.parameters())

    own = {weight.data_ptr() for weight in model.parameters()}
    model.before_part = before_part
    first, second = model.layers
    parts = [model.token_embeddings, first, second, model.ln_final, model.head]
    if path == "fused":
        # a fused block ends with the norm of the next one
        parts[1:3] = [first.ln1, first, second.ln1, second]
    for run in (model, lambda ids: MeanLoss(model, torch.device("cpu"), None, 0.0)(ids, ids)):
        announced.clear()
        ready.clear()
        with operators:
            run(token_ids)
        assert announced == parts
        assert operators.read & own == ready
        operators.read.clear()


@ON_VARIANTS
@pytest.mark.parametrize("around", [None, just_run])
def test_the_path_of_gpus_gives_the_loss_and_gradients_of_the_plain_one(
    settings, around, fused_on_cpu
):
    settings = settings | {"norm": "pre"}
    model, fused, token_ids = make_model(**settings), make_model(**settings), make_token_ids(3, 16)
    fused_on_cpu(fused)
    model.use_kernels(False)
    fused.around_block = around
    losses = [each.loss(token_ids[:, :-1], token_ids[:, 1:]) for each in (model, fused)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradients(fused)[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_compiled_blocks_share_one_compilation_without_a_break(fused, fused_on_cpu, monkeypatch):
    torch.compiler.reset()
    counter, compile = count_compilations("aot_eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kw: compile(f, backend=counter, **kw))
    model, token_ids = make_model(num_layers=3), make_token_ids(2, 8)
    right = model.loss(token_ids, token_ids)
    right.backward()
    expected = gradients(model)
    model.zero_grad()
    if fused:
        fused_on_cpu(model)
    model.compile_blocks()
    announced = []
    model.before_part = announced.append
    loss = model.loss(token_ids, token_ids)
    loss.backward()
    torch.testing.assert_close(loss, right)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    assert counter.frame_count == 1
    assert set(model.layers) <= set(announced)
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [*VARIANTS, {"tied_embeddings": True}, {"d_model": 80, "num_heads": 4}],
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
