"""The shape of a model, and presets from a laptop's CPU to 3.4 billion parameters."""

from typing import TYPE_CHECKING, Annotated, Literal, get_args

from annotated_types import Ge

from lib.core.settings import PositiveFloat, PositiveInt, settings

AttentionKernel = Literal[
    "scaled_dot_prod_attention",
    "vectorized_torch",
    "vectorized_torch_compiled",
    "flash_attention_torch",
    "flash_attention_triton",
    "flash_attention_cuda",
    "sdpa",
]
ATTENTION_KERNELS = get_args(AttentionKernel)


@settings
class ModelConfig:
    """Shape and variants of a decoder-only Transformer language model."""

    vocab_size: Annotated[int, Ge(2)] | None = None
    """Rows of the embedding (default: the tokenizer's vocabulary; rows beyond it are padding)."""

    context_length: PositiveInt = 256
    """Longest sequence, in tokens."""

    d_model: PositiveInt = 512
    """Width of the residual stream."""

    num_layers: PositiveInt = 4
    """Number of Transformer blocks."""

    num_heads: PositiveInt = 16
    """Number of attention heads, each d_model / num_heads wide."""

    d_ff: PositiveInt = 1344
    """Inner width of SwiGLU; about 8/3 d_model, rounded to a multiple of 64."""

    rope_theta: PositiveFloat = 10000.0
    """Base of RoPE's frequencies; larger values rotate more slowly."""

    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in RMSNorm."""

    norm: Literal["pre", "post", "none"] = "pre"
    """Where RMSNorm goes: before each sublayer, after each residual sum, or nowhere."""

    positions: Literal["rope", "none"] = "rope"
    """How attention sees the order of tokens: rotary embeddings, or not at all."""

    feed_forward: Literal["swiglu", "silu"] = "swiglu"
    """Feed-forward layer; `silu` has no gate, and is 1.5 times as wide for equal parameters."""

    tied_embeddings: bool = False
    """Share one matrix between the token embedding and the language-model head."""

    qk_norm: bool = False
    """Apply RMSNorm to queries and keys in each head."""

    attention_kernel: Literal[AttentionKernel, "auto"] = "sdpa"
    """Implementation of attention. `auto`: in training, the fastest known for the device, which a
    line of output names; elsewhere sdpa."""

    def __post_init__(self) -> None:
        if self.d_model % self.num_heads:
            raise ValueError(
                f"d_model must be a multiple of num_heads {self.num_heads}, got {self.d_model}"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(
                f"d_model / num_heads must be even with RoPE, got {self.d_model} / "
                f"{self.num_heads} = {self.head_dim}"
            )

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.d_model // self.num_heads

    @property
    def ff_width(self) -> int:
        """Inner width of the feed-forward layer, whichever it is."""
        return self.d_ff if self.feed_forward == "swiglu" else self.d_ff * 3 // 2


# From `small` to `2.7b` these are the shapes of Stanford's CS336, assignment 2 (2025), table 1.
MODEL_PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        vocab_size=4096, context_length=128, d_model=128, num_layers=4, num_heads=4, d_ff=352
    ),
    "tinystories": ModelConfig(
        vocab_size=10_000, d_model=512, num_layers=4, num_heads=16, d_ff=1344
    ),
    "small": ModelConfig(vocab_size=10_000, d_model=768, num_layers=12, num_heads=12, d_ff=3072),
    "medium": ModelConfig(vocab_size=10_000, d_model=1024, num_layers=24, num_heads=16, d_ff=4096),
    "large": ModelConfig(vocab_size=10_000, d_model=1280, num_layers=36, num_heads=20, d_ff=5120),
    "xl": ModelConfig(vocab_size=10_000, d_model=1600, num_layers=48, num_heads=25, d_ff=6400),
    "2.7b": ModelConfig(vocab_size=10_000, d_model=2560, num_layers=32, num_heads=32, d_ff=10_240),
    # GPT-2's smallest (Radford et al. 2019), with a SwiGLU of as many parameters as its GELU layer
    # and its vocabulary of 50,257 padded to a multiple of 128
    "gpt2-124m": ModelConfig(
        vocab_size=50_304,
        context_length=1024,
        d_model=768,
        num_layers=12,
        num_heads=12,
        d_ff=2048,
        tied_embeddings=True,
    ),
    # GPT-2's second, with the same changes
    "gpt2-354m": ModelConfig(
        vocab_size=50_304,
        context_length=1024,
        d_model=1024,
        num_layers=24,
        num_heads=16,
        d_ff=2752,
        tied_embeddings=True,
    ),
    # the leaderboard of Stanford's CS336, assignment 2 (2026)
    "8b": ModelConfig(
        vocab_size=151_936,
        context_length=32_768,
        d_model=4096,
        num_layers=34,
        num_heads=32,
        d_ff=11_008,
    ),
    # narrow and deep: launching kernels costs as much as running them
    "matrix": ModelConfig(vocab_size=10_000, d_model=512, num_layers=24, num_heads=16, d_ff=4096),
}


if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(MODEL_PRESETS)]


def model_preset(name: str) -> ModelConfig:
    """Return the preset called `name`.

    Raises:
        ValueError: there is none.
    """
    if name not in MODEL_PRESETS:
        raise ValueError(f"model must be one of {', '.join(MODEL_PRESETS)}, got {name!r}")
    return MODEL_PRESETS[name]
