"""The costs of a model by formula: parameters, FLOPs, and bytes kept for the backward pass.

Every function takes a `ModelConfig` with `vocab_size` set, and needs neither a model nor torch.

Symbols: d = d_model, L = num_layers, V = vocab_size, T = context length, f = inner width of the
feed-forward layer, N = batch_size · T tokens, e = bytes per element.
"""

from typing import Any

from lib.model.config import ModelConfig

# The naive kernels keep all scores; the second also copies q, k and v for its batched matmuls.
COPIES_HEADS = "vectorized_torch"
NAIVE_KERNELS = ("scaled_dot_prod_attention", COPIES_HEADS)
# The most bytes of logits in memory at once on a CPU (`lib.model.loss`).
CHUNK_BYTES = 16 << 20


def num_parameters(config: ModelConfig) -> int:
    """The number of weights in `TransformerLM(config)`; tied embeddings count once."""
    return sum(parameters_by_part(config).values())


def parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """The number of weights in each part of `TransformerLM`, over all layers.

    - token_embeddings: V d
    - attention: L · 4 d², for queries, keys, values and output
    - feed_forward: L · 3 d f (`silu`: L · 2 d f)
    - norms: (2 L + 1) d (`post`: 2 L d, `none`: 0); `qk_norm` adds L · 2 head_dim
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


def flops_per_token(
    config: ModelConfig, context_length: int | None = None, *, backward: bool = True
) -> int:
    """FLOPs for one token of a sequence of `context_length` tokens.

    forward = 2 · (weights of all matrices but the embedding) + L · 4 T d (see `flops_by_part`)

    Forward and backward together take three times that, since each matmul has two in the backward
    pass, one for the gradient of either factor: 6 FLOPs per weight, and 12 L T d for attention.
    Model FLOPs utilization (MFU) is based on this count (PaLM, Chowdhery et al. 2022, appendix B).
    All T² scores count, as in `torch.utils.flop_counter`, also those that the causal mask hides.
    Whatever is computed twice, like scores in FlashAttention's backward, counts once.

    Args:
        context_length: default `config.context_length`.
        backward: count the backward pass too.
    """
    forward = sum(flops_by_part(config, context_length).values())
    return 3 * forward if backward else forward


def flops_by_part(config: ModelConfig, context_length: int | None = None) -> dict[str, int]:
    """FLOPs for one token in the forward pass, by part, over all layers.

    A multiply and an add for each weight of a matmul, and for each element of q · k and of the
    weighted sum of values:

    - projections: L · 2 · 4 d²
    - attention: L · 4 T d
    - feed_forward: L · 2 · 3 d f (`silu`: L · 2 · 2 d f)
    - lm_head: 2 V d

    Left out, as usual: the embedding (a lookup), norms, softmax, SiLU, RoPE and residual sums,
    whose time goes into memory traffic and not into arithmetic.
    """
    length = config.context_length if context_length is None else context_length
    d, layers = config.d_model, config.num_layers
    return {
        "projections": layers * 8 * d * d,
        "attention": layers * 4 * length * d,
        "feed_forward": layers * 2 * _feed_forward_weights(config),
        "lm_head": 2 * _vocab_size(config) * d,
    }


def activation_bytes(
    config: ModelConfig, batch_size: int, context_length: int | None = None, **options: Any
) -> int:
    """Bytes kept for the backward pass: the sum of `activation_bytes_by_part`, same arguments."""
    return sum(activation_bytes_by_part(config, batch_size, context_length, **options).values())


def activation_bytes_by_part(
    config: ModelConfig,
    batch_size: int,
    context_length: int | None = None,
    *,
    element_bytes: int = 4,
    autocast: bool = True,
    cuda: bool = False,
    around_block: bool = False,
) -> dict[str, int]:
    """Bytes that the forward pass of `TransformerLM.loss` keeps for the backward pass, by part.

    In eager mode (`torch.compile` keeps less), for more than one sequence, without the weights
    themselves. Factors of 4 stand for tensors that are float32 whatever e is.

    - token_ids: 8 N
    - norms, attention, scores: see `_norm_bytes`, `_attention_bytes`, `_score_bytes`
    - feed_forward: L · 3 e N f, for gate, value and their product; `silu`: L · 2 e N f
    - loss: e (N d + V d), the gradients of its inputs
    - weight_copies: e for each weight in the layers' matrices, where autocast casts them

    Args:
        context_length: T; default `config.context_length`.
        element_bytes: e: 4 for float32, 2 for bfloat16 and float16.
        autocast: 2-byte elements come from autocast, and not from weights of that dtype.
        cuda: the model is on a CUDA GPU with its Triton kernels, and not on a CPU.
        around_block: the model's `around_block` is set: on CUDA every norm is a Triton kernel then.

    Raises:
        ValueError: the attention kernel is compiled, so that the compiler decides what is kept.
    """
    length = config.context_length if context_length is None else context_length
    layers, tokens = config.num_layers, batch_size * length
    num_widths = 3 if config.feed_forward == "swiglu" else 2
    matrices = layers * (4 * config.d_model**2 + _feed_forward_weights(config))
    return {
        "token_ids": 8 * tokens,
        "norms": _norm_bytes(config, tokens, element_bytes, cuda=cuda, around_block=around_block),
        "attention": layers * _attention_bytes(config, tokens, length, element_bytes, cuda=cuda),
        "scores": layers * _score_bytes(config, tokens, length, element_bytes),
        "feed_forward": layers * num_widths * tokens * config.ff_width * element_bytes,
        "loss": (tokens + _vocab_size(config)) * config.d_model * element_bytes,
        "weight_copies": matrices * element_bytes if autocast and element_bytes < 4 else 0,
    }


def _norm_bytes(
    config: ModelConfig, tokens: int, element_bytes: int, *, cuda: bool, around_block: bool
) -> int:
    """Norms of all layers, and the final one.

    Each keeps the normalized input, 4 N d, the inverse RMS, 4 N, and its result, e N d, which is
    the input of the next matmul; on CUDA also its input in float32, 4 N d. The result of the last
    norm counts with the loss. Triton's norms (CUDA, pre-norm, all but the first, and that one too
    with `around_block`) keep input and result, e N d each, and the inverse RMS. Without norms only
    the matmuls' inputs are kept.
    """
    # every norm's result is the input of a matmul
    d, num_norms = config.d_model, 2 * config.num_layers
    results = num_norms * tokens * d * element_bytes
    if config.norm == "none":
        return results

    # what PyTorch's and Triton's norms keep besides
    inside = ((8 if cuda else 4) * d + 4) * tokens
    if config.norm == "post":
        # the last norm's result is not kept here, but the input of the first matmul is
        return num_norms * inside + results
    inside_kernel = (d * element_bytes + 4) * tokens
    first = inside_kernel if cuda and around_block else inside
    return first + num_norms * (inside_kernel if cuda else inside) + results


def _attention_bytes(
    config: ModelConfig, tokens: int, length: int, element_bytes: int, *, cuda: bool
) -> int:
    """Queries, keys, values and the result of one layer's attention, without scores.

    - projection and result: 3 e N d, of which v is a view, and e N d
    - q and k after rotation or norm: 2 e N d
    - `vectorized_torch` keeps copies of q, k and v by head instead: 3 e N d
    - angles of RoPE, where PyTorch rotates (on a CPU, or after `qk_norm`): 2 · 4 T head_dim
    - `qk_norm`: 2 · (4 N d + 4 N num_heads), as in `_norm_bytes`; on CUDA also their inputs,
      2 · 4 N d, unless those are the projection itself, in float32
    """
    # in units of one tensor of the width of the model, e N d
    width = tokens * config.d_model
    has_rope, copies_heads = config.positions == "rope", config.attention_kernel == COPIES_HEADS
    norms_keep_projection = cuda and config.qk_norm and element_bytes == 4

    # the result; the projection; q and k after rotation or norm, or copies by head
    widths = 1
    if not copies_heads or norms_keep_projection:
        widths += 3
    if copies_heads:
        widths += 3
    elif has_rope or config.qk_norm:
        widths += 2
    num_bytes = widths * width * element_bytes

    # what is float32 in any model: angles, and the insides of the norms of q and k
    if has_rope and (config.qk_norm or not cuda):
        num_bytes += 2 * 4 * length * config.head_dim
    if config.qk_norm:
        norm_widths = 2 if cuda and element_bytes < 4 else 1
        num_bytes += 2 * 4 * (norm_widths * width + tokens * config.num_heads)
    return num_bytes


def _score_bytes(config: ModelConfig, tokens: int, length: int, element_bytes: int) -> int:
    """Tensors with a row for each query in each head, N · num_heads rows, in one layer.

    Fused kernels keep the log-sum-exp, 4 a row. The naive kernels keep scores and exponentials in
    float32 and probabilities, 8 + e for each of the T scores in a row; sums and maxima, 10 a row;
    and masks: T² for all heads together, or T a row where heads are computed one by one.
    """
    kernel, rows = config.attention_kernel, tokens * config.num_heads
    if kernel.endswith("_compiled"):
        raise ValueError(
            f"attention_kernel must not be compiled, got {kernel}: what it keeps is up to the "
            "compiler"
        )

    # fused: a number for each row of scores; naive: all scores
    if kernel not in NAIVE_KERNELS:
        return 4 * rows
    masks = length * length if kernel == COPIES_HEADS else rows * length
    return (8 + element_bytes) * rows * length + 10 * rows + masks


def _feed_forward_weights(config: ModelConfig) -> int:
    """Weights of one layer's feed-forward part."""
    num_matrices = 3 if config.feed_forward == "swiglu" else 2
    return num_matrices * config.d_model * config.ff_width


def _vocab_size(config: ModelConfig) -> int:
    if config.vocab_size is None:
        raise ValueError("vocab_size must be the size of the tokenizer's vocabulary, got None")
    return config.vocab_size
