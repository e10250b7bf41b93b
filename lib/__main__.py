"""`python -m lib COMMAND`: the command line.

`COMMANDS`, in three groups, names for each command the function that runs it. It is imported only
when the command is used, so that help comes at once; its argument `config`, if it has one, is a
dataclass whose fields become the command's flags.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lib.core.flags import field_paths, short_help, suggestion
from lib.core.terminal import one_line, prepare_streams, reader_is_gone

T = TypeVar("T")
log = logging.getLogger("lib")

# Pipelines with a name: `--config tiny`.
PRESETS = Path(__file__).resolve().parent / "presets"
HELP = ("-h", "--help")
HELP_ALL = "--help-all"
# Rounds in which PyTorch's threads wait for one another before they sleep (libgomp). With its own
# default, two other busy programs can make a step fifty times slower. Torch's import reads it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


class Command(NamedTuple):
    """A command: its line of help, and what is imported when it is used."""

    help: str

    function: str | Callable
    """`module:name`; an int that it returns is the exit code."""

    prints: str = ""
    """Printed if the function returned something true; may contain {config}, {result} and
    {quoted}, the result as a shell takes it. By default a path that it returned, and where a
    benchmark's report is."""

    interrupted: str = ""
    """Printed after Ctrl-C: how to go on."""

    on_ranks: bool = False
    """Whether processes that `torchrun` started work together on it."""

    word: str = ""
    """The field that words without a flag set."""


STARTS_OVER = "the same command starts over"
CONTINUES = "what was done and saved is kept, and the same command continues from there"

# Commands that learners and experimenters use.
USE: dict[str, Command] = {
    "pipeline": Command(
        "Corpus, tokenizer, token arrays, training and a sample, in one go.",
        "lib.training.commands:pipeline",
        interrupted=CONTINUES,
        on_ranks=True,
    ),
    "tokenize": Command(
        "Turn a corpus into a tokenizer and token arrays.",
        "lib.training.commands:tokenize",
        interrupted=CONTINUES,
    ),
    "train": Command(
        "Train a model, or resume an interrupted run.",
        "lib.training.commands:train",
        interrupted=CONTINUES,
        on_ranks=True,
    ),
    "generate": Command("Continue texts with a trained model.", "lib.training.commands:generate"),
    "export": Command(
        "Write a trained model as a folder that `transformers`, vLLM and llama.cpp read.",
        "lib.training.commands:export",
        prints="{result}; transformers.AutoModelForCausalLM.from_pretrained('{result}') loads it",
        word="folder",
    ),
    "import": Command(
        "Make a run from a Llama-like model that `transformers` saved.",
        "lib.training.commands:import_",
        prints="{result}; python -m lib generate --checkpoint {quoted} continues texts with it",
        word="folder",
    ),
    "runs": Command(
        "List the training runs that are kept, with their sizes and ages.",
        "lib.training.runs:list_runs",
    ),
    "run": Command(
        "Run the notebooks and write the report.",
        "lib.tools.publish.run_notebooks:run_notebooks",
        interrupted="finished pages are in the report; the same command runs all notebooks again",
    ),
    "exercises": Command(
        "Run the notebooks and list which exercises are solved, yours or all that were handed in.",
        "lib.tools.publish.submissions:exercises",
    ),
    "notebooks copy": Command(
        "Make your copies of the notebooks in work/, or bring them up to date.",
        "lib.tools.publish.readers_copies:copy_notebooks",
    ),
    "race": Command(
        "Race a recipe to the target, three seeds in fresh processes; keep it on your board.",
        "lib.lessons.speedrun.commands:race",
        word="entry",
    ),
    "race card": Command(
        "Draw one picture of an entry: curves, story, what it changes, seconds.",
        "lib.lessons.speedrun.commands:card",
        word="entry",
    ),
    "kaggle build": Command(
        "Make a folder for Kaggle, and run its notebooks as Kaggle would; say how to upload it.",
        "lib.tools.publish.kaggle:build",
    ),
}

