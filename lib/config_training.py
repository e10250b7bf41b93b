"""What a model is and how it is trained: frozen dataclasses, checked when made.

`lib.model_presets` holds the named ones; `lib.strict_json` reads and writes them as JSON.
"""

import dataclasses
import math
from pathlib import Path
from typing import Literal

from lib.config import TokenizeConfig, check

ATTENTION_KERNELS = (
    "scaled_dot_prod_attention",
    "vectorized_torch",
    "vectorized_torch_compiled",
    "flash_attention_torch",
    "flash_attention_triton",
    "sdpa",
)
DDP_WRAPPERS = ("none", "naive", "flat", "overlap", "flashddp", "torch_ddp")
# FSDP2 shards the model itself, so that it is no wrapper around a whole one.
TRAINING_WRAPPERS = (*DDP_WRAPPERS, "fsdp2")
OPTIMIZER_SHARDINGS = ("none", "zero1", "torch_zero")


def _check_numbers(config: object) -> None:
    """Refuse infinities and NaN, and whole numbers of more than 63 bits."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float):
            check(config, field.name, math.isfinite(value), "a finite number")
        elif isinstance(value, int):
            check(config, field.name, abs(value) < 2**63, "less than 2^63")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only Transformer language model, and its variants."""

    vocab_size: int | None = None
    """Rows of the embedding; the tokenizer's vocabulary when left out; more is padding."""

    context_length: int = 256
    """Tokens that the model sees at a time."""

    d_model: int = 512
    """Width of the residual stream."""

    num_layers: int = 4
    """Transformer blocks."""

    num_heads: int = 16
    """Attention heads, each d_model / num_heads wide."""

    d_ff: int = 1344
    """Inner width of SwiGLU; about 8/3 d_model, rounded to a multiple of 64."""

    rope_theta: float = 10000.0
    """Base of the rotary angles."""

    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""

    norm: Literal["pre", "post", "none"] = "pre"
    """Where RMSNorm stands: before each sublayer, behind the residual sum, or nowhere."""

    positions: Literal["rope", "none"] = "rope"
    """How attention knows the order of tokens."""

    feed_forward: Literal["swiglu", "silu"] = "swiglu"
    """`silu` has no gate and is 3/2 as wide inside, so that both have equally many parameters."""

    tied_embeddings: bool = False
    """Whether the language-model head is the embedding matrix."""

    qk_norm: bool = False
    """Whether queries and keys are normalised in each head."""

    attention_kernel: str = "sdpa"
    """Which implementation computes attention."""

    def __post_init__(self) -> None:
        _check_numbers(self)
        for field in ("context_length", "d_model", "num_layers", "num_heads", "d_ff"):
            check(self, field, getattr(self, field) > 0, "at least 1")
        check(self, "vocab_size", self.vocab_size is None or self.vocab_size > 1, "at least 2")
        if self.d_model % self.num_heads:
            raise ValueError(
                f"d_model {self.d_model} is not divisible by num_heads {self.num_heads}"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(
                f"d_model {self.d_model} / num_heads {self.num_heads} = head_dim {self.head_dim}, "
                "which is odd; RoPE turns pairs, so right is: an even head_dim"
            )
        check(self, "rope_theta", self.rope_theta > 0, "more than 0")
        check(self, "norm_eps", self.norm_eps > 0, "more than 0")
        known = ", ".join(ATTENTION_KERNELS)
        check(self, "attention_kernel", self.attention_kernel in ATTENTION_KERNELS, known)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads

    @property
    def ff_width(self) -> int:
        """Inner width of the feed-forward layer that is built."""
        return self.d_ff if self.feed_forward == "swiglu" else self.d_ff * 3 // 2


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    learning_rate: float = 1e-3
    """The highest one, reached after the warm-up."""

    min_learning_rate: float = 1e-4
    """The one that the cosine ends at."""

    warmup_steps: int = 100
    """Steps in which the learning rate climbs from 0."""

    weight_decay: float = 0.1
    """For matrices; vectors (the weights of the norms) are not decayed."""

    beta1: float = 0.9
    """Decay of the mean of gradients."""

    beta2: float = 0.95
    """Decay of the mean of squared gradients."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    max_grad_norm: float = 1.0
    """Gradients with a larger global norm are scaled down to it; 0 leaves them."""

    z_loss: float = 0.0
    """Weight of mean(logsumexp²) in the loss, which keeps logits near 0 (PaLM, section 5)."""

    def __post_init__(self) -> None:
        _check_numbers(self)
        check(self, "learning_rate", self.learning_rate >= 0, "0 or more")
        right = f"between 0 and learning_rate {self.learning_rate}"
        check(self, "min_learning_rate", 0 <= self.min_learning_rate <= self.learning_rate, right)
        check(self, "warmup_steps", self.warmup_steps >= 0, "0 or more")
        check(self, "weight_decay", self.weight_decay >= 0, "0 or more")
        for field in ("beta1", "beta2"):
            check(self, field, 0 <= getattr(self, field) < 1, "at least 0 and less than 1")
        check(self, "eps", self.eps > 0, "more than 0")
        check(self, "max_grad_norm", self.max_grad_norm >= 0, "0 or more")
        check(self, "z_loss", self.z_loss >= 0, "0 or more")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run: what, on which data, for how long, and what it leaves behind.

    On several GPUs of one host: `torchrun --nproc_per_node=2 -m lib train …`, with the same flags.
    """

    model: ModelConfig = ModelConfig()
    """The model."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""

    data: Path | None = None
    """A folder with tokenizer.json, train.npy and validation.npy, as `tokenize` leaves it."""

    output: Path | None = None
    """The run's folder; in `runs_dir`, named by data and settings, when left out."""

    runs_dir: Path = Path("artifacts/runs")
    """Where runs without an `output` go."""

    steps: int = 1000
    """Optimizer steps in all."""

    batch_size: int = 32
    """Windows of context_length tokens in one forward pass of one rank.

    An optimizer step takes batch_size × gradient_accumulation_steps × ranks.
    """

    gradient_accumulation_steps: int = 1
    """Forward and backward passes that one optimizer step sums up."""

    seed: int = 0
    """Decides the initial weights and the order of the data."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:N` or `mps`."""

    dtype: str = "auto"
    """Of activations and matrix products: `auto`, `float32`, `bfloat16` or `float16`."""

    low_precision_weights: bool = False
    """Whether the model holds its matrices in `dtype`, and AdamW the float32 masters."""

    tf32: bool = True
    """Whether float32 products may use TF32 on GPUs that have it."""

    compile: bool = False
    """Whether `torch.compile` fuses the model."""

    cuda_graph: bool = False
    """Whether the whole step is recorded once and replayed, without launching kernel by kernel."""

    ddp_wrapper: str = "flashddp"
    """How ranks average gradients: `naive`, `flat`, `overlap`, `flashddp` or `torch_ddp`.

    Ranks are processes with a GPU each, as `torchrun --nproc_per_node=2 -m lib train …` starts
    them; lib/ddp.py explains the ways. `none` leaves it to `sharded_optimizer` zero1; `fsdp2` is
    PyTorch's fully_shard, which also shards weights and gradients. One process alone has nothing to
    average.
    """

    sharded_optimizer: str = "none"
    """Which part of AdamW's state a rank holds: `none`: all, `zero1`: 1 / ranks, `torch_zero`.

    The last is PyTorch's ZeroRedundancyOptimizer; lib/sharded_optimizer.py explains the other. All
    give the same training. One process alone holds all.
    """

    zero1_strategy: Literal["flat", "parameters"] = "flat"
    """How zero1 deals weights to ranks: equal slices of flat buffers, or whole `parameters`."""

    bucket_size_mb: float | None = None
    """MiB of gradients that `flashddp`, `torch_ddp` and zero1's `flat` send at a time.

    When left out 25, or a 32nd of all gradients where that is more.
    """

    deterministic: bool = False
    """Whether only deterministic kernels run, so that a repeated run gives the same bits."""

    log_interval: int = 10
    """Steps between two lines of metrics."""

    eval_interval: int = 100
    """Steps between two evaluations on the validation text; 0: only at the end."""

    eval_tokens: int = 100_000
    """How many validation tokens an evaluation takes, from the start; 0: all of them."""

    checkpointing_interval: int = 0
    """Steps between two checkpoints; 0 or less: only the last step, which is always saved."""

    keep_last: int = 2
    """How many checkpoints are kept."""

    resume: bool = True
    """Whether a run found in `output` goes on; otherwise `output` must hold none."""

    max_seconds: float = 0.0
    """After so many seconds a call saves and ends; the next one goes on. 0: no limit."""

    max_nonfinite_steps: int = 20
    """So many steps in a row with a loss or gradient that is not finite end the run."""

    wandb: bool = False
    """Whether metrics also go to Weights & Biases (WANDB_MODE=offline by default)."""

    def __post_init__(self) -> None:
        _check_numbers(self)
        positive = ("steps", "batch_size", "gradient_accumulation_steps", "log_interval")
        for field in (*positive, "keep_last", "max_nonfinite_steps"):
            check(self, field, getattr(self, field) > 0, "at least 1")
        for field in ("seed", "eval_interval", "eval_tokens", "max_seconds"):
            check(self, field, getattr(self, field) >= 0, "0 or more")
        right = "auto, float32, bfloat16 or float16"
        check(self, "dtype", self.dtype in right.replace(" or", ",").split(", "), right)
        for field, known in (
            ("ddp_wrapper", TRAINING_WRAPPERS),
            ("sharded_optimizer", OPTIMIZER_SHARDINGS),
            ("zero1_strategy", ("flat", "parameters")),
        ):
            check(self, field, getattr(self, field) in known, ", ".join(known))
        if self.ddp_wrapper == "fsdp2" and self.sharded_optimizer != "none":
            raise ValueError(
                f"sharded_optimizer is {self.sharded_optimizer!r} and ddp_wrapper 'fsdp2', which "
                "shards the optimizer's state itself; right is: sharded_optimizer 'none'"
            )
        cap = self.bucket_size_mb
        check(self, "bucket_size_mb", cap is None or 0 < cap < math.inf, "more than 0, and finite")
        if self.optimizer.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps {self.optimizer.warmup_steps} is more than steps {self.steps}"
            )


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """How text is sampled from a trained model."""

    prompts: tuple[str, ...] = ("Once upon a time",)
    """Texts to continue, in one batch; an empty one starts a new document."""

    max_new_tokens: int = 200
    """At most so many tokens are added to each prompt."""

    temperature: float = 0.8
    """Logits are divided by it; 0 always takes the likeliest token."""

    top_k: int = 0
    """Sample from the so many likeliest tokens; 0: from all."""

    top_p: float = 0.95
    """Sample from the likeliest tokens that together reach this probability; 1: from all."""

    seed: int = 0
    """Decides what is drawn."""

    def __post_init__(self) -> None:
        _check_numbers(self)
        check(self, "prompts", bool(self.prompts), "at least one text")
        check(self, "max_new_tokens", self.max_new_tokens >= 0, "0 or more")
        check(self, "temperature", 0 <= self.temperature < math.inf, "0 or more")
        check(self, "top_k", self.top_k >= 0, "0 or more")
        check(self, "top_p", 0 < self.top_p <= 1, "more than 0 and at most 1")
        check(self, "seed", self.seed >= 0, "0 or more")


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Which model continues which texts, and how."""

    checkpoint: Path | None = None
    """A run's folder, or one checkpoint; the newest run in `artifacts/runs` when left out."""

    sample: SampleConfig = SampleConfig()
    """Prompts and sampling."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:N` or `mps`."""


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """From a corpus to a trained model and a sample of its text."""

    corpus: TokenizeConfig = dataclasses.field(default_factory=TokenizeConfig)
    """Corpus, tokenizer and token arrays."""

    train: TrainConfig = TrainConfig()
    """The model and its training; `data` is the corpus step's output when left out."""

    sample: SampleConfig = SampleConfig()
    """The text sampled at the end."""

    skip_data: bool = False
    """Whether the token arrays in `train.data` are taken as they are, and no corpus is made."""

    def __post_init__(self) -> None:
        if self.skip_data and self.train.data is None:
            raise ValueError("skip_data is True and train.data is not given; right is: a folder")
