"""Named model shapes, from one for a laptop's CPU to 3.4 billion parameters."""

from lib.config_training import ModelConfig

# The shapes from `small` to `2.7b` are those of Stanford's CS336, assignment 2 (2025), table 1.
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
    # GPT-2's smallest (Radford et al. 2019) with SwiGLU of as many parameters as its GELU layer,
    # and its vocabulary of 50,257 filled up to a multiple of 128
    "gpt2-124m": ModelConfig(
        vocab_size=50_304,
        context_length=1024,
        d_model=768,
        num_layers=12,
        num_heads=12,
        d_ff=2048,
        tied_embeddings=True,
    ),
    # narrow and deep: launching kernels costs as much as running them
    "matrix": ModelConfig(vocab_size=10_000, d_model=512, num_layers=24, num_heads=16, d_ff=4096),
}


def model_preset(name: str) -> ModelConfig:
    """The model shape called `name`.

    Raises:
        ValueError: there is none; lists the known names.
    """
    if name not in MODEL_PRESETS:
        raise ValueError(f"model preset is {name!r}; known: {', '.join(MODEL_PRESETS)}")
    return MODEL_PRESETS[name]
