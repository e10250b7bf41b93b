"""The command line: commands are found, configs parsed, errors fit on one line."""

import dataclasses
import errno
import importlib.util
import inspect
import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import lib
from lib import __main__ as command_line
from lib.__main__ import COMMANDS, Command, config_of, load, main, parse
from lib.core.flags import SYNONYMS
from lib.core.settings import from_json, to_json
from lib.data.prepare import TokenizeConfig
from lib.training.commands import BOLD, PLAIN, exit_code
from lib.training.config import GenerateConfig, PipelineConfig, TrainConfig
from tests.training.runs import small_pipeline

ROOT = Path(command_line.__file__).parents[1]


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "lib", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def command(monkeypatch):
    """Add a command that calls a function; its name is `try`, its flags are `train`'s."""

    def add(function, name="try", **options):
        def call(config: TrainConfig):
            return function(config)

        monkeypatch.setitem(COMMANDS, name, Command("Try it.", call, **options))

    return add


def raising(error):
    def function(config):
        raise error

    return function


# Streams


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        # encodings that lack what is printed, of a terminal's or of a file's
        ("PYTHONIOENCODING=cp1252 python benchmark --help", 0, "\\u2713 ×"),
        ("PYTHONIOENCODING=ascii:strict python nonsense", 2, "unknown command 'nonsense\\u2713'"),
        ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 python benchmark --help", 0, "\\u2713 \\xd7"),
        # of the processes that it starts
        ("PYTHONIOENCODING=cp1252 python started", 0, "\\u2713 child"),
        # streams that are full, or that nobody reads
        ("python benchmark --help >/dev/full", 2, "error: No space left on device\n"),
        ("set -o pipefail; python long | head -1", 141, "line 0\n"),
        ("set -o pipefail; python train --help | true", 141, ""),
        # another pipe is an error like any other
        ("python broken", 2, "error: Broken pipe\n"),
    ],
)
def test_any_standard_stream_takes_any_text(tmp_path, redirection, code, said):
    program = tmp_path / "program.py"
    program.write_text(
        f"""\
import subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from lib import __main__ as command_line
def started():
    print("parent", flush=True)
    subprocess.run([sys.executable, "-c", "print('\\u2713 child')"], check=True)
def long():
    for number in range(100_000):
        print("line", number)
def broken():
    raise BrokenPipeError(32, "Broken pipe")
command_line.COMMANDS["benchmark x"] = command_line.Command("\u2713 \u00d7", print)
for function in (started, long, broken):
    command_line.COMMANDS[function.__name__] = command_line.Command("", function)
words = [word.replace("nonsense", "nonsense\u2713") for word in sys.argv[1:]]
sys.exit(command_line.main(words))
""",
        encoding="utf-8",
    )
    line = redirection.replace("python", f"'{sys.executable}' '{program}'")
    environment = {name: text for name, text in os.environ.items() if name[:4] != "LC_A"}
    environment.pop("PYTHONIOENCODING", None)
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True)
    output = (done.stdout + done.stderr).decode("cp1252" if "cp1252" in line else "utf-8")
    assert done.returncode == code, output
    assert said in output
    assert "Traceback" not in output
    assert "Exception ignored" not in output
    if not said:
        assert not output


# Commands


@pytest.mark.parametrize("arguments", [[], ["-h"], ["help"]])
def test_help_has_every_command_in_one_of_three_groups(arguments, capsys):
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^  ([a-z-]+(?: [a-z-]+)?)  ", shown, re.MULTILINE) == list(COMMANDS)
    assert re.findall(r"^(\w+): ", shown, re.MULTILINE) == ["usage", "Use", "Measure", "Maintain"]


@pytest.mark.parametrize(
    ("group", "line"), [("benchmark", "benchmark --help"), ("lessons", "help lessons")]
)
def test_help_of_a_first_word_lists_its_commands(group, line, capsys):
    assert main(line.split()) == 0
    output = capsys.readouterr().out
    listed = [line.split("  ")[1] for line in output.splitlines() if line.startswith("  ")]
    assert listed == [name for name in COMMANDS if name.startswith(f"{group} ")]
    assert f"python -m lib {group} COMMAND --help" in output


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{lib.__version__}\n"


