"""The settings of a training run, of sampling, and of the whole pipeline; loads no torch.

Frozen dataclasses, checked when made. A field's docstring is its text in `--help`.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from lib.core.hardware import DtypeName
from lib.core.settings import (
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check,
    settings,
)
from lib.data.prepare import TokenizeConfig
from lib.ddp.settings import DdpWrapper
from lib.model.config import ModelConfig

# FSDP shards the model itself, so it is not a wrapper around a whole model.
TrainingWrapper = Literal[DdpWrapper, "fsdp", "fsdp2"]
Decay = Annotated[float, Ge(0), Lt(1)]


@settings
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    learning_rate: NonNegativeFloat = 1e-3
    """Peak learning rate, reached at the end of warmup."""

    min_learning_rate: NonNegativeFloat = 1e-4
    """Learning rate of the last step, where the cosine ends."""

    warmup_steps: NonNegativeInt = 100
    """Steps over which the learning rate rises linearly from 0.

    With fewer `steps` than this, it is a tenth of them.
    """

    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of matrices; vectors (the norms' weights) have none."""

    beta1: Decay = 0.9
    """Decay rate of AdamW's first moment."""

    beta2: Decay = 0.95
    """Decay rate of AdamW's second moment."""

    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""

    max_grad_norm: NonNegativeFloat = 1.0
    """Clip the global gradient norm to this value. 0 = no clipping."""

    z_loss: NonNegativeFloat = 0.0
    """Weight of the auxiliary loss mean(logsumexp²), which keeps logits small (PaLM, section 5)."""

    def __post_init__(self) -> None:
        right = f"between 0 and learning_rate {self.learning_rate}"
        check(self, "min_learning_rate", self.min_learning_rate <= self.learning_rate, right)


@settings
class TrainConfig:
    """Settings of a training run: model, data, schedule, hardware, and what is written when.

    On several GPUs of one host: `torchrun --nproc_per_node=2 -m lib train …`, with the same flags.
    """

    model: ModelConfig = ModelConfig(attention_kernel="auto")
    """The model."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its learning-rate schedule."""

    data: Path | None = None
    """Folder with bpe.json, train.npy and validation.npy, as `tokenize` writes it."""

    output: Path | None = None
    """The run's folder. None = a folder in `runs_dir` named after data and settings."""

    runs_dir: Path = Path("artifacts/runs")
    """Parent folder of runs without an `output`."""

    steps: PositiveInt = 1000
    """Total optimizer steps."""

    batch_size: PositiveInt = 32
    """Sequences of context_length tokens per forward pass on each rank.

    An optimizer step uses batch_size × gradient_accumulation_steps × ranks sequences.
    """

    gradient_accumulation_steps: PositiveInt = 1
    """Forward and backward passes per optimizer step, whose gradients are summed."""

    seed: NonNegativeInt = 0
    """Seed of the initial weights and of the data order."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:N` or `mps`."""

    dtype: DtypeName = "auto"
    """Dtype of activations and matmuls: `auto`, `float32`, `bfloat16` or `float16`."""

    low_precision_weights: bool = False
    """Store matrices in `dtype`, with float32 master weights in AdamW."""

    tf32: bool = True
    """Allow TF32 in float32 matmuls, on GPUs that support it."""

    compile: bool = False
    """Compile the model with `torch.compile`."""

    cuda_graph: bool = False
    """Record the whole step as a CUDA graph and replay it, to avoid kernel-launch overhead."""

    ddp_wrapper: TrainingWrapper = "flashddp"
    """How ranks average gradients: `naive`, `flat`, `overlap`, `flashddp` or `torch_ddp`.

    A rank is a process with a GPU of its own, as `torchrun --nproc_per_node=2 -m lib train …`
    starts them; lib/ddp/wrappers.py explains the wrappers. `none` leaves averaging to
    `sharded_optimizer` zero1; `fsdp` also shards parameters and gradients (lib/fsdp/wrapper.py),
    and so does PyTorch's fully_shard, `fsdp2`. Ignored with one process.
    """

    activation_checkpointing: Literal["none", "input", "attention", "matmuls"] = "none"
    """Tensors that a block keeps for the backward pass, which recomputes the rest; `none`: all.

    `input` keeps the least; `attention` also keeps attention's output, which takes longest to
    compute again in long sequences; `matmuls` also keeps the outputs of all matmuls.
    """

    checkpointed_blocks: PositiveInt = 1
    """Apply `activation_checkpointing` to every block (1), every other one (2), and so on."""

    sharded_optimizer: Literal["none", "zero1", "torch_zero"] = "none"
    """How AdamW's state is sharded over ranks: `none`, `zero1` or `torch_zero`.

    `torch_zero` is PyTorch's ZeroRedundancyOptimizer; lib/sharded_optimizer/optimizer.py explains
    `zero1`. Training gives the same result either way. Ignored with one process.
    """

    zero1_strategy: Literal["flat", "parameters"] = "flat"
    """How zero1 divides the state: equal slices of flat buffers (`flat`), or whole `parameters`."""

    bucket_size_mb: PositiveFloat | None = None
    """MiB of gradients per bucket, for `flashddp`, `torch_ddp` and zero1's `flat`.

    None = 25, or 1/32 of all gradients if that is more.
    """

    deterministic: bool = False
    """Use deterministic kernels only, so that a repeated run is bitwise identical."""

    log_interval: PositiveInt = 10
    """Log metrics every N steps."""

    eval_interval: NonNegativeInt = 100
    """Evaluate on the validation tokens every N steps. 0 = only at the end."""

    eval_tokens: NonNegativeInt = 100_000
    """Number of validation tokens per evaluation, from the start. 0 = all."""

    checkpointing_interval: int = 100
    """Save a checkpoint every N steps, before an evaluation that is due then.

    The last step is always saved. 0 or less = only that one.
    """

    keep_last: PositiveInt = 2
    """Number of checkpoints to keep."""

    resume: bool = True
    """Resume the run found in `output`; if false, `output` must not contain a run."""

    max_seconds: NonNegativeFloat = 0.0
    """Checkpoint and stop after this many seconds; rerun to continue. 0 = no limit."""

    max_nonfinite_steps: PositiveInt = 20
    """Abort after this many consecutive steps with a non-finite loss or gradient."""

    wandb: bool = False
    """Also log to Weights & Biases (offline unless WANDB_MODE says otherwise)."""

    tensorboard: bool = False
    """Also write event files for TensorBoard into the run's folder; needs its package."""

    def __post_init__(self) -> None:
        if self.ddp_wrapper in ("fsdp", "fsdp2") and self.sharded_optimizer != "none":
            raise ValueError(
                f"sharded_optimizer must be 'none' with ddp_wrapper {self.ddp_wrapper!r}, which "
                f"shards the optimizer's state itself, got {self.sharded_optimizer!r}"
            )

    @property
    def effective_warmup_steps(self) -> int:
        """`optimizer.warmup_steps`, or a tenth of a run with fewer steps than that."""
        asked = self.optimizer.warmup_steps
        return asked if asked <= self.steps else self.steps // 10


