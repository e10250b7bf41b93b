"""The command line: commands found, configs parsed, errors in one line."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lib import __main__ as command_line
from lib.__main__ import main, one_line, parse
from lib.config import TokenizeConfig

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


def test_flags_of_a_command_load_neither_torch_nor_numba():
    code = (
        "import sys; from lib.__main__ import main\n"
        "try: main(['tokenize', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'numba', 'matplotlib') if m in sys.modules])"
    )
    output = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert output.splitlines()[-1] == "[]"


def test_unknown_command_is_refused_with_the_known_ones():
    done = run("tokenise")
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown command 'tokenise'; did you mean 'tokenize'?")
    assert "tokenize, run" in done.stderr


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
        "workers": 2,
    }


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