def test_threads_do_not_spin_for_long_beside_other_programs():
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    code = "import lib.__main__, os; print(os.environ['GOMP_SPINCOUNT'])"
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, env=environment, text=True) == "1000\n"


def test_every_tool_that_a_page_names_is_a_command():
    pages = [*ROOT.glob("*.md"), *ROOT.glob(".github/*.md"), *ROOT.glob("artifacts/**/*.md")]
    pages.append(ROOT / "artifacts/tiny_stories/record.json")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert not re.findall(r"python -m lib\.[\w.]+", text)
    named = {*re.findall(r"python -m lib ([a-z]+(?: [a-z][a-z-]*)?)", text)}
    first_words = {name.split()[0] for name in COMMANDS}
    assert {name for name in named if name.split()[0] not in first_words} == set()
    assert {"pipeline", "kaggle build", "lessons museum"} <= named


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_function_of_its_config(name):
    each = COMMANDS[name]
    function = load(each.function)
    cls = config_of(function)
    # without one it is called without arguments
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    assert [p.name for p in needed] in ([], ["config"])
    values = {"config": cls and cls(), "result": "RESULT", "quoted": "RESULT"}
    assert not each.prints or "{" not in each.prints.format(**values)


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [([], "dataclasses"), (["tokenize", "--help"], "torch"), (["train", "--help"], "torch")],
)
def test_help_loads_nothing_that_takes_time(arguments, limit):
    heavy = ["torch", "numba", "matplotlib"] + ["numpy", "tyro"] * (limit != "torch")
    code = (
        "import sys; from lib.__main__ import main\n"
        f"try: main({arguments})\n"
        "except SystemExit: pass\n"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    output = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert output.splitlines()[-1] == "[]"


def test_a_command_of_two_words_gets_the_flags_behind_them(command):
    seen = []
    command(lambda config: seen.append(config.steps) or 7, "benchmark this")
    assert main(["benchmark", "this", "--steps", "300"]) == 7
    assert seen == [300]


@pytest.mark.parametrize(
    ("result", "code", "printed"),
    [("x", 0, "artifacts/runs: x\n"), (None, 0, ""), (3, 3, ""), (Path("y/z"), 0, "y/z\n")],
)
def test_what_a_command_returns_decides_what_is_printed_and_the_exit_code(
    command, capsys, result, code, printed
):
    prints = "{config.runs_dir}: {result}" if result in ("x", None) else ""
    command(lambda config: result, prints=prints)
    assert main(["try"]) == code
    assert capsys.readouterr().out == printed


# Flags


def test_flags_are_the_names_of_the_fields_on_top_of_a_config_file_or_preset(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"vocab_size": 300, "seed": 5, "special_tokens": ["<a>", "<b>"]}))
    flags = ["--seed", "6", "--config", str(path), "--output", "x", "--workers", "2"]
    assert parse(TokenizeConfig, "tokenize", flags) == TokenizeConfig(
        vocab_size=300, seed=6, special_tokens=("<a>", "<b>"), output=Path("x"), workers=2
    )
    preset = from_json(PipelineConfig, command_line.PRESETS / "tiny.json")
    assert parse(PipelineConfig, "pipeline", ["--config=tiny"]) == preset
    changed = parse(PipelineConfig, "pipeline", ["--config", "tiny", "--steps", "60"])
    assert (changed.train.steps, changed.train.model) == (60, preset.train.model)


def test_a_preset_serves_the_steps_of_the_pipeline_too(tmp_path):
    preset = from_json(PipelineConfig, command_line.PRESETS / "tiny.json")
    assert parse(TokenizeConfig, "tokenize", ["--config", "tiny"]) == preset.corpus
    training = parse(TrainConfig, "train", ["--config", "tiny", "--steps", "5"])
    data = Path("data/stories-4096")
    assert training == dataclasses.replace(preset.train, steps=5, data=data)
    assert training.effective_warmup_steps == 0
    assert parse(GenerateConfig, "generate", ["--config", "tiny"]).sample == preset.sample
    # and so does a file of a pipeline; one of the step alone still does
    path = tmp_path / "mine.json"
    path.write_text('{"train": {"steps": 7, "data": "here"}}')
    assert parse(TrainConfig, "train", ["--config", str(path)]) == TrainConfig(
        steps=7, data=Path("here")
    )
    path.write_text('{"corpus": "book.txt"}')
    assert parse(TokenizeConfig, "tokenize", ["--config", str(path)]).corpus == "book.txt"


