"""A decoder-only Transformer language model, from tensors up.

    token ids -> Embedding -> TransformerBlock × num_layers -> RMSNorm -> head -> logits

Weights are shaped (d_out, d_in), initialized and named as in Stanford's CS336, assignment 1 (2025).
On a CUDA GPU the same modules run through a fused path (`TransformerLM._fused_blocks`), where each
residual sum and the norm after it are one Triton kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.core.ranges import annotate
from lib.model.attention import KVCache, attend
from lib.model.config import ModelConfig
from lib.model.elementwise import kernels_for, rms_norm, swiglu
from lib.model.loss import linear_cross_entropy


@torch.no_grad()
def truncated_normal_(weight: Tensor, std: float, generator: torch.Generator | None = None) -> None:
    """Fill `weight` from N(0, std²), redrawing values beyond three standard deviations."""
    nn.init.trunc_normal_(weight, 0.0, std, -3 * std, 3 * std, generator=generator)


class Linear(nn.Module):
    """y = x Wᵀ, without a bias: (..., d_in) -> (..., d_out).

    Weights come from a normal distribution of variance 2 / (d_in + d_out), truncated at three
    standard deviations (Glorot and Bengio 2010, equation 12).

    Args:
        stacked: number of matrices with the same input that are stacked in `weight`, each of
            d_out / stacked rows and initialized on its own. One large matmul beats several small.
    """

    def __init__(self, d_in: int, d_out: int, *, stacked: int = 1, device=None, dtype=None) -> None:
        super().__init__()
        if stacked < 1 or d_out % stacked:
            raise ValueError(f"stacked must be a divisor of d_out {d_out}, got {stacked}")
        self.stacked = stacked
        self.weight = nn.Parameter(torch.empty(d_out, d_in, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        d_out, d_in = self.weight.shape
        truncated_normal_(self.weight, math.sqrt(2 / (d_in + d_out // self.stacked)), generator)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """A row for each token id: (...) int64 -> (..., d_model); initialized from N(0, 1)."""

    def __init__(self, vocab_size: int, d_model: int, *, device=None, dtype=None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        truncated_normal_(self.weight, 1.0, generator)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang and Sennrich 2019).

    Computed in at least float32; the result has the dtype of x.
    """

    def __init__(
        self, d_model: int, eps: float = 1e-5, *, device=None, dtype=torch.float32
    ) -> None:
        super().__init__()
        self.eps = eps
        # a gain for each coordinate
        self.weight = nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class SwiGLU(nn.Module):
    """W2 (SiLU(W1 x) ⊙ W3 x): a gate decides what passes (Shazeer 2020, equation 6).

    SiLU(x) = x · sigmoid(x). `w13` is W1 on top of W3.
    """

    def __init__(self, d_model: int, d_ff: int, *, device=None, dtype=None) -> None:
        super().__init__()
        # gate and value read the same input: one matmul
        self.w13 = Linear(d_model, 2 * d_ff, stacked=2, device=device, dtype=dtype)
        self.w2 = Linear(d_ff, d_model, device=device, dtype=dtype)
        self.uses_kernels = True

    def forward(self, x: Tensor) -> Tensor:
        with annotate("feed-forward"):
            gate_and_value = self.w13(x)  # (..., 2 · d_ff)
            return self.w2(swiglu(gate_and_value, use_kernels=self.uses_kernels))  # (..., d_model)


