"""`python -m lib COMMAND`: the command line.

Flags are generated from the dataclasses in `lib.config`. Whatever takes time to import is imported
by the command that needs it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# Pipelines with a name: `--config tiny`.
PRESETS = Path(__file__).resolve().parent / "presets"


def tokenize(arguments: list[str]) -> int:
    """Turn a corpus into a tokenizer and token arrays."""
    from lib.config import TokenizeConfig

    config = parse(TokenizeConfig, "tokenize", arguments)

    from lib.pipeline import tokenize_corpus

    print_corpus(tokenize_corpus(config, progress_bar=progress_bar))
    return 0


def pipeline(arguments: list[str]) -> int:
    """Corpus, tokenizer, token arrays, training and a sample, in one go."""
    from lib.config_training import PipelineConfig

    config = parse(PipelineConfig, "pipeline", arguments)

    from lib.pipeline import run_pipeline

    rows, result, texts = run_pipeline(config, progress_bar=progress_bar)
    if not is_first_rank():
        return exit_code(result)
    if rows:
        print_corpus(rows)
    print_training(result)
    print("\n" + "\n\n".join(texts) if texts else "", end="\n" if texts else "")
    return exit_code(result)


def train(arguments: list[str]) -> int:
    """Train a model, or go on with an interrupted run."""
    from lib.config_training import TrainConfig

    config = parse(TrainConfig, "train", arguments)

    from lib import train

    result = train.train(config)
    if is_first_rank():
        print_training(result)
    return exit_code(result)


def generate(arguments: list[str]) -> int:
    """Let a trained model continue texts."""
    from lib.config_training import GenerateConfig

    config = parse(GenerateConfig, "generate", arguments)

    from lib.generate import generate_sample, load_model, newest_run

    model, tokenizer, _ = load_model(config.checkpoint or newest_run(), config.device)
    sample = config.sample
    is_live = len(sample.prompts) == 1 and sys.stdout.isatty()
    if is_live:
        print(sample.prompts[0], end="", flush=True)
    on_text = (lambda row, text: print(text, end="", flush=True)) if is_live else None
    texts = generate_sample(model, tokenizer, sample, on_text=on_text)
    if is_live:
        print()
    else:
        print("\n\n".join(texts))
    return 0


def run(arguments: list[str]) -> int:
    """Run the notebooks and write the report."""
    from lib.config import RunConfig

    config = parse(RunConfig, "run", arguments)

    from lib.notebook import run_notebooks

    return run_notebooks(
        config.notebooks,
        parameters=config.parameters,
        report=config.report,
        workers=config.workers,
    )


def benchmark_tokenizer(arguments: list[str]) -> int:
    """Measure the tokenizer against its peers."""
    from lib.config import TokenizerBenchmarkConfig

    config = parse(TokenizerBenchmarkConfig, "benchmark tokenizer", arguments)

    from lib.benchmark_tokenizer import benchmark_tokenizer

    benchmark_tokenizer(config)
    print(config.output / "tokenizer_benchmark.md")
    return 0


def benchmark_training(arguments: list[str]) -> int:
    """Measure training steps against a peer, or on a CPU against their matrix products."""
    from lib.config import TrainingBenchmarkConfig

    config = parse(TrainingBenchmarkConfig, "benchmark training", arguments)

    from lib.benchmark_training import benchmark_training

    print(benchmark_training(config))
    return 0


def benchmark_step(arguments: list[str]) -> int:
    """Measure time and memory of training steps, by model, context and precision."""
    from lib.config import StepBenchmarkConfig

    config = parse(StepBenchmarkConfig, "benchmark step", arguments)

    from lib.benchmark_step import benchmark_step

    benchmark_step(config)
    print(config.output / "step_benchmark.md")
    return 0


def benchmark_attention(arguments: list[str]) -> int:
    """Measure the kernels of attention against one another and PyTorch's."""
    from lib.config import AttentionBenchmarkConfig

    config = parse(AttentionBenchmarkConfig, "benchmark attention", arguments)

    from lib.benchmark_attention import benchmark_attention

    benchmark_attention(config)
    print(config.output / "attention_sweep_report.md")
    return 0


def benchmark_communication(arguments: list[str]) -> int:
    """Measure collectives between GPUs or processes, by size, against the cost formula."""
    from lib.config_distributed import CommunicationBenchmarkConfig

    config = parse(CommunicationBenchmarkConfig, "benchmark communication", arguments)

    from lib.benchmark_communication import benchmark_communication

    if benchmark_communication(config):
        print(config.output / "communication_benchmark.md")
    return 0


def benchmark_lm_matrix(arguments: list[str]) -> int:
    """Measure attention kernels and data-parallel wrappers, in training on several ranks."""
    from lib.config_lm_matrix import LmMatrixConfig

    config = parse(LmMatrixConfig, "benchmark lm-matrix", arguments)

    from lib.benchmark_lm_matrix import benchmark_lm_matrix

    if benchmark_lm_matrix(config):
        print(config.output / "lm_matrix_report.md")
    return 0