@settings
class SampleConfig:
    """Settings of sampling text from a trained model."""

    prompts: Annotated[tuple[str, ...], NonEmpty] = ("Once upon a time",)
    """Texts to continue, as one batch; an empty one starts a new document."""

    max_new_tokens: NonNegativeInt = 200
    """Maximum number of tokens added to each prompt."""

    temperature: NonNegativeFloat = 0.8
    """Logits are divided by this; higher is more random. 0 = always the most likely token."""

    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens. 0 = from all."""

    top_p: Annotated[float, Gt(0), Le(1)] = 0.95
    """Sample from the smallest set of most likely tokens with this total probability. 1 = all."""

    seed: NonNegativeInt = 0
    """Random seed."""

    def options(self) -> dict[str, Any]:
        """The arguments of `lib.training.generation.generate_text` but the prompts."""
        return {name: value for name, value in vars(self).items() if name != "prompts"}


@settings
class GenerateConfig:
    """Settings of `generate`: the model, the texts to continue, and the sampling."""

    checkpoint: Path | None = None
    """A run's folder or one of its checkpoints. None = the newest run in `artifacts/runs`."""

    sample: SampleConfig = SampleConfig()
    """Prompts and sampling."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:N` or `mps`."""


@settings
class ExportConfig:
    """Settings of `export`: the model, the format, and the folder to write."""

    folder: Path | None = None
    """New or empty folder for the model. May be given without its flag."""

    to: Literal["transformers"] = "transformers"
    """Whose format; vLLM and llama.cpp read that of `transformers`, too."""

    checkpoint: Path | None = None
    """A run's folder or one of its checkpoints. None = the newest run in `artifacts/runs`."""


@settings
class ImportConfig:
    """Settings of `import`: the model to read, and the folder of its run."""

    folder: Path | None = None
    """Folder of a Llama-like model, as `transformers` saves it. May be given without its flag."""

    output: Path | None = None
    """The new run's folder. None = one in `artifacts/runs` with the name of `folder`."""


@settings
class PipelineConfig:
    """Settings of the pipeline: corpus, training, sample."""

    corpus: TokenizeConfig = dataclasses.field(default_factory=TokenizeConfig)
    """Corpus, tokenizer and token arrays."""

    train: TrainConfig = TrainConfig()
    """The model and its training; `data` defaults to the output of the corpus step."""

    sample: SampleConfig = SampleConfig()
    """The text sampled at the end."""

    skip_data: bool = False
    """Skip the corpus step and train on the existing token arrays in `train.data`."""

    def __post_init__(self) -> None:
        if self.skip_data and self.train.data is None:
            raise ValueError("train.data must be a folder of token arrays with skip_data, got None")

    def part(self, cls: type) -> Any:
        """The settings of one step of the pipeline, as the command of that step takes them."""
        data = self.train.data or self.corpus.output_dir
        return {
            PipelineConfig: self,
            TokenizeConfig: self.corpus,
            TrainConfig: dataclasses.replace(self.train, data=data),
            GenerateConfig: GenerateConfig(sample=self.sample),
        }[cls]
