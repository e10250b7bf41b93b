"""The command line: commands found, configs parsed, errors in one line."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lib import __main__ as command_line
from lib.__main__ import exit_code, main, one_line, parse
from lib.config import AttentionBenchmarkConfig, StepBenchmarkConfig, TokenizeConfig
from lib.config_training import GenerateConfig, PipelineConfig, TrainConfig
from lib.strict_json import from_json, to_json

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
    """Adds a command that does what its function tells; the name is `try`."""

    def add(function, name="try"):
        function.__doc__ = "Try something."
        monkeypatch.setitem(command_line.COMMANDS, name, function)

    return add


def raising(error):
    def function(arguments):
        raise error

    return function


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(arguments, capsys):
    assert main(arguments) == 0
    output = capsys.readouterr().out
    for name, function in command_line.COMMANDS.items():
        assert f"{name} " in output
        assert function.__doc__ in output


def test_help_loads_nothing_that_takes_time():
    code = (
        "import sys; from lib.__main__ import main; main([]);"
        "print([m for m in ('torch', 'numpy', 'numba', 'matplotlib', 'tyro') if m in sys.modules])"
    )
    output = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert output.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", ["tokenize", "pipeline"])
def test_flags_of_a_command_load_neither_torch_nor_numba(name):
    code = (
        "import sys; from lib.__main__ import main\n"
        f"try: main(['{name}', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'numba', 'matplotlib') if m in sys.modules])"
    )
    output = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert output.splitlines()[-1] == "[]"


def test_unknown_command_is_refused_with_the_known_ones():
    done = run("tokenise")
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown command 'tokenise'; did you mean 'tokenize'?")
    known = (
        "pipeline, tokenize, train, generate, run, benchmark tokenizer, benchmark training, "
        "benchmark step, benchmark attention, benchmark communication, benchmark lm-matrix, "
        "benchmark sharding, benchmark repeat, profile, kaggle build, kaggle push"
    )
    assert f"known: {known}\n" in done.stderr


def test_commands_of_two_words_get_the_arguments_behind_them(command):
    seen = []
    command(lambda arguments: seen.append(arguments) or 0, "benchmark this")
    command(lambda arguments: 7, "benchmark that")
    assert main(["benchmark", "this", "--flag", "3"]) == 0
    assert seen == [["--flag", "3"]]
    assert main(["benchmark", "that"]) == 7


def test_half_a_command_lists_how_it_can_go_on(command, capsys):
    command(lambda arguments: 0, "benchmark this")
    assert main(["benchmark", "those"]) == 2
    message = capsys.readouterr().err
    assert "benchmark needs one more word: " in message
    assert "benchmark this" in message


def test_flags_come_on_top_of_the_config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"vocab_size": 300, "seed": 5, "special_tokens": ["<a>", "<b>"]}))
    config = parse(TokenizeConfig, "tokenize", ["--seed", "6", "--config", str(path)])
    assert config == TokenizeConfig(vocab_size=300, seed=6, special_tokens=("<a>", "<b>"))
    assert parse(TokenizeConfig, "tokenize", [f"--config={path}"]).seed == 5


def test_flags_are_the_names_of_the_fields():
    arguments = [
        "--vocab_size",
        "512",
        "--special_tokens",
        "<a>",
        "--output",
        "x",
        "--workers",
        "2",
    ]
    config = parse(TokenizeConfig, "tokenize", arguments)
    assert config == TokenizeConfig(
        vocab_size=512, special_tokens=("<a>",), output=Path("x"), workers=2
    )


def test_help_of_a_command_shows_each_field_with_its_note(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(TokenizeConfig, "tokenize", ["--help"])
    assert caught.value.code == 0
    output = capsys.readouterr().out
    assert "--vocab_size INT" in output
    assert "Number of token ids" in output
    assert "--config FILE.json" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vocab_size", "3"], "vocab_size is 3"),
        (["--vocab_size", "many"], "--vocab_size"),
        (["--vocab_sise", "300"], "--vocab_size"),
        (["--implementation", "best"], "best"),
    ],
)
def test_wrong_flags_are_named(flags, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(TokenizeConfig, "tokenize", flags)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.out + captured.err


def test_wrong_config_file_is_one_line(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text('{"vocab_sise": 3}')
    assert main(["tokenize", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: unknown key 'vocab_sise'; did you mean 'vocab_size'?")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x.txt"), "x.txt: No such"),
        (FileNotFoundError("place x here"), "place x here"),
        (OSError(errno.ENOSPC, "no space left to write x"), "no space left to write x"),
        (ValueError("a\n  b"), "a b"),
        (ValueError(), "ValueError"),
    ],
)
def test_errors_that_a_user_can_mend_are_one_line_and_exit_code_2(command, error, line, capsys):
    command(raising(error))
    assert main(["try"]) == 2
    output = capsys.readouterr().err
    assert output.startswith(f"error: {line}")
    assert output.count("\n") == 1
    assert one_line(error) in output


def test_errors_of_the_program_keep_their_traceback(command):
    command(raising(KeyError("bug")))
    with pytest.raises(KeyError):
        main(["try"])


def test_debug_shows_where_an_error_came_from(command, monkeypatch, capsys):
    command(raising(ValueError("wrong")))
    assert main(["try", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("WORKBOOK_DEBUG", "1")
    assert main(["try"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_interruption_is_quiet_and_exit_code_130(command, capsys):
    command(raising(KeyboardInterrupt()))
    assert main(["try"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_run_passes_on_what_was_asked_for_and_its_exit_code(monkeypatch):
    import lib.notebook

    seen = {}

    def run_notebooks(notebooks, **options):
        seen.update(options, notebooks=notebooks)
        return 1

    monkeypatch.setattr(lib.notebook, "run_notebooks", run_notebooks)
    assert main(["run", "--notebooks", "01", "02", "--parameters", "laptop"]) == 1
    assert seen == {
        "notebooks": ("01", "02"),
        "parameters": "laptop",
        "report": None,
        "workers": None,
    }


def test_profile_passes_on_what_was_asked_for(monkeypatch):
    import lib.profile_run

    seen = []
    monkeypatch.setattr(lib.profile_run, "profile", seen.append)
    assert main(["profile", "--model", "small", "--steps", "2", "--no_memory"]) == 0
    assert [(config.model, config.steps, config.memory) for config in seen] == [("small", 2, False)]


def test_step_benchmark_takes_several_of_each_size():
    flags = ["--configs", "small", "medium", "--seq_lens", "128", "256", "--modes", "forward"]
    flags += ["--attention_kernel", "sdpa", "vectorized_torch", "--compare_precision", "--tf32"]
    flags += ["--compile", "--nvtx", "--memory_profile", "--output_json", "records.jsonl"]
    config = parse(StepBenchmarkConfig, "benchmark step", flags)
    assert config == StepBenchmarkConfig(
        configs=("small", "medium"),
        seq_lens=(128, 256),
        modes=("forward",),
        attention_kernel=("sdpa", "vectorized_torch"),
        compare_precision=True,
        tf32=True,
        compile=True,
        nvtx=True,
        memory_profile=True,
        output_json=Path("records.jsonl"),
    )


def test_attention_benchmark_takes_lengths_kernels_and_masks():
    flags = ["--custom_tiers", "128:128", "64:1024", "--kernels", "sdpa", "sdpa_cudnn"]
    flags += ["--masks", "full", "--head_dims", "64", "128", "--backward", "--targets"]
    flags += ["--warmup", "1", "--iters", "5", "--batch_size", "2", "--heads", "3"]
    config = parse(AttentionBenchmarkConfig, "benchmark attention", flags)
    assert config == AttentionBenchmarkConfig(
        custom_tiers=("128:128", "64:1024"),
        kernels=("sdpa", "sdpa_cudnn"),
        masks=("full",),
        head_dims=(64, 128),
        backward=True,
        targets=True,
        warmup=1,
        iters=5,
        batch_size=2,
        heads=3,
    )


def test_an_unknown_mode_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(StepBenchmarkConfig, "benchmark step", ["--modes", "backward"])
    assert caught.value.code == 2
    output = "".join(capsys.readouterr())
    assert all(name in output for name in ("forward", "forward_backward", "full_step"))


def test_tokenize_turns_a_text_into_arrays_and_prints_a_table(tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("the cat sat on the mat.\n\n<|endoftext|>\n" * 200)
    flags = [
        "--corpus",
        text,
        "--vocab_size",
        270,
        "--data_dir",
        tmp_path,
        "--output",
        tmp_path / "o",
    ]
    done = run("tokenize", *flags)
    assert done.returncode == 0, done.stderr
    heading, rule, *rows = [line.split() for line in done.stdout.splitlines()]
    assert (heading[1], rule[0]) == ("step", "|")
    assert [row[1] for row in rows] == ["tokenizer", "train", "validation"]
    assert (tmp_path / "o" / "train.npy").exists()


def test_tokenize_names_a_missing_text(tmp_path):
    done = run("tokenize", "--corpus", tmp_path / "none.txt", "--data_dir", tmp_path)
    assert done.returncode == 2
    assert "none.txt" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        (["--d_model", "64"], "train.model.d_model", 64),
        (["--d_model=64"], "train.model.d_model", 64),
        (["--attention_kernel", "vectorized_torch"], "train.model.attention_kernel", None),
        (["--no_resume"], "train.resume", False),
        (["--compile"], "train.compile", True),
        (["--train.seed", "3"], "train.seed", 3),
        (["--train.model.vocab_size", "4100"], "train.model.vocab_size", 4100),
        (["--corpus", "book.txt"], "corpus.corpus", "book.txt"),
        (["--learning_rate", "0.5"], "train.optimizer.learning_rate", 0.5),
        (["--prompts", "Now", "Then"], "sample.prompts", ("Now", "Then")),
        (["--data", "tokens"], "train.data", Path("tokens")),
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
    ("flag", "names"),
    [
        ("--seed", "--corpus.seed or --train.seed or --sample.seed"),
        ("--seed=3", "--corpus.seed or --train.seed or --sample.seed"),
        ("--output", "--corpus.output or --train.output"),
    ],
)
def test_a_flag_that_can_be_several_is_refused_with_all_of_them(flag, names, capsys):
    assert main(["pipeline", flag, "3"]) == 2
    assert capsys.readouterr().err == f"error: {flag} can be {names}; name one\n"


def test_of_several_fields_a_flag_means_the_outermost():
    config = parse(PipelineConfig, "pipeline", ["--vocab_size", "300"])
    assert (config.corpus.vocab_size, config.train.model.vocab_size) == (300, None)


def test_a_flag_that_is_one_in_this_command_is_taken():
    assert parse(TrainConfig, "train", ["--seed", "3", "--vocab_size", "300"]).seed == 3
    config = parse(GenerateConfig, "generate", ["--top_p", "0.5", "--checkpoint", "x"])
    assert (config.sample.top_p, config.checkpoint) == (0.5, Path("x"))


def test_wrong_values_of_parts_are_named(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(PipelineConfig, "pipeline", ["--d_model", "30", "--num_heads", "4"])
    assert caught.value.code == 2
    output = " ".join("".join(capsys.readouterr()).replace("│", " ").split())
    assert "d_model 30 is not divisible by num_heads 4" in output


def test_a_preset_is_known_by_its_name_and_flags_come_on_top():
    preset = from_json(PipelineConfig, command_line.PRESETS / "tiny.json")
    assert parse(PipelineConfig, "pipeline", ["--config", "tiny"]) == preset
    changed = parse(PipelineConfig, "pipeline", ["--config", "tiny", "--steps", "60"])
    assert changed.train.steps == 60
    assert changed.train.model == preset.train.model
    path = str(command_line.PRESETS / "tiny.json")
    assert parse(PipelineConfig, "pipeline", ["--config", path]) == preset


def test_a_config_that_is_no_preset_and_no_file_is_named(capsys):
    assert main(["pipeline", "--config", "tinny"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: --config tinny: no such file")
    assert "shakespeare, tiny, tinystories" in message


def test_flags_may_have_hyphens():
    config = parse(PipelineConfig, "pipeline", ["--d-model", "64", "--no-resume"])
    assert config.train.model.d_model == 64
    assert not config.train.resume


def test_generate_without_a_run_says_how_to_make_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["generate"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no training run in artifacts")
    assert "python -m lib pipeline" in error
    assert error.count("\n") == 1


def test_generate_names_a_folder_without_a_run(tmp_path, capsys):
    assert main(["generate", "--checkpoint", str(tmp_path)]) == 2
    assert f"no config.json in {tmp_path}" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A pipeline of a moment: its config in a file, and what the command said."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "book.txt").write_text("The cat sat on the mat.\n\n<|endoftext|>\n" * 300)
    fields = {
        "corpus": {
            "corpus": str(folder / "book.txt"),
            "vocab_size": 280,
            "data_dir": str(folder),
            "output": str(folder / "tokens"),
        },
        "train": {
            "model": {
                "context_length": 8,
                "d_model": 16,
                "num_layers": 1,
                "num_heads": 2,
                "d_ff": 32,
            },
            "optimizer": {"warmup_steps": 2},
            "output": str(folder / "run"),
            "steps": 10,
            "batch_size": 2,
            "device": "cpu",
        },
        "sample": {"prompts": ["The cat", "A dog"], "max_new_tokens": 8},
    }
    (folder / "config.json").write_text(json.dumps(fields))
    done = run("pipeline", "--config", folder / "config.json")
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_pipeline_prints_what_it_made_and_a_sample(trained):
    folder, output = trained
    table, _, sample = output.partition("finished at step 10")
    assert [line.split()[1] for line in table.splitlines()[2:]] == [
        "tokenizer",
        "train",
        "validation",
    ]
    first, second, *texts = sample.splitlines()
    assert first == f": {folder / 'run'}"
    assert second.startswith("validation loss 5.")
    assert second.endswith(" bits per byte")
    assert texts[:2] == ["", next(text for text in texts if text.startswith("The cat"))]
    assert "\n\nA dog" in sample


def test_train_is_up_to_date_where_the_pipeline_trained(trained):
    folder, _ = trained
    config = from_json(PipelineConfig, folder / "config.json").train
    (folder / "train.json").write_text(to_json(config))
    done = run("train", "--config", folder / "train.json", "--data", folder / "tokens")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"up to date at step 10: {folder / 'run'}\nvalidation loss ")


def test_generate_writes_whole_texts_into_a_pipe(trained):
    folder, output = trained
    flags = ["--checkpoint", folder / "run", "--max_new_tokens", 8, "--device", "cpu"]
    done = run("generate", *flags, "--prompts", "The cat", "A dog")
    assert done.returncode == 0, done.stderr
    # the sample that the pipeline drew, with the same seed
    assert output.endswith("\n\n" + done.stdout)
    assert done.stdout.startswith("The cat")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_generate_streams_one_text_to_a_terminal_only(trained, is_terminal, monkeypatch, capsys):
    import builtins

    pieces = []
    plain = builtins.print
    monkeypatch.setattr(
        builtins, "print", lambda *a, **k: pieces.append(a) or plain(*a, **k), raising=True
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    flags = ["--checkpoint", str(trained[0] / "run"), "--max_new_tokens", "8", "--device", "cpu"]
    assert main(["generate", *flags, "--prompts", "The cat", "--top_k", "1"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("The cat")
    assert output.endswith("\n")
    assert (len(pieces) > 3) is is_terminal
    # the same text either way
    assert len(output) > len("The cat\n")
    assert "".join("".join(map(str, piece)) for piece in pieces) == output[:-1]


def test_an_orderly_stop_is_no_failure_to_torchrun(monkeypatch):
    stopped, done = SimpleNamespace(status="stopped"), SimpleNamespace(status="done")
    monkeypatch.delenv("RANK", raising=False)
    assert (exit_code(stopped), exit_code(done)) == (130, 0)
    monkeypatch.setenv("RANK", "1")
    assert (exit_code(stopped), exit_code(done)) == (0, 0)
