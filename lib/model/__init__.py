"""The Transformer language model, from tensors up; start with `transformer.py`."""

import lazy_loader

# fmt: off

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "config": ["ModelConfig"],
        "transformer": [
            "Linear", "Embedding", "RMSNorm", "SwiGLU", "RotaryEmbedding",
            "CausalSelfAttention", "TransformerBlock", "TransformerLM",
        ],
    },
)