def benchmark_sharding(arguments: list[str]) -> int:
    """Measure memory and time of sharded optimizers, in training on several ranks."""
    from lib.config_sharding import ShardingConfig

    config = parse(ShardingConfig, "benchmark sharding", arguments)

    from lib.benchmark_sharding import benchmark_sharding

    if benchmark_sharding(config):
        print(config.output / "sharding_benchmark.md")
    return 0


def benchmark_repeat(arguments: list[str]) -> int:
    """Measure settings of kept records of several ranks again."""
    from lib.config_ranks import RepeatConfig

    config = parse(RepeatConfig, "benchmark repeat", arguments)

    from lib.benchmark_repeat import benchmark_repeat

    if benchmark_repeat(config):
        print(config.output)
    return 0


def profile(arguments: list[str]) -> int:
    """Watch training steps: time by kernel, idle gaps, memory by category."""
    from lib.config_profile import ProfileConfig

    config = parse(ProfileConfig, "profile", arguments)

    from lib.profile_run import profile

    profile(config)
    return 0


def kaggle_build(arguments: list[str]) -> int:
    """Make a folder for Kaggle, and run its notebooks as Kaggle would."""
    from lib.config_kaggle import KaggleBuildConfig

    config = parse(KaggleBuildConfig, "kaggle build", arguments)

    from lib.kaggle import build

    print(build(config))
    return 0


def kaggle_push(arguments: list[str]) -> int:
    """Upload that folder with Kaggle's own client."""
    from lib.config_kaggle import KagglePushConfig

    config = parse(KagglePushConfig, "kaggle push", arguments)

    from lib.kaggle import push

    push(config)
    return 0


# name, of one word or two -> what it does with the arguments behind the name
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "pipeline": pipeline,
    "tokenize": tokenize,
    "train": train,
    "generate": generate,
    "run": run,
    "benchmark tokenizer": benchmark_tokenizer,
    "benchmark training": benchmark_training,
    "benchmark step": benchmark_step,
    "benchmark attention": benchmark_attention,
    "benchmark communication": benchmark_communication,
    "benchmark lm-matrix": benchmark_lm_matrix,
    "benchmark sharding": benchmark_sharding,
    "benchmark repeat": benchmark_repeat,
    "profile": profile,
    "kaggle build": kaggle_build,
    "kaggle push": kaggle_push,
}
# Those that `torchrun` may start in several processes, which work together.
OF_RANKS = (pipeline, train)


def main(arguments: list[str] | None = None) -> int:
    """Run the command that `arguments` (by default the process's own) name; its exit code.

    Errors that a user can mend are one line and exit code 2, an interruption is 130. `--debug`, or
    WORKBOOK_DEBUG=1 in the environment, shows where they came from.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    is_debug = "--debug" in arguments or os.environ.get("WORKBOOK_DEBUG", "0") not in ("", "0")
    arguments = [argument for argument in arguments if argument != "--debug"]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    try:
        command, rest = find_command(arguments)
        if command not in OF_RANKS or "RANK" not in os.environ:
            return command(rest)
        from lib.command_ranks import run_as_rank

        return run_as_rank(lambda: command(rest), lambda error: tell(error, is_debug))
    except KeyboardInterrupt:
        if is_debug:
            traceback.print_exc()
        return 130
    except (OSError, ValueError, ImportError, FloatingPointError) as error:
        tell(error, is_debug)
        return 2
    except RuntimeError as error:
        from lib.allocations import is_out_of_memory
        from lib.distributed import WorkerError

        if isinstance(error, WorkerError) and not is_debug:
            # whose words hold the rank's own traceback
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 1
        if is_debug or not is_out_of_memory(error):
            raise
        tell(error, is_debug)
        return 2


def tell(error: Exception, is_debug: bool) -> None:
    """Print what a person needs of `error`; with `is_debug` also where it came from."""
    if is_debug:
        traceback.print_exc()
    print(f"error: {one_line(error)}", file=sys.stderr, flush=True)


def is_first_rank() -> bool:
    """Whether this process is alone, or the first of those that `torchrun` started."""
    return os.environ.get("RANK", "0") == "0"


def find_command(arguments: list[str]) -> tuple[Callable[[list[str]], int], list[str]]:
    """The command that the first one or two of `arguments` name, and the arguments behind it."""
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return COMMANDS[name], arguments[words:]
    import difflib

    beginnings = [name for name in COMMANDS if name.startswith(f"{arguments[0]} ")]
    if beginnings:
        raise ValueError(f"{arguments[0]} needs one more word: {', '.join(beginnings)}")
    close = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(f"unknown command {arguments[0]!r}; {hint}known: {', '.join(COMMANDS)}")


def parse(cls: type[T], command: str, arguments: list[str]) -> T:
    """The config `cls` from `--config`, a file or a preset's name, with flags on top."""
    if "RANK" not in os.environ:
        return parse_alone(cls, command, arguments)
    from lib.command_ranks import parse_as_rank

    return parse_as_rank(lambda: parse_alone(cls, command, arguments))