class SiLUFeedForward(nn.Module):
    """W2 SiLU(W1 x): SwiGLU without the gate."""

    def __init__(self, d_model: int, d_ff: int, *, device=None, dtype=None) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff, device=device, dtype=dtype)
        self.w2 = Linear(d_ff, d_model, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("feed-forward"):
            return self.w2(F.silu(self.w1(x)))


class RotaryEmbedding(nn.Module):
    """Rotate each pair of coordinates by an angle proportional to the position (Su et al. 2021).

    Coordinates 2i and 2i + 1 at position t rotate by t · theta^(-2i / head_dim), so that the dot
    product of a query and a key depends on the distance between their positions alone.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_length: int, theta: float = 10000.0, *, device=None):
        super().__init__()
        if head_dim % 2 or head_dim < 2:
            raise ValueError(f"head_dim must be even, and at least 2, got {head_dim}")
        if max_length < 1 or not theta > 0:
            raise ValueError(
                f"max_length must be at least 1 and theta more than 0, got {max_length} and {theta}"
            )
        self.head_dim, self.max_length, self.theta = head_dim, max_length, theta
        # not saved, since they follow from the arguments
        device = torch.get_default_device() if device is None else device
        cos, sin = self._tables(torch.float32, device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _tables(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """The cosines and sines of all angles, (max_length, head_dim / 2) each."""
        # in float64: an angle of many turns has few digits left in float32
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu")
        frequencies = self.theta ** (-pairs / self.head_dim)
        positions = torch.arange(self.max_length, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, frequencies)
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Move the tables; they stay float32 in a model of any dtype, and `to_empty` fills them."""
        before = self.cos
        super()._apply(fn, recurse)
        if self.cos is not before:
            self.cos, self.sin = self._tables(torch.float32, self.cos.device)
        return self

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotate x (..., length, head_dim) at `positions` (..., length); 0, 1, … when left out.

        Raises:
            ValueError: x is longer than max_length, or has another head_dim, or there is not one
                position for each of its tokens.
            IndexError: a position is below 0, or max_length or more; on a GPU, an assertion fails.
        """
        if x.shape[-1] != self.head_dim or not x.is_floating_point():
            shape = tuple(x.shape)
            raise ValueError(
                f"x must be (..., length, {self.head_dim}) floating-point numbers, got {shape} "
                f"{x.dtype}"
            )

        # angles in at least float32, a row of the tables for each position
        wide = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (self.cos, self.sin) if wide == torch.float32 else self._tables(wide, x.device)
        if positions is None:
            length, longest = x.shape[-2], len(cos)
            if length > longest:
                raise ValueError(f"x must have at most max_length {longest}, got {length}")
            cos, sin = cos[:length], sin[:length]
        else:
            if positions.shape[-1:] != x.shape[-2:-1]:
                shapes = f"{tuple(positions.shape)} for x {tuple(x.shape)}"
                raise ValueError(f"positions must be (..., length), got {shapes}")
            # as in an embedding, no position may be negative
            cos = F.embedding(positions, cos)  # (..., length, head_dim / 2)
            sin = F.embedding(positions, sin)

        # a view in complex numbers needs pairs that lie side by side in memory
        dtype, x = x.dtype, x.to(wide)
        *strides, last = x.stride()
        # torch.compile knows no offset into a storage
        offset = 0 if torch.compiler.is_compiling() else x.storage_offset()
        if last != 1 or offset % 2 or any(stride % 2 for stride in strides):
            x = x.clone(memory_format=torch.contiguous_format)

        # a pair is a complex number, and rotating it multiplies it by e^(i angle)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))  # (..., head_dim / 2)
        rotated = pairs * torch.complex(cos, sin)
        return torch.view_as_real(rotated).flatten(-2).to(dtype)  # (..., length, head_dim)


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which no token sees a later one (Vaswani et al. 2017, section 3.2.2).

    (batch, length, d_model) -> the same.
    """

    def __init__(self, config: ModelConfig, *, device=None, dtype=None) -> None:
        super().__init__()
        self.num_heads, self.kernel = config.num_heads, config.attention_kernel
        d_model = config.d_model
        # queries, keys and values read the same input: one matmul
        self.qkv_proj = Linear(d_model, 3 * d_model, stacked=3, device=device, dtype=dtype)
        self.output_proj = Linear(d_model, d_model, device=device, dtype=dtype)
        # shared by all heads
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, device=device)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, device=device)
        self.has_qk_norm = config.qk_norm
        self.uses_kernels = True

    def forward(
        self,
        x: Tensor,
        rope: RotaryEmbedding | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Let each token of x, (batch, length, d_model), attend to itself and those before it.

        Args:
            rope: rotates queries and keys by their positions; None: attention sees no positions.
            positions: (length,) or (batch, length) int64; 0, 1, … when left out.
            cache: keys and values of earlier tokens, to which those of `layer` are appended.
        """
        # project to queries, keys and values: (batch, length, 3, heads, head_dim)
        qkv = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1))

        # split into heads, and rotate by positions: (batch, heads, length, head_dim) each
        is_plain = positions is None and cache is None and not self.has_qk_norm
        if rope is not None and is_plain and self.uses_kernels and kernels_for(qkv) == "triton":
            from lib.model.elementwise_triton import rotated_attention, rotated_qkv

            # FlashAttention's backward also undoes the rotation, and writes one gradient of `qkv`
            if self.kernel == "flash_attention_triton":
                out = rotated_attention(qkv, rope.cos, rope.sin)  # (batch, length, heads, head_dim)
                return self.output_proj(out.flatten(-2))
            q, k, v = (part.transpose(1, 2) for part in rotated_qkv(qkv, rope.cos, rope.sin))
        else:
            q, k, v = qkv.transpose(1, 3).unbind(2)
            if self.has_qk_norm:
                q, k = self.q_norm(q), self.k_norm(k)
            if rope is not None:
                if positions is not None:
                    # the same in all heads
                    positions = positions.unsqueeze(-2)  # (1, length) or (batch, 1, length)
                q, k = rope(q, positions), rope(k, positions)

        # attend; a cache has the keys and values of the tokens before these
        if cache is None:
            out = attend(q, k, v, kernel=self.kernel)
        else:
            k, v, mask = cache.append(layer, k, v)  # (batch, heads, cached + length, head_dim)
            out = attend(q, k, v, kernel=self.kernel, is_causal=False, mask=mask)

        # join the heads, and mix what they found
        return self.output_proj(out.transpose(1, 2).flatten(-2))  # (batch, length, d_model)


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); norms where the config puts them.

    (batch, length, d_model) -> the same.
    """

    def __init__(self, config: ModelConfig, *, device=None, dtype=None) -> None:
        super().__init__()
        self.norm = config.norm
        # the two sublayers: tokens exchange information, then each is worked on alone
        self.attn = CausalSelfAttention(config, device=device, dtype=dtype)
        feed_forward = SwiGLU if config.feed_forward == "swiglu" else SiLUFeedForward
        self.ffn = feed_forward(config.d_model, config.ff_width, device=device, dtype=dtype)
        if config.norm != "none":
            # one for each sublayer
            self.ln1 = RMSNorm(config.d_model, config.norm_eps, device=device)
            self.ln2 = RMSNorm(config.d_model, config.norm_eps, device=device)

    def forward(
        self,
        x: Tensor,
        rope: RotaryEmbedding | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        # pre-norm: the residual stream itself is never normalized, only what a sublayer reads
        if self.norm == "pre":
            x = x + self.attn(self.ln1(x), rope, positions, cache, layer)
            return x + self.ffn(self.ln2(x))

        # post-norm, as in the first Transformer: each residual sum is normalized
        if self.norm == "post":
            x = self.ln1(x + self.attn(x, rope, positions, cache, layer))
            return self.ln2(x + self.ffn(x))

        # without norms
        x = x + self.attn(x, rope, positions, cache, layer)
        return x + self.ffn(x)


class TransformerLM(nn.Module):
    """The language model: token ids in, logits of the next token out.

    Attributes:
        before_part: called with each part of the model (token embedding, block, final norm, head)
            just before its parameters are read, outside of compiled blocks. Where the norm after a
            block is fused into it, that norm counts as a part too. By default it does nothing.
        around_block: runs a block, given its index, what computes it, and the arguments of that;
            such as `lib.fsdp.checkpoint_activations()`. None: the block just runs.

    Args:
        config: the shape; `vocab_size` must be set.
        dtype: of the matrices; norms stay in float32.
        generator: source of the initial weights, on their device.
        draw: initialize the weights. False leaves them undefined, to be loaded.

    Raises:
        ValueError: `vocab_size` is None.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
        draw: bool = True,
    ) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size must be the size of the tokenizer's vocabulary, got None")
        self.config = config
        d_model = config.d_model

        # on the meta device, where the initialization of the parts' own constructors costs nothing
        options: dict = {"device": "meta", "dtype": dtype}
        self.token_embeddings = Embedding(config.vocab_size, d_model, **options)
        self.layers = nn.ModuleList(
            TransformerBlock(config, **options) for _ in range(config.num_layers)
        )
        self.ln_final = self.lm_head = self.rope = None
        if config.norm == "pre":
            self.ln_final = RMSNorm(d_model, config.norm_eps, device="meta")
        if not config.tied_embeddings:
            self.lm_head = Linear(d_model, config.vocab_size, **options)

        # on the real device, and initialized once; `to_empty` would do, but loads SymPy for 0.3 s
        device = torch.get_default_device() if device is None else device
        self._apply(lambda meta: torch.empty(meta.shape, dtype=meta.dtype, device=device))
        if config.positions == "rope":
            self.rope = RotaryEmbedding(
                config.head_dim, config.context_length, config.rope_theta, device=device
            )
        if draw:
            self.reset_parameters(generator)

        self.before_part: Callable[[nn.Module], None] = do_nothing
        self.around_block: Callable[..., Any] | None = None
        self._compiled_hidden: Callable[[Tensor], Tensor] | None = None
        self._fused_block: Callable[..., Any] = fused_block
        self._residual_block: Callable[..., Any] = residual_block
        self.uses_kernels = True

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialize all weights anew, in the order of `modules()`."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters(generator)
        if self.lm_head is None:
            # the embedding is also the head, whose logits must start small
            std = math.sqrt(2 / sum(self.token_embeddings.weight.shape))
            truncated_normal_(self.token_embeddings.weight, std, generator)

    def use_low_precision_weights(self, dtype: torch.dtype) -> None:
        """Store the matrices in `dtype` (`AdamW` keeps float32 masters); norms stay in float32."""
        for parameter in self.parameters():
            if parameter.ndim >= 2:
                parameter.data = parameter.data.to(dtype)

    def use_kernels(self, enabled: bool) -> None:
        """Run elementwise steps on a CUDA GPU as Triton kernels (the default) or as PyTorch's."""
        for module in self.modules():
            if hasattr(module, "uses_kernels"):
                module.uses_kernels = enabled  # type: ignore[assignment]

    def compile_whole(self) -> None:
        """Let `torch.compile` fuse the whole model up to the head, for `loss` in training."""
        self._compiled_hidden = torch.compile(self.hidden, dynamic=False)

    def compile_blocks(self) -> None:
        """Let `torch.compile` fuse each block by itself; all blocks share one compilation.

        Compiling a whole model of 48 blocks takes minutes. And the gradients of one compiled graph
        arrive together at its end; those of blocks arrive during backward, so that averaging them
        over ranks can overlap with it.
        """
        for layer in self.layers:
            layer.compile(dynamic=False)
        self._fused_block = torch.compile(self._fused_block, dynamic=False)
        self._residual_block = torch.compile(self._residual_block, dynamic=False)

    @property
    def head(self) -> Embedding | Linear:
        """The module that holds the language-model head: the embedding where the two are tied."""
        return self.token_embeddings if self.lm_head is None else self.lm_head

    @property
    def output_weight(self) -> Tensor:
        """The weight of the language-model head, (vocab_size, d_model)."""
        return self.head.weight

    def forward(self, token_ids: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """Return logits, (batch, length, vocab_size), for token ids (batch, length) int64.

        Args:
            cache: keys and values of the tokens before; those of `token_ids` are appended.

        Raises:
            ValueError: more tokens than `context_length`, including those in the cache, or ids of
                another shape.
        """
        hidden = self.hidden(token_ids, cache=cache)  # (batch, length, d_model)
        head = self.head
        self.before_part(head)
        return F.linear(hidden, head.weight)  # (batch, length, vocab_size)

    def hidden(self, token_ids: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """Return the head's input, (batch, length, d_model); arguments as for `forward`."""
        if token_ids.dim() != 2:
            shape = tuple(token_ids.shape)
            raise ValueError(f"token_ids must be (batch, length), got shape {shape}")

        # new tokens follow those in the cache
        first = 0 if cache is None else cache.length
        length = token_ids.shape[1]
        if first + length > self.config.context_length:
            raise ValueError(
                f"token_ids must fit context_length {self.config.context_length}, got {first} "
                f"cached + {length} new tokens"
            )
        # by default RoPE counts from 0
        positions = None
        if first:
            positions = torch.arange(first, first + length, device=token_ids.device)  # (length,)

        # embed
        self.before_part(self.token_embeddings)
        x = self.token_embeddings(token_ids)  # (batch, length, d_model)
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            # the residual stream in low precision too: half the bytes in every elementwise step
            x = x.to(torch.get_autocast_dtype(x.device.type))

        # blocks and final norm: (batch, length, d_model) throughout
        is_fused = self.uses_kernels and self.config.norm == "pre" and kernels_for(x) == "triton"
        if is_fused and self.around_block is None:
            x = self._fused_blocks(x, positions, cache)
        else:
            for index, layer in enumerate(self.layers):
                # without a cache all blocks get the same arguments: they share one compilation
                context = (self.rope, positions) + (() if cache is None else (cache, index))
                self.before_part(layer)
                with annotate(f"block {index}"):
                    if self.around_block is None:
                        x = layer(x, *context)
                    elif is_fused:
                        x = self.around_block(index, self._residual_block, layer, x, *context)
                    else:
                        x = self.around_block(index, layer, x, *context)

            # the head reads a normalized stream too
            if self.ln_final is not None:
                self.before_part(self.ln_final)
                x = _norm_kernel(self.ln_final, x) if is_fused else self.ln_final(x)
        if cache is not None:
            cache.advance(length)
        return x

    def _fused_blocks(self, x: Tensor, positions: Tensor | None, cache: KVCache | None) -> Tensor:
        """All pre-norm blocks on a GPU, with each residual sum and its norm in one kernel.

        A sum and its norm straddle two blocks, so the loop carries both x and norm(x).
        """
        # the first norm has no sum before it
        norms: list[Any] = [layer.ln1 for layer in self.layers] + [self.ln_final]
        self.before_part(norms[0])
        normed = norms[0](x)

        # each block ends with the norm that the next one, or the head, begins with
        for index, (layer, next_norm) in enumerate(zip(self.layers, norms[1:])):
            # without a cache all blocks get the same arguments, so that they share one compilation
            context = (self.rope, positions) + (() if cache is None else (cache, index))
            self.before_part(layer)
            self.before_part(next_norm)
            with annotate(f"block {index}"):
                x, normed = self._fused_block(layer, next_norm, x, normed, *context)
        return normed

    def loss(self, token_ids: Tensor, targets: Tensor, *, z_loss: float = 0.0) -> Tensor:
        """Return the mean cross-entropy in nats per token, a float32 scalar.

        Args:
            token_ids, targets: (batch, length) int64.
            z_loss: as for `linear_cross_entropy`.

        Raises:
            ValueError: `targets` has another shape than `token_ids`, or see `forward`.
        """
        if targets.shape != token_ids.shape:
            expected, shape = tuple(token_ids.shape), tuple(targets.shape)
            raise ValueError(f"targets must have shape {expected} of the ids, got {shape}")
        # only in training: evaluation has other lengths, and each would be compiled anew
        is_compiled = self._compiled_hidden is not None and self.training
        hidden = (self._compiled_hidden if is_compiled else self.hidden)(token_ids)
        head = self.head
        self.before_part(head)
        with annotate("loss"):
            return linear_cross_entropy(
                hidden.flatten(0, 1), head.weight, targets.flatten(), z_loss=z_loss
            )


def do_nothing(part: nn.Module) -> None:
    """The default `before_part`."""


def fused_block(
    block: TransformerBlock, next_norm: RMSNorm, x: Tensor, normed: Tensor, *context: Any
) -> tuple[Tensor, Tensor]:
    """Run a pre-norm block and the norm that comes after it.

    Args:
        x: the residual stream, (batch, length, d_model).
        normed: norm(x), by the block's first norm.
        context: further arguments of `CausalSelfAttention.forward`.

    Returns:
        The residual stream after the block, and `next_norm` of it.
    """
    from lib.model.elementwise_triton import add_rms_norm

    x, normed = add_rms_norm(x, block.attn(normed, *context), block.ln2.weight, block.ln2.eps)
    return add_rms_norm(x, block.ffn(normed), next_norm.weight, next_norm.eps)


def residual_block(block: TransformerBlock, x: Tensor, *context: Any) -> Tensor:
    """Run a pre-norm block from one residual stream, (batch, length, d_model), to the next.

    For a model with `around_block`, where between blocks there is the residual stream alone: a
    checkpoint keeps what its block is given, and the norm costs less to compute again.

    Args:
        context: further arguments of `CausalSelfAttention.forward`.
    """
    from lib.model.elementwise_triton import add_rms_norm

    branch = block.attn(_norm_kernel(block.ln1, x), *context)
    x, normed = add_rms_norm(x, branch, block.ln2.weight, block.ln2.eps)
    return x + block.ffn(normed)


def _norm_kernel(norm: RMSNorm, x: Tensor) -> Tensor:
    from lib.model.elementwise_triton import rms_norm

    return rms_norm(x, norm.weight, norm.eps)


class MeanLoss(nn.Module):
    """A model's loss as a module, for the wrappers of `lib.ddp.wrappers`.

    Args:
        device: of the model.
        autocast: dtype of matmuls under autocast; None: no autocast.
        z_loss: as for `linear_cross_entropy`; added in training mode alone.
    """

    def __init__(
        self,
        model: TransformerLM,
        device: torch.device,
        autocast: torch.dtype | None,
        z_loss: float,
    ) -> None:
        super().__init__()
        self.model, self.device, self.dtype, self.z_loss = model, device, autocast, z_loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over all tokens; inputs and targets are (batch, length) int64."""
        z_loss = self.z_loss if self.training else 0.0
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            return self.model.loss(inputs, targets, z_loss=z_loss)