def test_help_names_each_flag_in_sixty_lines_and_help_all_has_the_rest(capsys):
    for name, command in COMMANDS.items():
        cls = config_of(load(command.function))
        with pytest.raises(SystemExit) as caught:
            parse(cls or command_line.NoConfig, name, ["-h"])
        assert caught.value.code == 0
        shown = capsys.readouterr().out
        assert shown.count("\n") <= 60, name
        assert command.help in shown
        for flag in command_line.field_paths(cls or command_line.NoConfig):
            assert re.search(rf"--(\[no_\])?{flag}\b", shown), (name, flag)
        more = [other for other in COMMANDS if other.startswith(f"{name} ")]
        assert f"More: {', '.join(more)};" in shown or not more
    with pytest.raises(SystemExit):
        parse(TrainConfig, "train", ["--config", "tiny", "--help"])
    assert "  --steps 400                      Total optimizer steps." in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parse(TrainConfig, "train", ["--help-all"])
    output = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for shown in ("--steps INT Total optimizer steps.", "torch_ddp,fsdp,fsdp2}", "(default: 1000)"):
        assert shown in output


def test_a_flag_that_is_suggested_is_one_of_a_command():
    configs = [config_of(load(command.function)) for command in COMMANDS.values()]
    known = {flag for cls in configs if cls for flag in command_line.field_paths(cls)}
    assert {words[0] for words in SYNONYMS} <= known


def test_train_takes_a_text_of_one_s_own_as_the_pipeline_does(tmp_path, capsys, monkeypatch):
    ran = []
    monkeypatch.setattr(command_line, "run_command", lambda *what: ran.append(what) or 0)
    assert main(["train", "--config=tiny", "--corpus", "my.txt"]) == 0
    assert main(["train", "--data", "corpus"]) == 0
    assert [name for name, _ in ran] == ["pipeline", "train"]


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        (["--d_model", "64"], "train.model.d_model", 64),
        (["--d-model=64"], "train.model.d_model", 64),
        (["--attention_kernel", "vectorized_torch"], "train.model.attention_kernel", None),
        (["--no-resume"], "train.resume", False),
        (["--train.model.vocab_size", "4100"], "train.model.vocab_size", 4100),
        # of several fields the outermost
        (["--vocab_size", "300"], "corpus.vocab_size", 300),
        (["--corpus", "book.txt"], "corpus.corpus", "book.txt"),
        (["--prompts", "Now", "Then"], "sample.prompts", ("Now", "Then")),
    ],
)
def test_a_flag_needs_no_more_of_its_path_than_tells_it_apart(flags, path, value):
    config = parse(PipelineConfig, "pipeline", flags)
    changed = {
        name: new for name, new in leaves(config).items() if leaves(PipelineConfig())[name] != new
    }
    assert changed == {path: flags[1] if value is None else value}


