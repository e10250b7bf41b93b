"""A decoder-only Transformer language model, from tensors up.

Weights are shaped (d_out, d_in), drawn and named as in Stanford's CS336, assignment 1 (2025).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib import model_cpu
from lib.attention import attention
from lib.config_training import ModelConfig
from lib.kv_cache import KVCache
from lib.loss import linear_cross_entropy
from lib.profiling import annotate


class Linear(nn.Module):
    """y = x Wᵀ, without a bias: (..., d_in) -> (..., d_out).

    Weights come from a normal distribution of variance 2 / (d_in + d_out), cut off at three
    standard deviations (Glorot and Bengio 2010, equation 12).

    Args:
        stacked: how many matrices with the same input stand below one another in `weight`, each
            d_out / stacked high and drawn as one. One product is faster than several.
    """

    def __init__(self, d_in: int, d_out: int, *, stacked: int = 1, device=None, dtype=None) -> None:
        super().__init__()
        self.stacked = stacked
        self.weight = nn.Parameter(torch.empty(d_out, d_in, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        d_out, d_in = self.weight.shape
        truncated_normal_(self.weight, math.sqrt(2 / (d_in + d_out // self.stacked)), generator)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """A row for each token id: (...) int64 -> (..., d_model); drawn with standard deviation 1."""

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

    Computed in float32 whatever the dtype of x, which the result has again.
    """

    def __init__(self, d_model: int, eps: float = 1e-5, *, device=None, dtype=None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        if x.device.type == "cpu":
            return model_cpu.rms_norm(wide, self.weight.float(), self.eps).to(x.dtype)
        inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * inverse_rms * self.weight).to(x.dtype)


class SwiGLU(nn.Module):
    """W2 (SiLU(W1 x) ⊙ W3 x): a gate decides what passes (Shazeer 2020, equation 6).

    SiLU(x) = x · sigmoid(x). `w13` holds W1 and, below it, W3.
    """

    def __init__(self, d_model: int, d_ff: int, *, device=None, dtype=None) -> None:
        super().__init__()
        self.w13 = Linear(d_model, 2 * d_ff, stacked=2, device=device, dtype=dtype)
        self.w2 = Linear(d_ff, d_model, device=device, dtype=dtype)

    @annotate("feed-forward")
    def forward(self, x: Tensor) -> Tensor:
        gate_and_value = self.w13(x)
        if has_kernels(x):
            from lib.model_triton import swiglu

            return self.w2(swiglu(gate_and_value))
        if x.device.type == "cpu":
            return self.w2(model_cpu.swiglu(gate_and_value))
        gate, value = gate_and_value.chunk(2, dim=-1)
        return self.w2(F.silu(gate) * value)


class SiLUFeedForward(nn.Module):
    """W2 SiLU(W1 x): the same without a gate."""

    def __init__(self, d_model: int, d_ff: int, *, device=None, dtype=None) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff, device=device, dtype=dtype)
        self.w2 = Linear(d_ff, d_model, device=device, dtype=dtype)

    @annotate("feed-forward")
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)))


