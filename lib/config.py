"""What a run is asked to do: frozen dataclasses, checked when made.

Each command's flags are generated from its dataclass, so a field's note is also its help text.
`lib.strict_json` reads and writes them as JSON.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class TokenizeConfig:
    """From a corpus to a tokenizer and the token arrays that a model trains on."""

    corpus: str = "stories"
    """`stories` (generated here), `tinystories` (downloaded), or a UTF-8 text file or folder."""

    corpus_bytes: int = 20_000_000
    """How many bytes of `stories` to generate for training; other corpora are taken whole."""

    validation_fraction: float = 0.05
    """How much text is kept for validation; `tinystories` has a validation part of its own."""

    vocab_size: int = 4096
    """Number of token ids: 256 bytes, the merges, and the special tokens."""

    special_tokens: tuple[str, ...] = ("<|endoftext|>",)
    """Texts that get an id of their own; merges never cross them."""

    seed: int = 0
    """Which stories are generated."""

    data_dir: Path = Path("data")
    """The folder that corpora are generated or downloaded into."""

    output: Path | None = None
    """The folder for tokenizer and arrays; `DATA_DIR/CORPUS-VOCAB_SIZE` when left out."""

    workers: int | None = None
    """Parallel workers; one for each core when left out. The result is the same for any number."""

    implementation: Literal["auto", "python", "numba"] = "auto"
    """`python` (readable), `numba` (compiled), or `auto`, which picks by size. Same result."""

    def __post_init__(self) -> None:
        check(self, "corpus", bool(self.corpus), "a corpus name, a text file or a folder")
        check(self, "corpus_bytes", self.corpus_bytes > 0, "at least 1")
        fraction = self.validation_fraction
        check(self, "validation_fraction", 0 < fraction <= 0.5, "more than 0 and at most 0.5")
        check(self, "special_tokens", all(self.special_tokens), "texts that are not empty")
        check(
            self,
            "special_tokens",
            len(set(self.special_tokens)) == len(self.special_tokens),
            "texts that differ from one another",
        )
        smallest = 256 + len(self.special_tokens)
        count = len(self.special_tokens)
        check(
            self,
            "vocab_size",
            self.vocab_size >= smallest,
            f"at least 256 bytes + {count} special tokens = {smallest}",
        )
        check(self, "seed", self.seed >= 0, "0 or more")
        check(self, "workers", self.workers is None or self.workers > 0, "at least 1")

    @property
    def output_dir(self) -> Path:
        """Where the tokenizer and the arrays go."""
        name = Path(self.corpus).resolve().stem or "corpus"
        return self.output or self.data_dir / f"{name}-{self.vocab_size}"


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Which notebooks to run, and with which parameters."""

    notebooks: tuple[str, ...] = ()
    """Numbers (`01`) or names (`01_tokenizer`); every notebook when left out."""

    parameters: str | None = None
    """A YAML file of parameters, or the name of one in `notebooks/parameters/`."""

    report: Path | None = None
    """The folder for the pages; `artifacts/report` when left out."""

    workers: int | None = None
    """Notebooks run at a time; one for two cores when left out."""

    def __post_init__(self) -> None:
        check(self, "workers", self.workers is None or self.workers > 0, "at least 1")


@dataclasses.dataclass(frozen=True)
class TokenizerBenchmarkConfig:
    """The tokenizer against its peers, on whole texts."""

    texts: tuple[str, ...] = ("stories",)
    """`stories`, or UTF-8 text files of your own."""

    megabytes: int = 100
    """How much of each text is taken."""

    vocab_sizes: tuple[int, ...] = (10_000, 32_000)
    """Vocabularies that are trained; the first one is also used to encode."""

    samples: int = 3
    """How often each candidate has its turn."""

    large_files: tuple[str, ...] = ()
    """Files to train on and encode once, for time and peak memory."""

    seed: int = 0
    """Which stories are generated."""

    output: Path = Path("artifacts")
    """The folder for records, table and figure."""

    def __post_init__(self) -> None:
        check(self, "megabytes", self.megabytes > 0, "at least 1")
        check(self, "samples", self.samples > 0, "at least 1")
        check(self, "vocab_sizes", bool(self.vocab_sizes), "at least one size")
        check(self, "vocab_sizes", min(self.vocab_sizes) > 256, "sizes above 256 bytes")