def leaves(config, prefix=""):
    """Each value of a config and those in it by its name with dots."""
    values = {}
    for name, value in vars(config).items():
        is_config = hasattr(value, "__dataclass_fields__")
        values |= leaves(value, f"{prefix}{name}.") if is_config else {prefix + name: value}
    return values


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--corpus.vocab_size", "many"], 'vocab_size must be a whole number, got "many"'),
        (["--train.steps", "1.5"], 'steps must be a whole number, got "1.5"'),
        (["--top_p", "half"], 'top_p must be a number, got "half"'),
        (["--train.bucket_size_mb", "0"], "bucket_size_mb must be more than 0, got 0"),
        (["--d_model", "30", "--num_heads", "4"], "num_heads"),
    ],
)
def test_wrong_flags_are_named(flags, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(PipelineConfig, "pipeline", flags)
    assert caught.value.code == 2
    # without the frame
    shown = " ".join("".join(capsys.readouterr()).replace("│", "").split())
    assert message in shown


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --step 50", "train has no flag --step; did you mean --steps?"),
        ("train --model.d_modell=3", "did you mean --model.d_model?"),
        ("train --validation_fraction=1", "pipeline, tokenize have it"),
        ("generate --run X", "generate has no flag --run; did you mean --checkpoint?"),
        ("benchmark attention --context_lengths 64", "did you mean --custom_tiers?"),
        ("benchmark attention --sizes_mb 2", "benchmark communication, benchmark scaling have it"),
        ("generate --xyz", "generate has no flag --xyz; it has --checkpoint, --prompts, "),
        ("notebooks clean --force", "notebooks clean has no flag --force; it has none"),
        ("pipeline --seed=3", "can be --corpus.seed or --train.seed or --sample.seed; name one\n"),
        ("tokenise", "unknown command 'tokenise'; did you mean 'tokenize'? known: pipeline, "),
        ("benchmark those", "benchmark needs one more word: benchmark tokenizer, "),
        ("pipeline --config tinny", "tinny: no such file, and the presets are: shakespeare, "),
        ("profile --config tiny", "error: --config tiny: no such file\n"),
    ],
)
def test_what_is_unknown_is_refused_with_what_was_meant(line, said, capsys):
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error


# Errors and exit codes


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x.txt"), "x.txt: No such"),
        (FileNotFoundError("place x here"), "place x here"),
        (ValueError("a\n  b"), "a b"),
        (ValueError(), "ValueError"),
    ],
)
def test_errors_that_a_user_can_fix_are_one_line_and_exit_code_2(
    command, error, line, capsys, monkeypatch
):
    command(raising(error))
    assert main(["try"]) == 2
    output = capsys.readouterr().err
    assert output.startswith(f"error: {line}")
    assert output.count("\n") == 1
    # or where it came from, if asked for
    assert main(["try", "--debug"]) == 2
    monkeypatch.setenv("WORKBOOK_DEBUG", "1")
    assert main(["try"]) == 2
    assert capsys.readouterr().err.count("Traceback") == 2