# Those that measure a machine, or our code beside the best other.
MEASURE: dict[str, Command] = {
    "benchmark tokenizer": Command(
        "Measure the tokenizer against its peers.",
        "lib.tools.benchmarks.tokenizer:benchmark_tokenizer",
    ),
    "benchmark training": Command(
        "Measure training steps on a GPU against a peer.",
        "lib.tools.benchmarks.training:benchmark_training",
    ),
    "benchmark step": Command(
        "Measure time and memory of training steps, by model, context and precision.",
        "lib.tools.benchmarks.step:benchmark_step",
    ),
    "benchmark attention": Command(
        "Measure attention kernels against one another and PyTorch's.",
        "lib.tools.benchmarks.attention:benchmark_attention",
    ),
    "benchmark communication": Command(
        "Measure collectives between GPUs or processes, by size, against the cost formula.",
        "lib.tools.benchmarks.communication:benchmark_communication",
    ),
    "benchmark lm-matrix": Command(
        "Measure attention kernels and data-parallel wrappers, in training on several ranks.",
        "lib.tools.benchmarks.lm_matrix:benchmark_lm_matrix",
    ),
    "benchmark sharding": Command(
        "Measure memory and time of sharded optimizers, in training on several ranks.",
        "lib.tools.benchmarks.sharding:benchmark_sharding",
    ),
    "benchmark scaling": Command(
        "Measure all that the GPUs of a host share, beside predictions; --predict records these.",
        "lib.tools.scaling:benchmark_scaling",
        prints="{config.output}/scaling.md",
        interrupted=CONTINUES,
    ),
    "profile": Command(
        "Profile training steps: time by kernel, idle gaps, memory by category.",
        "lib.profiling.profiler:profile",
    ),
    "roofline": Command(
        "Measure a GPU's limits and the operations of a block against them.",
        "lib.profiling.roofline:write_records",
        prints="{config.output}/roofline.jsonl",
    ),
    "predict": Command(
        "Predict tokens/s, MFU and memory of a training run on one to eight GPUs.",
        "lib.tools.predict:print_predictions",
    ),
}

# Those that keep the workbook's own notebooks, models and records.
MAINTAIN: dict[str, Command] = {
    "notebooks refresh": Command(
        "Run notebooks and store their outputs in them, as they are committed.",
        "lib.tools.publish.run_notebooks:refresh_notebooks",
    ),
    "notebooks clean": Command(
        "Bring the notebooks' metadata into the form that is committed, without running them.",
        "lib.tools.publish.run_notebooks:clean_notebooks",
    ),
    "lessons story": Command(
        "Make a story model like the committed one from a training run.",
        "lib.lessons.start.story:keep",
        prints="{config.output}",
        word="run",
    ),
    "lessons broken-runs": Command(
        "Train the broken runs that notebook 03 shows, and record them.",
        "lib.lessons.training.broken:record_broken_runs",
    ),
    "lessons band": Command(
        "Train notebook 03's run with eight seeds, for the band around the reader's curve.",
        "lib.lessons.training.band:record_band",
    ),
    "lessons ablation": Command(
        "Train the variants of notebook 02's model, three seeds each, for its record.",
        "lib.lessons.model.ablation:run_ablations",
        interrupted=CONTINUES,
    ),
    "lessons llama": Command(
        "Record logits of `transformers` for notebook 03.",
        "lib.lessons.model.llama_record:save_logits",
    ),
    "lessons museum": Command(
        "Train the broken runs of notebook 12's museum, and record their symptoms.",
        "lib.lessons.speedrun.museum:record_museum",
    ),
    "lessons ladder": Command(
        "Measure the versions of attention of notebooks 06 and 07, on a Hopper GPU.",
        "lib.lessons.flash_attention.ladder_record:measure_ladder",
    ),
    "lessons tiles": Command(
        "Measure notebook 06's attention kernel in tiles of many sizes, on a GPU.",
        "lib.lessons.flash_attention.ladder_record:measure_tiles",
    ),
    "race board": Command(
        "Make the committed leaderboard anew from its records.",
        "lib.lessons.speedrun.commands:board",
    ),
    "race check": Command(
        "Check a submission to the leaderboard: its claim, and its sprint once more.",
        "lib.lessons.speedrun.commands:check",
        word="entries",
    ),
    "race ladder": Command(
        "Race every recipe of notebook 12's ladder, three seeds each, for its record.",
        "lib.lessons.speedrun.commands:climb",
        interrupted=CONTINUES,
    ),
    "benchmark headline": Command(
        "Fill the README's table of results from the records.",
        "lib.tools.benchmarks.headline:fill_pages",
    ),
}

GROUPS = {
    "Use: data, training, notebooks": USE,
    "Measure: this machine, and our code beside the best other": MEASURE,
    "Maintain: the workbook's own notebooks and records": MAINTAIN,
}
COMMANDS = USE | MEASURE | MAINTAIN
WIDTH = max(map(len, COMMANDS))


