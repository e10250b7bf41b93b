"""What a model costs by formula: parameters, floating-point operations, memory for backward.

Each function takes a `ModelConfig` with `vocab_size` set, and needs no model and no torch.
"""

from lib.config_training import ModelConfig

# These hold all scores; the second also copies q, k and v head by head for its batched products.
COPIES_HEADS = "vectorized_torch"
TEXTBOOK_KERNELS = ("scaled_dot_prod_attention", COPIES_HEADS)


def parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """How many weights each part of `TransformerLM` has, over all layers.

    With d = d_model, L = num_layers, V = vocab_size:

    - token_embeddings: V d
    - attention: L · 4 d², for queries, keys, values and output
    - feed_forward: L · 3 d d_ff (`silu`: L · 2 d ⌊3/2 d_ff⌋)
    - norms: 2 L d, and d before the head (`post`: without the latter; `none`: 0);
      `qk_norm`: L · 2 d / num_heads more
    - lm_head: V d (tied embeddings: 0)
    """
    d, layers = config.d_model, config.num_layers
    num_norms = {"pre": 2 * layers + 1, "post": 2 * layers, "none": 0}[config.norm]
    embedding = _vocab_size(config) * d
    return {
        "token_embeddings": embedding,
        "attention": layers * 4 * d * d,
        "feed_forward": layers * _feed_forward_weights(config),
        "norms": num_norms * d + config.qk_norm * layers * 2 * config.head_dim,
        "lm_head": 0 if config.tied_embeddings else embedding,
    }


def num_parameters(config: ModelConfig) -> int:
    """How many weights `TransformerLM(config)` has; a matrix used twice counts once.

    The sum of `parameters_by_part`.
    """
    return sum(parameters_by_part(config).values())


def flops_by_part(
    config: ModelConfig, context_length: int | None = None, *, is_causal: bool = False
) -> dict[str, int]:
    """Floating-point operations for one token in the forward pass, by part, over all layers.

    The matrix products, with two operations (multiply, add) for each weight or score. With T the
    context length:

    - projections: L · 2 · 4 d²
    - attention: L · 4 T d, half for q · k and half for the sum of values; with `is_causal`, where
      tokens see (T + 1) / 2 keys on average, L · 2 (T + 1) d
    - feed_forward: two for each of its weights
    - lm_head: 2 V d

    Left out, as usual: the embedding (a look-up), norms, softmax, SiLU, RoPE and residual sums,
    which take time for memory and not for arithmetic.
    """
    length = config.context_length if context_length is None else context_length
    d, layers = config.d_model, config.num_layers
    # of q · k and of the sum of values
    flops_per_width = 2 * (length + 1) if is_causal else 4 * length
    return {
        "projections": layers * 8 * d * d,
        "attention": layers * flops_per_width * d,
        "feed_forward": layers * 2 * _feed_forward_weights(config),
        "lm_head": 2 * _vocab_size(config) * d,
    }


def flops_per_token(
    config: ModelConfig,
    context_length: int | None = None,
    *,
    backward: bool = True,
    is_causal: bool = False,
) -> int:
    """Floating-point operations for one token of a window of `context_length` tokens.

    forward = 2 · (weights in matrices but the embedding) + L · 4 T d (`flops_by_part`)

    and with `backward` three times that: each product has two in the backward pass, for the
    gradients of both its factors. That makes 6 operations for each weight and 12 L T d for
    attention, the count that model FLOPs utilisation is based on (PaLM, Chowdhery et al. 2022,
    appendix B). What is computed twice, as scores in FlashAttention's backward pass, counts once.

    Args:
        context_length: that of `config` when left out.
        is_causal: whether scores that a causal mask hides are left out, as by kernels that skip
            them; by default all T² count, as in PaLM and in `torch.utils.flop_counter`.
    """
    forward = sum(flops_by_part(config, context_length, is_causal=is_causal).values())
    return 3 * forward if backward else forward