@dataclasses.dataclass(frozen=True)
class TrainingBenchmarkConfig:
    """Training steps: on a GPU against a peer, on a CPU against their matrix products alone."""

    models: tuple[str, ...] = ()
    """Names of model presets; `tiny` when left out, and on a GPU `gpt2-124m` and `matrix`."""

    batch_sizes: tuple[int, ...] = ()
    """Windows a step, for each of `models`; may be left out where these are."""

    samples: int | None = None
    """Turns of each; 30 when left out. On a GPU 7, and 3 where an optimisation is left out."""

    steps: int = 30
    """On a GPU: steps in a turn; on a CPU it is one."""

    ablations: bool = True
    """On a GPU: whether candidates with one optimisation left out are measured too."""

    loss: bool = True
    """On a GPU: whether the loss is measured too, chunked and with all logits at once."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""

    seed: int = 0
    """Which tokens."""

    output: Path = Path("artifacts")
    """The folder for records, table and figure."""

    def __post_init__(self) -> None:
        count = len(self.models)
        check(self, "batch_sizes", len(self.batch_sizes) == count, f"{count}, one for each model")
        check(self, "batch_sizes", min(self.batch_sizes, default=1) > 0, "each at least 1")
        check(self, "samples", self.samples is None or self.samples > 0, "at least 1")
        check(self, "steps", self.steps > 0, "at least 1")


@dataclasses.dataclass(frozen=True)
class StepBenchmarkConfig:
    """Steps of training, by size of model, context, mode, precision and compilation."""

    configs: tuple[str, ...] = ()
    """Names of model presets; `tiny` when left out, and on a GPU `small` to `xl`."""

    batch_size: int = 4
    """Windows a step."""

    seq_lens: tuple[int, ...] = ()
    """Tokens in a window; 32, 64, 128 when left out, and on a GPU 128 to 1024."""

    modes: tuple[Literal["forward", "forward_backward", "full_step"], ...] = (
        "forward",
        "forward_backward",
        "full_step",
    )
    """The loss alone; with its gradients; with clipping and AdamW as well."""

    mixed_precision: bool = False
    """Whether products are in the short type that the device is fast in; else in float32."""

    compare_precision: bool = False
    """Whether both are measured."""

    tf32: bool = False
    """Whether float32 products may use TF32; else they are IEEE's."""

    compile: bool = False
    """Whether `torch.compile` fuses each layer."""

    compare_compile: bool = False
    """Whether both are measured, eager and compiled."""

    attention_kernel: tuple[str, ...] = ("sdpa",)
    """Implementations of attention."""

    samples: int = 10
    """Samples of each; at least three where they take longer than `max_seconds`."""

    warmup: int = 3
    """Steps before anything counts."""

    max_seconds: float = 2.0
    """About how long the samples of one row may take."""

    nvtx: bool = False
    """Whether the model's parts are NVTX ranges, for Nsight Systems."""

    memory_profile: bool = False
    """Whether each row leaves a snapshot of the allocator for pytorch.org/memory_viz."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:N` or `mps`."""

    seed: int = 0
    """Which weights and tokens."""

    restart: bool = False
    """Whether rows that the records hold already are measured again."""

    output: Path = Path("artifacts")
    """The folder for records, table and figure."""

    output_json: Path | None = None
    """The file of records; `OUTPUT/step_benchmark.jsonl` when left out."""

    def __post_init__(self) -> None:
        for field in ("batch_size", "samples", "warmup"):
            check(self, field, getattr(self, field) > 0, "at least 1")
        check(self, "seq_lens", min(self.seq_lens, default=1) > 0, "each at least 1")
        check(self, "modes", bool(self.modes), "at least one")
        check(self, "attention_kernel", bool(self.attention_kernel), "at least one")
        check(self, "max_seconds", self.max_seconds > 0, "more than 0")
        check(self, "seed", self.seed >= 0, "0 or more")


@dataclasses.dataclass(frozen=True)
class AttentionBenchmarkConfig:
    """Kernels of attention, by length, width of a head, mask and direction."""

    kernels: tuple[str, ...] = ()
    """Kernels to compare; when left out, all that the device runs."""

    custom_tiers: tuple[str, ...] = ()
    """Lengths as QUERIES:KEYS (`1024:4096`); when left out, 128 to 512 and on a GPU to 32768."""

    head_dims: tuple[int, ...] = ()
    """Widths of a head; 64 when left out, and on a GPU 64 and 128."""

    masks: tuple[Literal["causal", "full"], ...] = ("causal", "full")
    """Which keys a query sees: those up to its own place, or all."""

    backward: bool = False
    """Whether the backward pass is measured too."""

    targets: bool = False
    """Whether the further cases are measured that the table of targets needs."""

    dtype: str = "auto"
    """`auto` (the shortest that the device is fast in), `float32`, `bfloat16` or `float16`."""

    tokens: int | None = None
    """Tokens in a batch, whatever their length; 1024 when left out, and on a GPU 16384."""

    width: int | None = None
    """Heads times their width; 256 when left out, and on a GPU 2048."""

    batch_size: int | None = None
    """Sequences, whatever their length; as many as make `tokens` when left out."""

    heads: int | None = None
    """Heads, whatever their width; as many as make `width` when left out."""

    warmup: int = 3
    """Calls of each before anything counts."""

    iters: int = 20
    """Samples of each; at least three where they take longer than `max_seconds`."""

    max_seconds: float = 1.0
    """About how long the samples of all kernels in one case may take."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:N` or `mps`."""

    seed: int = 0
    """Which inputs."""

    restart: bool = False
    """Whether cases that the records hold already are measured again."""

    output: Path = Path("artifacts")
    """The folder for records, tables and figures."""

    def __post_init__(self) -> None:
        for tier in self.custom_tiers:
            is_right = re.fullmatch(r"[1-9][0-9]{0,8}:[1-9][0-9]{0,8}", tier)
            require(is_right, f"custom_tiers has {tier!r}; right is: QUERIES:KEYS, as in 1024:4096")
        check(self, "head_dims", min(self.head_dims, default=1) > 0, "each at least 1")
        for field in ("tokens", "width", "batch_size", "heads"):
            value = getattr(self, field)
            check(self, field, value is None or value > 0, "at least 1")
        check(self, "masks", bool(self.masks), "at least one")
        check(self, "warmup", self.warmup > 0, "at least 1")
        check(self, "iters", self.iters > 0, "at least 1")
        check(self, "max_seconds", 0 < self.max_seconds < math.inf, "more than 0, and finite")
        check(self, "seed", 0 <= self.seed < 2**63, "from 0 to 2⁶³ - 1")


def require(is_right: object, message: str) -> None:
    """Raise a `ValueError` with `message` unless `is_right`."""
    if not is_right:
        raise ValueError(message)


def check(config: Any, field: str, is_right: bool, right: str) -> None:
    """Raise a `ValueError` that names the field, its value and what is right, unless `is_right`."""
    require(is_right, f"{field} is {getattr(config, field)!r}; right is: {right}")