def main(arguments: list[str] | None = None) -> int:
    """Run the command named by `arguments` (default: those of the process); return its exit code.

    Errors that a user can fix are one line and exit code 2, an interruption is 130, a reader that
    has gone (`| head`) 141. `--debug`, or WORKBOOK_DEBUG=1 in the environment, adds the traceback.
    """
    prepare_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    is_debug = "--debug" in arguments or os.environ.get("WORKBOOK_DEBUG", "0") not in ("", "0")
    try:
        try:
            return run_line([word for word in arguments if word != "--debug"], is_debug)
        finally:
            sys.stdout.flush()
    except OSError as error:
        is_gone = reader_is_gone()
        if not is_gone:
            print_error(error, is_debug)
        # Python's last flush would fail, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141 if is_gone else 2


def run_line(arguments: list[str], is_debug: bool) -> int:
    """`main`, to a standard output that takes what is printed."""
    logging.basicConfig(format="%(message)s", handlers=[LogAboveBars()])
    # other libraries only warn
    log.setLevel(logging.INFO)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in HELP:
        print(overview())
        return 0
    if arguments[0] == "--version":
        from lib import __version__

        print(__version__)
        return 0
    if len(arguments) == 2 and arguments[1] in HELP and arguments[0] in groups():
        print(overview(arguments[0]))
        return 0
    try:
        name, flags = find_command(arguments)
        if name == "train" and any(flag.split("=")[0] == "--corpus" for flag in flags):
            # own text: its tokens are made first
            log.info("--corpus: running pipeline, which makes its tokens and then trains")
            name = "pipeline"
        if not COMMANDS[name].on_ranks or "RANK" not in os.environ:
            return run_command(name, flags)
        from lib.ddp.launcher import run_as_rank

        return run_as_rank(
            lambda: run_command(name, flags), lambda error: print_error(error, is_debug)
        )
    except KeyboardInterrupt:
        if is_debug:
            traceback.print_exc()
        return 130
    except (OSError, ValueError, ImportError, FloatingPointError) as error:
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            raise
        print_error(error, is_debug)
        return 2
    except RuntimeError as error:
        from lib.core.allocator import is_out_of_memory
        from lib.ddp.launcher import WorkerError

        if is_debug or not (is_out_of_memory(error) or isinstance(error, WorkerError)):
            raise
        if isinstance(error, WorkerError):
            # its message contains the rank's own traceback
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 1
        print_error(error, is_debug)
        return 2


class LogAboveBars(logging.StreamHandler):
    """Writes log lines to stderr, above tqdm's bars if there are any."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; tqdm has bars only once somebody has loaded it."""
        if "tqdm" not in sys.modules:
            super().emit(record)
            return
        from tqdm import tqdm

        try:
            tqdm.write(self.format(record), file=sys.stderr)
        # as every handler: who logs is not stopped by a terminal that was closed
        except OSError:
            self.handleError(record)


def groups() -> set[str]:
    """The first words of commands of two words that are no commands themselves."""
    return {name.split()[0] for name in COMMANDS if " " in name} - {*COMMANDS}


def overview(group: str = "") -> str:
    """The text of bare `python -m lib`, or of the commands that begin with `group`."""
    shown = {name: each for name, each in COMMANDS.items() if name.startswith(f"{group} ")}
    command = f"{group} COMMAND" if group else "COMMAND"
    lines = [f"usage: python -m lib {command} [--config FILE.json] [--FLAG VALUE ...]"]
    for title, commands in {"": shown}.items() if group else GROUPS.items():
        lines += ["", *([title] if title else [])]
        lines += [f"  {name:{WIDTH}}  {each.help}" for name, each in commands.items()]
    return "\n".join([*lines, "", f"python -m lib {command} --help lists the flags of a command."])


def find_command(arguments: list[str]) -> tuple[str, list[str]]:
    """Split `arguments` into a command's name, of one or two words, and its flags."""
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return name, arguments[words:]
    from lib.core.settings import did_you_mean

    continuations = [name for name in COMMANDS if name.startswith(f"{arguments[0]} ")]
    if continuations:
        raise ValueError(f"{arguments[0]} needs one more word: {', '.join(continuations)}")
    hint = did_you_mean(arguments[0], COMMANDS)
    raise ValueError(f"unknown command {arguments[0]!r}; {hint}known: {', '.join(COMMANDS)}")


