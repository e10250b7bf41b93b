"""The cases of the attention benchmark: lengths, shapes, kernels, and the FLOP that each takes."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from lib.config import AttentionBenchmarkConfig, require
from lib.config_training import ATTENTION_KERNELS
from lib.hardware import pick_dtype

# PyTorch's own: FlexAttention, compiled, and each implementation that `sdpa` chooses from.
PEERS = ("flex_attention", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "sdpa_math")
SWEEP_KERNELS = (*ATTENTION_KERNELS, *PEERS)
GPU_ONLY = ("flash_attention_triton", "flex_attention", "sdpa_cudnn", "sdpa_efficient")

CPU_TIERS = ("128:128", "256:256", "512:512", "128:512", "512:128")
GPU_TIERS = tuple(f"{2**n}:{2**n}" for n in range(7, 16))
GPU_TIERS += ("1024:4096", "4096:1024", "1024:16384", "16384:1024")
# head_dims, tokens, width where none are named
CPU_SIZES = ((64,), 1024, 256)
GPU_SIZES = ((64, 128), 16384, 2048)
# The length that one card must take, and one to compare its memory with.
LONGEST, A_QUARTER = 2**20, 2**18


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """What one record of the benchmark measures: kernels that take turns on the same inputs."""

    queries: int
    """Queries in a sequence."""

    keys: int
    """Keys in a sequence."""

    head_dim: int
    """Width of a head."""

    is_causal: bool
    """Whether query i sees the keys up to i, and no others."""

    direction: str
    """`forward`, or `backward`: the gradients of q, k and v from that of the output."""

    dtype: str
    """Of q, k and v."""

    batch_size: int
    """Sequences."""

    heads: int
    """Heads, of queries and of keys."""

    kernels: tuple[str, ...]
    """Names, of `SWEEP_KERNELS`."""

    warmup: int
    """Calls of each before anything counts."""

    samples: int
    """The most samples that are taken of each; 1: a call that takes seconds."""

    max_seconds: float
    """About how long the samples of all may take."""

    @property
    def is_square(self) -> bool:
        """Whether there are as many queries as keys."""
        return self.queries == self.keys

    @property
    def flops(self) -> float:
        """FLOP of its matrix products: 4 · head_dim for each query and key it sees, in each head.

        That is two products forward; the five of the backward pass make 2.5 times as many. N
        queries and keys with a causal mask count as N² / 2 pairs, as is customary; of unequal
        numbers the pairs are counted one by one.
        """
        pairs = self.queries * self.keys
        if self.is_causal and self.is_square:
            pairs /= 2
        elif self.is_causal:
            short = min(self.queries, self.keys)
            pairs = short * (short + 1) // 2 + (self.queries - short) * self.keys
        passes = {"forward": 1, "backward": 2.5}[self.direction]
        return 4 * self.head_dim * self.batch_size * self.heads * pairs * passes


def attention_cases(config: AttentionBenchmarkConfig, device: torch.device) -> list[AttentionCase]:
    """The cases that `config` asks for; those that can share compiled code are neighbours.

    Raises:
        ValueError: a kernel is unknown, the device has no such dtype, or `targets` is asked for
            without a GPU.
    """
    on_gpu = device.type == "cuda"
    for kernel in config.kernels:
        known = ", ".join(SWEEP_KERNELS)
        require(kernel in SWEEP_KERNELS, f"kernels has {kernel!r}; right is one of: {known}")
    wrong = config.targets and not on_gpu
    require(not wrong, f"targets is True with device {device}; right is: a CUDA device")
    kernels = config.kernels or [k for k in SWEEP_KERNELS if on_gpu or k not in GPU_ONLY]
    head_dims, _, _ = GPU_SIZES if on_gpu else CPU_SIZES
    lengths = [tuple(map(int, tier.split(":"))) for tier in config.custom_tiers]
    lengths = lengths or [
        tuple(map(int, tier.split(":"))) for tier in (GPU_TIERS if on_gpu else CPU_TIERS)
    ]
    cases = [
        _case(config, device, *length, head_dim, mask == "causal", direction, tuple(kernels))
        for length, head_dim, mask, direction in itertools.product(
            lengths,
            config.head_dims or head_dims,
            config.masks,
            ("forward", "backward") if config.backward else ("forward",),
        )
    ]
    return cases + (target_cases(config, device) if config.targets else [])


def target_cases(config: AttentionBenchmarkConfig, device: torch.device) -> list[AttentionCase]:
    """What the table of targets needs beside the sweep: textbook, longest sequences, float32."""
    ours, textbook = "flash_attention_triton", "vectorized_torch"
    directions = ("forward", "backward")
    few_heads = dataclasses.replace(config, batch_size=1, heads=12)
    against_textbook = [
        _case(few_heads, device, n, n, 64, causal, "forward", (ours, textbook, "sdpa"))
        for n, causal in itertools.product((8192, 16384), (True, False))
    ]
    long = [
        _case(few_heads, device, n, n, 64, True, direction, (ours,))
        for n, direction in itertools.product((A_QUARTER, LONGEST), directions)
    ]
    long = [dataclasses.replace(c, samples=1) if c.keys == LONGEST else c for c in long]
    exact = dataclasses.replace(config, dtype="float32", batch_size=None, heads=None)
    in_float32 = [
        _case(exact, device, n, n, head_dim, causal, direction, (ours, textbook, "sdpa"))
        for n, head_dim, causal, direction in itertools.product(
            (1024, 2048, 4096, 8192), (64, 128), (True, False), directions
        )
    ]
    return against_textbook + in_float32 + long


def _case(
    config: AttentionBenchmarkConfig,
    device: torch.device,
    queries: int,
    keys: int,
    head_dim: int,
    is_causal: bool,
    direction: str,
    kernels: tuple[str, ...],
) -> AttentionCase:
    """With as many sequences and heads as keep tokens × heads the same for all lengths."""
    _, tokens, width = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    tokens, width = config.tokens or tokens, config.width or width
    longest = max(queries, keys)
    heads = config.heads or max(1, width // head_dim * min(tokens, longest) // longest)
    return AttentionCase(
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        is_causal=is_causal,
        direction=direction,
        dtype=str(pick_dtype(device, config.dtype)).removeprefix("torch."),
        batch_size=config.batch_size or max(1, tokens // longest),
        heads=heads,
        kernels=kernels,
        warmup=config.warmup,
        samples=config.iters,
        max_seconds=config.max_seconds,
    )