class RotaryEmbedding(nn.Module):
    """Turns each pair of coordinates by an angle that grows with the position (Su et al. 2021).

    Coordinates 2i and 2i + 1 at position t turn by t · theta^(-2i / head_dim), so that the product
    of a query and a key depends on the distance of their positions alone.
    """

    def __init__(self, head_dim: int, max_length: int, theta: float = 10000.0, *, device=None):
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; right is: an even number")
        self.theta, self.head_dim, self.max_length = theta, head_dim, max_length
        # not saved: they follow from the arguments
        self.register_buffer("cos", torch.empty(0, device=device), persistent=False)
        self.register_buffer("sin", torch.empty(0, device=device), persistent=False)
        self.reset_buffers(self.cos.device)

    def reset_buffers(self, device=None) -> None:
        # in float64, since an angle of many turns keeps few digits in float32
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu")
        frequencies = self.theta ** (-pairs / self.head_dim)
        positions = torch.arange(self.max_length, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, frequencies)
        self.cos = angles.cos().float().to(device)  # (max_length, head_dim / 2)
        self.sin = angles.sin().float().to(device)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Turn x (..., length, head_dim) at `positions` (..., length); 0, 1, … when left out."""
        if positions is None:
            cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        else:
            cos, sin = self.cos[positions], self.sin[positions]
        # a pair is a complex number, and a turn a product with e^(i angle)
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return (
            torch.view_as_real(pairs * torch.complex(cos.float(), sin.float()))
            .flatten(-2)
            .to(x.dtype)
        )


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which no token sees a later one (Vaswani et al. 2017, section 3.2.2).

    (batch, length, d_model) -> the same.
    """

    def __init__(self, config: ModelConfig, *, device=None, dtype=None) -> None:
        super().__init__()
        self.num_heads, self.kernel = config.num_heads, config.attention_kernel
        d_model = config.d_model
        self.qkv_proj = Linear(d_model, 3 * d_model, stacked=3, device=device, dtype=dtype)
        self.output_proj = Linear(d_model, d_model, device=device, dtype=dtype)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, device=device)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, device=device)
        self.has_qk_norm = config.qk_norm

    def forward(
        self,
        x: Tensor,
        rope: RotaryEmbedding | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        qkv = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1))
        is_plain = rope is not None and positions is None and not self.has_qk_norm
        if has_kernels(x) and is_plain and cache is None:
            from lib.model_triton import rotated_attention, rotated_qkv

            if self.kernel == "flash_attention_triton":
                return self.output_proj(rotated_attention(qkv, rope.cos, rope.sin).flatten(-2))
            q, k, v = (part.transpose(1, 2) for part in rotated_qkv(qkv, rope.cos, rope.sin))
        else:
            # each (batch, heads, length, head_dim)
            q, k, v = qkv.transpose(1, 3).unbind(2)
            if self.has_qk_norm:
                q, k = self.q_norm(q), self.k_norm(k)
            if rope is not None:
                q, k = rope(q, positions), rope(k, positions)
        if cache is None:
            heads = attention(q, k, v, kernel=self.kernel)
        else:
            k, v, mask = cache.append(layer, k, v)
            heads = attention(q, k, v, kernel=self.kernel, is_causal=False, mask=mask)
        return self.output_proj(heads.transpose(1, 2).flatten(-2))


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); norms where the config puts them."""

    def __init__(self, config: ModelConfig, *, device=None, dtype=None) -> None:
        super().__init__()
        self.norm = config.norm
        self.attn = CausalSelfAttention(config, device=device, dtype=dtype)
        feed_forward = SwiGLU if config.feed_forward == "swiglu" else SiLUFeedForward
        self.ffn = feed_forward(config.d_model, config.ff_width, device=device, dtype=dtype)
        if config.norm != "none":
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
        if self.norm == "pre":
            x = x + self.attn(self.ln1(x), rope, positions, cache, layer)
            return x + self.ffn(self.ln2(x))
        if self.norm == "post":
            x = self.ln1(x + self.attn(x, rope, positions, cache, layer))
            return self.ln2(x + self.ffn(x))
        x = x + self.attn(x, rope, positions, cache, layer)
        return x + self.ffn(x)


class TransformerLM(nn.Module):
    """Token ids in, logits of the next token out.

    Args:
        config: the shape; `vocab_size` must be set.
        dtype: of the matrices; norms stay in float32.
        generator: where the initial weights come from, on the device of the weights.
        draw: whether weights are drawn; otherwise they hold anything until some are loaded.
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
            raise ValueError("vocab_size is None; right is: the size of the tokenizer's vocabulary")
        self.config = config
        d_model = config.d_model
        # the parts draw weights of their own, which takes no time on a device without memory
        place = {"device": "meta", "dtype": dtype}
        self.token_embeddings = Embedding(config.vocab_size, d_model, **place)
        self.layers = nn.ModuleList(
            TransformerBlock(config, **place) for _ in range(config.num_layers)
        )
        self.ln_final = None
        if config.norm == "pre":
            self.ln_final = RMSNorm(d_model, config.norm_eps, device="meta")
        self.lm_head = None
        if not config.tied_embeddings:
            self.lm_head = Linear(d_model, config.vocab_size, **place)
        device = torch.get_default_device() if device is None else device
        self.to_empty(device=device)
        self.rope = None
        if config.positions == "rope":
            self.rope = RotaryEmbedding(
                config.head_dim, config.context_length, config.rope_theta, device=device
            )
        if draw:
            self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew, in the order of `modules()`."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters(generator)
        if self.lm_head is None:
            # the matrix is also the head, whose logits must start small
            deviation = math.sqrt(2 / sum(self.token_embeddings.weight.shape))
            truncated_normal_(self.token_embeddings.weight, deviation, generator)

    def use_low_precision_weights(self, dtype: torch.dtype) -> None:
        """Hold the matrices in `dtype`, of which `AdamW` keeps float32 masters; norms stay."""
        for parameter in self.parameters():
            if parameter.ndim >= 2:
                parameter.data = parameter.data.to(dtype)

    @property
    def output_weight(self) -> Tensor:
        """The language-model head, (vocab_size, d_model)."""
        return self.token_embeddings.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, token_ids: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """Logits (batch, length, vocab_size) for token ids (batch, length) int64.

        Args:
            cache: keys and values of the tokens before; those of `token_ids` are added to it.

        Raises:
            ValueError: more tokens than `context_length`, those in the cache included.
        """
        return F.linear(self.hidden(token_ids, cache=cache), self.output_weight)

    def hidden(self, token_ids: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """What the head is applied to: (batch, length, d_model)."""
        first = 0 if cache is None else cache.length
        length = token_ids.shape[-1]
        if first + length > self.config.context_length:
            raise ValueError(
                f"token_ids has {first} cached + {length} new tokens; right is: at most "
                f"context_length {self.config.context_length}"
            )
        positions = None
        if first:
            positions = torch.arange(first, first + length, device=token_ids.device)
        x = self.token_embeddings(token_ids)
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            # the residual stream in the short type too: half the bytes in every elementwise step
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if has_kernels(x) and self.config.norm == "pre":
            x = self._fused_layers(x, positions, cache)
        else:
            for index, layer in enumerate(self.layers):
                with annotate(f"block {index}"):
                    x = layer(x, self.rope, positions, cache, index)
            x = x if self.ln_final is None else self.ln_final(x)
        if cache is not None:
            cache.length += length
        return x

    def _fused_layers(self, x: Tensor, positions: Tensor | None, cache: KVCache | None) -> Tensor:
        """The pre-norm layers and the final norm, with each sum and its norm in one kernel."""
        norms = [layer.ln1 for layer in self.layers] + [self.ln_final]
        normed = norms[0](x)
        for index, (layer, next_norm) in enumerate(zip(self.layers, norms[1:])):
            # without a cache all layers are called alike, so that one compilation is for all
            place = (self.rope, positions) + (() if cache is None else (cache, index))
            with annotate(f"block {index}"):
                x, normed = self.fused_layer(layer, next_norm, x, normed, *place)
        return normed

    @staticmethod
    def fused_layer(
        layer: TransformerBlock, next_norm: RMSNorm, x: Tensor, normed: Tensor, *place: Any
    ) -> tuple[Tensor, Tensor]:
        """A pre-norm layer and the norm after it; `place` is for `CausalSelfAttention.forward`."""
        from lib.model_triton import add_rms_norm

        x, normed = add_rms_norm(x, layer.attn(normed, *place), layer.ln2.weight, layer.ln2.eps)
        return add_rms_norm(x, layer.ffn(normed), next_norm.weight, next_norm.eps)

    def loss(self, token_ids: Tensor, targets: Tensor, *, z_loss: float = 0.0) -> Tensor:
        """Mean cross-entropy in nats of `targets`, both (batch, length) int64; a float32 scalar."""
        hidden = self.hidden(token_ids).flatten(0, 1)
        with annotate("loss"):
            return linear_cross_entropy(
                hidden, self.output_weight, targets.flatten(), z_loss=z_loss
            )


def has_kernels(x: Tensor) -> bool:
    """Whether the elementwise steps on x run as the Triton kernels of `lib.model_triton`."""
    return x.is_cuda


def stack_projections(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights published with separate q, k, v and w1, w3, under this model's names."""
    stacked = dict(state_dict)
    for name in state_dict:
        for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("w1", "w3"), "w13")):
            first = f"{parts[0]}.weight"
            if name.endswith(first) and name.replace(parts[0], parts[-1]) in state_dict:
                names = [name.replace(parts[0], part) for part in parts]
                stacked[name.replace(parts[0], whole)] = torch.cat([stacked.pop(n) for n in names])
    return stacked


@torch.no_grad()
def truncated_normal_(
    weight: Tensor, deviation: float, generator: torch.Generator | None = None
) -> None:
    """Fill `weight` from N(0, deviation²), drawing again what lies beyond three deviations."""
    nn.init.trunc_normal_(
        weight, 0.0, deviation, -3 * deviation, 3 * deviation, generator=generator
    )