def run_command(name: str, flags: list[str]) -> int:
    """Parse the flags of a command, run it, print where its results are; return the exit code."""
    command = COMMANDS[name]
    report = None
    try:
        function = load(command.function)
        # of a benchmark
        report = getattr(function, "report", None)
        cls = config_of(function)
        config = parse(cls or NoConfig, name, flags)
        result = function(config) if cls else function()
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            how = command.interrupted or (CONTINUES if report else STARTS_OVER)
            print(f"\nstopped; {how}", file=sys.stderr, flush=True)
        raise
    prints = command.prints or ("{result}" if isinstance(result, Path) else "")
    if report:
        prints = f"{{config.output}}/{report.name}"
    if prints and result:
        quoted = shlex.quote(str(result))
        results = prints.format(config=config, result=result, quoted=quoted)
        print(results)
        # what is on record beside it, if the repository has a file of that name
        if (PRESETS.parents[1] / "artifacts" / Path(results).name).is_file():
            from lib.tools.benchmarks.headline import on_record

            print(on_record(Path(results)), end="")
    return result if isinstance(result, int) else 0


def load(function: str | Callable) -> Callable:
    """Import what `module:name` names."""
    if callable(function):
        return function
    import importlib

    module, name = function.split(":")
    return getattr(importlib.import_module(module), name)


def config_of(function: Callable) -> type | None:
    """The class of a command's argument `config`; None if it has none."""
    # a benchmark is an object whose cases are made from the config
    function = getattr(function, "cases", function)
    function = inspect.unwrap(function)
    annotation = inspect.get_annotations(function).get("config")
    return function.__globals__[annotation] if isinstance(annotation, str) else annotation


@dataclasses.dataclass(frozen=True)
class NoConfig:
    """There are no settings."""


# Flags


def parse(cls: type[T], command: str, flags: list[str]) -> T:
    """The config `cls` from `--config`, a file or a preset's name, with flags on top."""
    if "RANK" not in os.environ:
        return parse_alone(cls, command, flags)
    from lib.ddp.launcher import parse_as_rank

    return parse_as_rank(lambda: parse_alone(cls, command, flags))


def parse_alone(cls: type[T], command: str, flags: list[str]) -> T:
    """`parse` in this process, whatever happens in others."""
    import argparse

    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--config")
    given, flags = before.parse_known_args(flags)
    default = cls() if given.config is None else read_config(cls, given.config)
    presets = f" or a preset ({', '.join(preset_files())})" if cls.__name__ in PIPELINE else ""
    note = (
        f"--config FILE.json{presets} replaces the defaults below; flags come on top.\n"
        "A flag may omit everything before its last dot. --debug: tracebacks."
    )
    if {*HELP} & {*flags}:
        print(f"usage: python -m lib {command} [FLAGS]\n\n{COMMANDS[command].help}\n\n{note}")
        print(
            f"--help-all: each flag's whole text and its choices.\n\n{short_help(default)}".rstrip()
        )
        if more := [name for name in COMMANDS if name.startswith(f"{command} ")]:
            print(f"\nMore: {', '.join(more)}; each has its own --help.")
        raise SystemExit(0)
    flags = ["--help" if flag == HELP_ALL else flag for flag in flags]
    flags = name_word(flags, COMMANDS[command].word)
    import tyro

    return tyro.cli(
        cls,
        prog=f"python -m lib {command}",
        description=f"{COMMANDS[command].help}\n\n{note}",
        args=[full_flag(cls, flag, command) for flag in flags],
        default=default,
        use_underscores=True,
        registry=number_flags(),
    )


def number_flags() -> Any:
    """tyro's rule for numbers: a word that is none goes to the config, which says what is right."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def number(asked: Any) -> PrimitiveConstructorSpec | None:
        kind = asked.type
        if kind not in (int, float):
            return None

        def read(words: list[str]) -> Any:
            with contextlib.suppress(ValueError):
                return kind(words[0])
            return words[0]

        is_one = lambda value: isinstance(value, (kind, int))  # noqa: E731
        return PrimitiveConstructorSpec(1, kind.__name__.upper(), read, is_one, lambda v: [str(v)])

    return registry


# Configs that a preset, or another file of a whole pipeline, has a part for.
PIPELINE = ("PipelineConfig", "TokenizeConfig", "TrainConfig", "GenerateConfig")


def preset_files() -> dict[str, Path]:
    """The name of each preset -> its file."""
    return {path.stem: path for path in sorted(PRESETS.glob("*.json"))}


def read_config(cls: type[T], name: str) -> T:
    """The config `cls` from the preset or file called `name`, or its part of a pipeline's."""
    from lib.core.settings import from_json

    presets = preset_files() if cls.__name__ in PIPELINE else {}
    path = presets.get(name) or Path(name)
    if not path.exists():
        known = f", and the presets are: {', '.join(presets)}" if presets else ""
        raise FileNotFoundError(f"--config {path}: no such file{known}")
    fields: Any = None
    with contextlib.suppress(ValueError):
        fields = json.loads(path.read_text(encoding="utf-8-sig"))
    parts = [fields.get(part) for part in ("corpus", "train")] if isinstance(fields, dict) else []
    if cls.__name__ not in PIPELINE or not any(isinstance(part, dict) for part in parts):
        return from_json(cls, path)
    from lib.training.config import PipelineConfig

    return from_json(PipelineConfig, path).part(cls)