def activation_bytes_by_part(
    config: ModelConfig,
    batch_size: int,
    context_length: int | None = None,
    *,
    element_bytes: int = 4,
    autocast: bool = True,
    cuda: bool = False,
) -> dict[str, int]:
    """Bytes that the forward pass of `TransformerLM.loss` keeps for the backward pass, by part.

    In eager mode, for more than one sequence, without the weights themselves. `torch.compile`
    keeps less. With N = batch_size · T tokens, S = N · num_heads · T scores, f the inner width of
    the feed-forward layer, e = `element_bytes`, and 4 where float32 is kept in any case:

    - token_ids: 8 N
    - norms: each keeps the normalised input, 4 N d, the inverse root, 4 N, and its result e N d as
      the next product's input; that of the last norm is not kept. On CUDA each also keeps its
      input in float32, 4 N d; but with norm `pre` all but the first keep there their input and
      result alone, e N d each, and the inverse root. Norm `none`: the products' inputs, 2 L e N d
    - attention: L · e N d times 6: q, k and v as projected, in one tensor that v holds on to; q
      and k turned; the result. Without RoPE 4. `vectorized_torch` in any case 4: copies of q, k
      and v head by head, the result. RoPE on a CPU keeps its angles, L · 2 · 4 T head_dim.
      `qk_norm` adds two norms in each layer, 2 · (4 N d + 4 N num_heads), and the angles on CUDA
      too. There its norms keep their inputs as well, which in float32 are the projection:
      `vectorized_torch` keeps it then, and the others keep q and k without RoPE too
    - scores: `sdpa` keeps the log-sum-exp, L · 4 N num_heads. The textbook kernels keep scores and
      exponentials in float32 and probabilities, L (8 + e) S, and 10 L N num_heads of row sums and
      maxima; and masks, `vectorized_torch` L T² and `scaled_dot_prod_attention` L S
    - feed_forward: L · 3 e N f (gate, value, product); `silu`: L · 2 e N f
    - loss: the gradients of its inputs, e (N d + V d)
    - weight_copies: e for each weight of the layers' matrices, under autocast to 2-byte elements

    Args:
        context_length: T; that of `config` when left out.
        element_bytes: 4 for float32, 2 for bfloat16 and float16.
        autocast: whether 2-byte elements come from autocast, and not from weights of that type.
        cuda: whether the model is on a CUDA device, with its kernels, and not on a CPU.

    Raises:
        ValueError: the attention kernel is compiled: the compiler decides what is kept.
    """
    length = config.context_length if context_length is None else context_length
    tokens = batch_size * length
    matrices = config.num_layers * (4 * config.d_model**2 + _feed_forward_weights(config))
    loss = (tokens + _vocab_size(config)) * config.d_model * element_bytes
    buffers = 3 if config.feed_forward == "swiglu" else 2
    return {
        "token_ids": 8 * tokens,
        "norms": _norm_bytes(config, tokens, element_bytes, cuda=cuda),
        "attention": _attention_bytes(config, batch_size, length, element_bytes, cuda=cuda),
        "scores": _score_bytes(config, batch_size, length, element_bytes),
        "feed_forward": config.num_layers * buffers * tokens * config.ff_width * element_bytes,
        "loss": loss,
        "weight_copies": matrices * element_bytes if autocast and element_bytes < 4 else 0,
    }


def activation_bytes(
    config: ModelConfig,
    batch_size: int,
    context_length: int | None = None,
    *,
    element_bytes: int = 4,
    autocast: bool = True,
    cuda: bool = False,
) -> int:
    """Bytes that the forward pass of `TransformerLM.loss` keeps for the backward pass.

    The sum of `activation_bytes_by_part`, where the formula stands.
    """
    parts = activation_bytes_by_part(
        config,
        batch_size,
        context_length,
        element_bytes=element_bytes,
        autocast=autocast,
        cuda=cuda,
    )
    return sum(parts.values())


def _norm_bytes(config: ModelConfig, tokens: int, element_bytes: int, *, cuda: bool) -> int:
    d, num_norms = config.d_model, 2 * config.num_layers
    if config.norm == "none":
        return num_norms * tokens * d * element_bytes
    results = num_norms * tokens * d * element_bytes
    inside = ((8 if cuda else 4) * d + 4) * tokens
    if config.norm == "post":
        # the loss keeps no result of the last norm, but the first product its input
        return num_norms * inside + results
    inside_fused = (d * element_bytes + 4) * tokens
    return inside + num_norms * (inside_fused if cuda else inside) + results


def _attention_bytes(
    config: ModelConfig, batch_size: int, length: int, element_bytes: int, *, cuda: bool
) -> int:
    tokens = batch_size * length
    width = tokens * config.d_model
    has_rope, copies_heads = config.positions == "rope", config.attention_kernel == COPIES_HEADS
    keeps_projection = not copies_heads or (cuda and config.qk_norm and element_bytes == 4)
    elements = 1 + 3 * keeps_projection
    if copies_heads:
        elements += 3
    elif has_rope or config.qk_norm:
        elements += 2
    num_bytes = elements * width * element_bytes
    if has_rope and (config.qk_norm or not cuda):
        num_bytes += 2 * 4 * length * config.head_dim
    if config.qk_norm:
        # on CUDA the input too, unless it is the projection in float32, which is counted already
        kept = 2 * width if cuda and element_bytes < 4 else width
        num_bytes += 2 * 4 * (kept + tokens * config.num_heads)
    return config.num_layers * num_bytes


def _score_bytes(config: ModelConfig, batch_size: int, length: int, element_bytes: int) -> int:
    kernel = config.attention_kernel
    if kernel.endswith("_compiled"):
        raise ValueError(
            f"attention_kernel is {kernel}, and what it keeps is up to the compiler; "
            "right is: a kernel that is not compiled"
        )
    rows = batch_size * config.num_heads * length
    num_bytes = 4 * rows
    if kernel in TEXTBOOK_KERNELS:
        masks = length * length if kernel == COPIES_HEADS else rows * length
        num_bytes = (8 + element_bytes) * rows * length + masks + 10 * rows
    return config.num_layers * num_bytes


def _feed_forward_weights(config: ModelConfig) -> int:
    """Weights of one layer's feed-forward part."""
    num_matrices = 3 if config.feed_forward == "swiglu" else 2
    return num_matrices * config.d_model * config.ff_width


def _vocab_size(config: ModelConfig) -> int:
    if config.vocab_size is None:
        raise ValueError("vocab_size is None; right is: the size of the tokenizer's vocabulary")
    return config.vocab_size