def parse_alone(cls: type[T], command: str, arguments: list[str]) -> T:
    """`parse` in this process, whatever becomes of it in others."""
    import argparse
    import importlib.util

    from lib.strict_json import from_json

    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--config")
    given, flags = before.parse_known_args(arguments)
    default = {}
    if given.config is not None:
        presets = {path.stem: path for path in PRESETS.glob("*.json")}
        path = presets.get(given.config) or Path(given.config)
        if not path.exists():
            known = ", ".join(sorted(presets))
            raise FileNotFoundError(f"--config {path}: no such file, and the presets are: {known}")
        default["default"] = from_json(cls, path)
    flags = [full_flag(cls, flag) for flag in flags]
    if importlib.util.find_spec("tyro") is None:
        from lib.plain_flags import with_flags

        return with_flags(default.get("default") or cls(), flags)
    import tyro

    note = (
        "--config FILE.json replaces the defaults below; flags come on top. --debug: tracebacks.\n"
        "A flag may leave out what stands before its last dot."
    )
    return tyro.cli(
        cls,
        prog=f"python -m lib {command}",
        description=f"{COMMANDS[command].__doc__}\n\n{note}",
        args=flags,
        use_underscores=True,
        **default,
    )


def full_flag(cls: type, flag: str) -> str:
    """`--d_model` as `--model.d_model`: the field of `cls` and its parts that is called so.

    Of several it is the outermost, so that `--vocab_size` is the corpus's and not the model's.

    Raises:
        ValueError: several are equally far out; lists them.
    """
    if not flag.startswith("--") or "." in flag.split("=")[0]:
        return flag
    name, *value = flag[2:].split("=", 1)
    name = name.replace("-", "_")
    no = "no_" if name.startswith("no_") else ""
    paths = field_paths(cls).get(name.removeprefix("no_"), [])
    outermost = min((path.count(".") for path in paths), default=0)
    paths = [path for path in paths if path.count(".") == outermost]
    if len(paths) > 1:
        raise ValueError(f"{flag} can be {' or '.join(f'--{path}' for path in paths)}; name one")
    if len(paths) != 1:
        return flag
    *parents, last = paths[0].split(".")
    return "=".join(["--" + ".".join([*parents, no + last]), *value])


def field_paths(cls: type, prefix: str = "") -> dict[str, list[str]]:
    """Each field's name, in `cls` and the dataclasses in it -> where it stands, with dots."""
    import dataclasses
    import typing

    paths: dict[str, list[str]] = {}
    for name, kind in typing.get_type_hints(cls).items():
        inner = {name: [prefix + name]}
        if dataclasses.is_dataclass(kind):
            inner = field_paths(kind, f"{prefix}{name}.")
        for key, found in inner.items():
            paths[key] = paths.get(key, []) + found
    return paths


def print_corpus(rows: list[dict]) -> None:
    """The table of what became of a corpus."""
    from lib.report import to_markdown

    names = {"bytes_per_token": "bytes/token", "MB_per_s": "MB/s"}
    print(to_markdown(rows, {key: names.get(key, key) for key in rows[0]}), end="")


def print_training(result) -> None:
    """Where a training run stands."""
    from lib.metrics import read_metrics

    print(f"{result.status} at step {result.step}: {result.output}")
    lines = read_metrics(result.output / "metrics.jsonl")
    last = next((line for line in reversed(lines) if "validation_loss" in line), None)
    if last is not None:
        print(
            f"validation loss {last['validation_loss']:.4f}, "
            f"perplexity {last['validation_perplexity']:.2f}, "
            f"{last['validation_bits_per_byte']:.4f} bits per byte"
        )
    if result.status == "stopped":
        print("the same command goes on from here")


def exit_code(result) -> int:
    """130, as after an interruption, where a training run was stopped.

    Under `torchrun` 0, which would take anything else for a failure and start it again.
    """
    return 130 if result.status == "stopped" and "RANK" not in os.environ else 0


@contextlib.contextmanager
def progress_bar(description: str, num_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal, if there is one; yields what is to be told the bytes just done."""
    from tqdm import tqdm

    options = {"unit": "B", "unit_scale": True, "disable": None, "leave": False}
    with tqdm(desc=description, total=num_bytes, **options) as bar:
        yield bar.update


def overview() -> str:
    """What bare `python -m lib` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: python -m lib COMMAND [--config FILE.json] [--FLAG VALUE ...]",
            "",
            *lines,
            "",
            "python -m lib COMMAND --help lists the flags of a command.",
        ]
    )


def one_line(error: Exception) -> str:
    """What a person needs of `error`, without Python's error numbers."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