def name_word(flags: list[str], field: str) -> list[str]:
    """`flags` with the flag of `field` before the words that have none, as in `export DIR`."""
    if not field or f"--{field}" in flags:
        return flags
    words, rest = [], []
    for before, flag in zip(["", *flags], flags):
        is_value = before.startswith("--") and "=" not in before
        (rest if is_value or flag.startswith("-") else words).append(flag)
    return [f"--{field}", *words, *rest] if words else flags


def full_flag(cls: type, flag: str, command: str) -> str:
    """The whole name of a flag, such as `--model.d_model` for `--d_model`.

    If several fields of `cls` and its parts have that name, it is the outermost, so that
    `--vocab_size` is the corpus's and not the model's.

    Raises:
        ValueError: there is no such flag, or several are equally far out; lists them.
    """
    if not flag.startswith("--") or flag in ("--", *HELP) or flag.startswith("--tyro"):
        return flag
    name, *value = flag[2:].split("=", 1)
    *parents, last = name.replace("-", "_").split(".")
    no = "no_" if last.startswith("no_") else ""
    found = field_paths(cls)
    paths = found.get(last.removeprefix("no_"), [])
    if parents:
        paths = [path for path in paths if path.split(".")[:-1] == parents]
    if not paths:
        raise ValueError(f"{command} has no flag --{name}; {hint_for(name, found, cls)}")
    outermost = min(path.count(".") for path in paths)
    paths = [path for path in paths if path.count(".") == outermost]
    if len(paths) > 1:
        raise ValueError(f"{flag} can be {' or '.join(f'--{path}' for path in paths)}; name one")
    *parents, last = paths[0].split(".")
    return "=".join(["--" + ".".join([*parents, no + last]), *value])


def hint_for(name: str, found: dict[str, list[str]], cls: type) -> str:
    """Suggest a flag for an unknown `name`, from `field_paths` of `cls`, or say who has it."""
    meant = suggestion(name, found)
    owners = ", ".join(owners_of(name, cls))
    hints = [f"did you mean --{meant}?"] if meant else []
    hints += [f"{owners} {'have' if ',' in owners else 'has'} it"] if owners else []
    return "; ".join(hints) or f"it has {', '.join(f'--{each}' for each in found) or 'none'}"


def owners_of(name: str, cls: type) -> list[str]:
    """The commands that have a flag called `name`: of the pipeline's steps, or benchmarks."""
    if cls.__name__ in PIPELINE:
        near = ["pipeline", "tokenize", "train", "generate"]
    else:
        near = [command for command in MEASURE if command.startswith("benchmark")]
    configs = {command: config_of(load(COMMANDS[command].function)) for command in near}
    return [command for command in near if name in field_paths(configs[command] or NoConfig)]


# Errors


def print_error(error: Exception, is_debug: bool) -> None:
    """Print `error` in one line, after its traceback if `is_debug`."""
    if is_debug:
        traceback.print_exc()
    print(f"error: {one_line(error)}{where_to_run(error)}", file=sys.stderr, flush=True)


def where_to_run(error: Exception) -> str:
    """The command to run instead, for an `error` of a Python that lacks the workbook's packages."""
    import importlib.util

    needed = ("lazy_loader", "torch", "tqdm", "nbformat", "pydantic", "tyro")
    if not isinstance(error, ModuleNotFoundError) or all(map(importlib.util.find_spec, needed)):
        return ""
    python = ".venv\\Scripts\\python" if os.name == "nt" else ".venv/bin/python"
    first = "" if (PRESETS.parents[1] / python).exists() else "`make run` installs them; then "
    words = shlex.join(sys.argv[1:])
    return f". {sys.executable} lacks the workbook's packages: {first}run {python} -m lib {words}"


if __name__ == "__main__":
    sys.exit(main())