def test_a_python_without_the_packages_is_told_which_one_has_them(tmp_path, monkeypatch):
    # -S: without installed packages
    command = [sys.executable, "-S", "-m", "lib", "train", "--config", "my file.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"No module named 'lazy_loader'. {sys.executable} lacks the workbook's" in done.stderr
    assert done.stderr.endswith("run .venv/bin/python -m lib train --config 'my file.json'\n")
    # before there is an environment; nothing of packages that are extras
    monkeypatch.setattr(command_line, "PRESETS", tmp_path / "lib/presets")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = command_line.where_to_run(ModuleNotFoundError(name="torch"))
    assert "`make run` installs them; then run" in said
    monkeypatch.undo()
    assert command_line.where_to_run(ModuleNotFoundError(name="gigatoken")) == ""


def test_errors_of_the_program_keep_their_traceback(command):
    for error in (KeyError("bug"), RuntimeError("bug")):
        command(raising(error))
        with pytest.raises(type(error)):
            main(["try"])


def test_an_interruption_says_how_to_go_on_and_is_exit_code_130(command, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    command(raising(KeyboardInterrupt()), interrupted="go on so")
    assert main(["try"]) == 130
    assert capsys.readouterr().err == "\nstopped; go on so\n"
    # once, and not by each rank
    monkeypatch.setenv("RANK", "1")
    assert main(["try"]) == 130
    assert capsys.readouterr().err == ""


def test_what_other_libraries_only_note_is_not_printed():
    code = "import logging; from lib.__main__ import main; main(['--version']); "
    code += "logging.getLogger('torch').info('a note'); logging.getLogger('lib.x').info('ours')"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stderr == "ours\n"


def test_log_lines_are_above_the_bars_and_not_in_them(monkeypatch):
    from tqdm import tqdm

    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = command_line.LogAboveBars()
    with tqdm(total=2, bar_format="bar {n}") as bar:
        bar.update()
        handler.handle(logging.makeLogRecord({"msg": "a line of the log"}))
    # of each line, what is left when everything was written over
    lines = [line.split("\r")[-1].strip() for line in terminal.getvalue().split("\n")]
    assert lines == ["a line of the log", "bar 1", ""]


def test_who_logs_is_not_stopped_by_a_terminal_that_was_closed(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1, closefd=False) as closed:
        monkeypatch.setattr(sys, "stderr", closed)
        command_line.LogAboveBars().handle(logging.makeLogRecord({"msg": "a line"}))
        # what is left in it must not be written at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)


def test_an_orderly_stop_is_no_failure_to_torchrun(monkeypatch):
    stopped, done = SimpleNamespace(status="stopped"), SimpleNamespace(status="done")
    monkeypatch.delenv("RANK", raising=False)
    assert (exit_code(stopped), exit_code(done)) == (130, 0)
    monkeypatch.setenv("RANK", "1")
    assert (exit_code(stopped), exit_code(done)) == (0, 0)


def test_generate_without_a_run_says_how_to_make_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["generate"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no training run in artifacts")
    assert "python -m lib pipeline" in error
    assert error.count("\n") == 1


# Commands that print more than a file's name


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A pipeline of a moment: its config in a file, and what the command printed."""
    folder = tmp_path_factory.mktemp("trained")
    config = small_pipeline(folder, "The cat", "A dog", output=folder / "run")
    (folder / "config.json").write_text(to_json(config))
    done = run("pipeline", "--config", folder / "config.json")
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_pipeline_prints_what_it_made_and_a_sample(trained, capsys):
    folder, output = trained
    table, _, sample = output.partition("finished at step 8")
    steps = [line.split()[1] for line in table.splitlines()[2:]]
    assert steps == ["tokenizer", "train", "validation"]
    first, second, *texts = sample.splitlines()
    assert first == f": {folder / 'run'}"
    assert second.startswith("validation loss 5.")
    assert second.endswith(" bits per byte")
    assert texts[:2] == ["", next(text for text in texts if text.startswith("The cat"))]
    assert "\n\nA dog" in sample
    # `train` prints the same of the run that is done
    (folder / "train.json").write_text(
        to_json(from_json(PipelineConfig, folder / "config.json").train)
    )
    flags = ["--config", str(folder / "train.json"), "--data", str(folder / "out")]
    assert main(["train", *flags]) == 0
    assert capsys.readouterr().out == f"up to date at step 8{first}\n{second}\n"


def test_generate_writes_whole_texts_into_a_pipe(trained):
    folder, output = trained
    flags = ["--checkpoint", folder / "run", "--max_new_tokens", 6, "--device", "cpu"]
    done = run("generate", *flags, "--prompts", "The cat", "A dog")
    assert done.returncode == 0, done.stderr
    # the sample that the pipeline drew, with the same seed
    assert output.endswith("\n\n" + done.stdout)
    assert done.stdout.startswith("The cat")


def test_generate_streams_one_text_to_a_terminal_only(trained, monkeypatch, capsys):
    flags = ["--checkpoint", str(trained[0] / "run"), "--max_new_tokens", "8", "--device", "cpu"]
    outputs, counts = [], []
    for is_terminal in (True, False):
        pieces, write = [], sys.stdout.write
        with monkeypatch.context() as patch:
            patch.setattr(sys.stdout, "write", lambda text: pieces.append(text) or write(text))  # noqa: B023
            patch.setattr(sys.stdout, "isatty", lambda: is_terminal)  # noqa: B023
            assert main(["generate", *flags, "--prompts", "The cat", "--top_k", "1"]) == 0
        outputs.append(capsys.readouterr().out)
        counts.append(len(pieces))
    assert outputs[0].startswith(f"{BOLD}The cat{PLAIN}")
    assert outputs[0].replace(BOLD, "").replace(PLAIN, "").split() == outputs[1].split()
    assert outputs[1].startswith("The cat")
    assert counts[0] > 3 > counts[1]
