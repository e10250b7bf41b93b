"""`make` picks the right Python, refuses the wrong one, and installs what is asked for."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNSET = ("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "KAGGLE_KERNEL_RUN_TYPE")
UNSET += ("COLAB_RELEASE_TAG", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON")


def make(*words: str, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key not in UNSET}
    command = ["make", "-C", str(folder), *words]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("variables", "python"),
    [
        ({}, ".venv/bin/python"),
        ({"VIRTUAL_ENV": "/my envs/own"}, '"/my envs/own/bin/python"'),
        (
            {"CONDA_PREFIX": "/conda/ml", "CONDA_DEFAULT_ENV": "ml"},
            '"/conda/ml/bin/python"',
        ),
        ({"CONDA_PREFIX": "/conda", "CONDA_DEFAULT_ENV": "base"}, ".venv/bin/python"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, "python3"),
    ],
)
def test_make_uses_the_environment_that_is_there(variables, python):
    made = make("-n", "run", "NOTEBOOKS=01 02", "PARAMETERS=laptop", **variables)
    dry = made.stdout
    assert f"\n{python} -m lib run --parameters laptop --notebooks 01 02\n" in f"\n{dry}"
    assert not made.stderr
    is_own = python == ".venv/bin/python"
    assert ("--own" in dry) == is_own or ".workbook-run" not in dry


def test_an_environment_whose_python_was_removed_is_made_anew(tmp_path):
    for name in ("Makefile", "requirements.txt", ".ci"):
        (tmp_path / name).symlink_to(ROOT / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (stamp,) = re.findall(r"touch (\S+)", make("-n", "run", folder=tmp_path).stdout)
    (tmp_path / stamp).touch()
    assert "install.sh" not in make("-n", "run", folder=tmp_path).stdout
    python.unlink()
    python.symlink_to(tmp_path / "removed")
    again = make("-n", "run", folder=tmp_path).stdout
    assert 'sh .ci/install.sh --own "python3" -r requirements.txt\n' in again
    assert f"touch {stamp}" in again


def test_make_lab_asks_for_no_news(tmp_path):
    dry = make("-n", "lab", JUPYTER_CONFIG_PATH="/etc/own").stdout
    folders = re.search(r'JUPYTER_CONFIG_PATH="(.+?)"', dry)[1]
    assert folders.endswith(":/etc/own")
    # where JupyterLab's server looks for defaults
    program = (
        "from jupyterlab_server.config import ConfigManager\n"
        "found = ConfigManager(config_dir_name='labconfig').get('default_setting_overrides')\n"
        "print(found['@jupyterlab/apputils-extension:notification']['fetchNews'])"
    )
    environment = os.environ | {"JUPYTER_CONFIG_PATH": folders, "JUPYTER_CONFIG_DIR": str(tmp_path)}
    environment.pop("JUPYTER_NO_CONFIG", None)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "false"


def fake(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def fake_python(path: Path, version: str, *, can_make: bool = True) -> None:
    """A program like Python `version`, which makes environments with itself in them."""
    made = f'mkdir -p .venv/bin && cp "$0" .venv/bin/python && echo {path.name} >.venv/maker'
    fits = 0 if (3, 11) <= tuple(map(int, version.split("."))) <= (3, 14) else 1
    fake(
        path,
        f"""case "$*" in
          *version_info*) exit {fits} ;;
          *ensurepip*) exit {0 if can_make else 1} ;;
          --version) echo "Python {version}.1" ;;
          "-m venv --clear .venv") {made} ;;
          *) echo "no module $2" >&2; exit 1 ;;
        esac""",
    )


# what uv does where it can reach a Python, and where it cannot
FETCHES = 'echo "$*" >uv; mkdir -p .venv/bin && echo uv >.venv/maker'
OFFLINE = "echo 'error: failed to look up address' >&2; exit 1"
NEEDED = "Python 3.11 to 3.14 is needed"


@pytest.mark.parametrize(
    ("pythons", "uv", "maker", "said"),
    [
        ({"python3": "3.14"}, "", "python3", "Making .venv with Python 3.14.1\n"),
        (
            {"python3": "3.9", "python3.12": "3.12"},
            "",
            "python3.12",
            f"python3 is Python 3.9.1, and {NEEDED}: taking python3.12\n",
        ),
        ({"python3": "3.15"}, FETCHES, "uv", "python3 is Python 3.15.1"),
        ({"python3": "3.12 without venv"}, FETCHES, "uv", "that can make environments is needed"),
        ({"python3": "3.10"}, OFFLINE, "", "failed to look up address\nerror: uv could not fetch"),
        ({"python3": "3.10"}, "", "", "no module pip\nerror: uv could not fetch one. Install"),
    ],
)
def test_whatever_python_there_is_one_that_fits_is_taken_or_fetched(
    tmp_path, pythons, uv, maker, said
):
    for name, version in pythons.items():
        can_make = "without" not in version
        fake_python(tmp_path / "bin" / name, version.split()[0], can_make=can_make)
    if uv:
        fake(tmp_path / "bin/uv", uv)
    (tmp_path / "bin").mkdir(exist_ok=True)
    for tool in ("sh", "tail", "mktemp", "rm", "mkdir", "cp"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    command = [tmp_path / "bin/sh", ROOT / ".ci/install.sh", "--own", "python3"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PATH": str(tmp_path / "bin")}, capture_output=True, text=True
    )
    assert said in done.stdout + done.stderr
    assert (done.returncode == 0) == bool(maker)
    made = tmp_path / ".venv/maker"
    assert (made.read_text().strip() if made.exists() else "") == maker
    if maker == "uv":
        assert "--python cpython>=3.11,<3.15 .venv" in (tmp_path / "uv").read_text()


def test_an_environment_with_another_python_is_made_anew_if_it_is_our_own(tmp_path):
    fake_python(tmp_path / "bin/python3", "3.12")
    (tmp_path / ".venv").mkdir()
    fake_python(tmp_path / ".venv/bin/python", "3.10")
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    script = ["sh", ROOT / ".ci/install.sh"]
    options = {"cwd": tmp_path, "env": path, "capture_output": True, "text": True}
    given = subprocess.run([*script, tmp_path / ".venv/bin/python"], **options)
    assert given.returncode == 1
    assert f".venv/bin/python is Python 3.10.1, and {NEEDED}. Activate another" in given.stderr
    own = subprocess.run([*script, "--own", "python3"], **options)
    assert own.stdout == "Making .venv with Python 3.12.1\n"
    # and stays from then on
    assert not subprocess.run([*script, "--own", "python3"], **options).stdout


def test_the_pins_have_wheels_for_each_python():
    uv = [sys.executable, "-m", "uv"]
    if subprocess.run([*uv, "--version"], capture_output=True).returncode:
        pytest.skip("uv is not installed here")
    command = [*uv, "pip", "compile", "--only-binary", ":all:", "--no-python-downloads"]
    command += ["-c", ".ci/constraints.txt", "requirements.txt", ".ci/requirements-dev.txt"]
    options = {"env": os.environ | {"UV_HTTP_RETRIES": "0"}, "text": True, "cwd": ROOT}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    asked = {
        version: subprocess.Popen([*command, "--python-version", version], **options)
        for version in ("3.11", "3.12", "3.13", "3.14")
    }
    answers = {version: (*run.communicate(), run.returncode) for version, run in asked.items()}
    if any("error sending request" in error for _, error, _ in answers.values()):
        pytest.skip("the package index cannot be reached")
    for version, (pins, error, code) in answers.items():
        assert code == 0, f"{version}: {error}"
        assert "torch==2" in pins


def names(file: str) -> set[str]:
    lines = (ROOT / file).read_text().splitlines()
    found = [re.match(r"[A-Za-z0-9_.-]+", line) for line in lines if not line.startswith("#")]
    return {match[0].lower().replace("_", "-") for match in found if match}


def test_every_requirement_has_a_tested_version():
    wanted = names("requirements.txt") | names(".ci/requirements-dev.txt")
    assert len(wanted) > 20
    assert wanted <= names(".ci/constraints.txt")


def test_uv_takes_the_tested_versions():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    lines = (ROOT / ".ci/constraints.txt").read_text().splitlines()
    wanted = names("requirements.txt")
    assert settings["constraint-dependencies"] == [
        line for line in lines if line.split("=")[0] in wanted
    ]


def install(tmp_path, answer: str, *words: str) -> tuple[subprocess.CompletedProcess, str]:
    """Run the installer with a Python that gives one `answer`; also return its commands."""
    fake(
        tmp_path / ".venv/bin/python",
        f'''echo "$* $UV_DEFAULT_INDEX;$UV_INDEX;$UV_FIND_LINKS" >>"{tmp_path}/commands"
        case "$*" in
          *version_info*) ;;
          *"{answer} ;;
          *) while [ $# -gt 0 ]; do [ "$1" = -c ] && cat "$2" >>"{tmp_path}/pins"; shift; done ;;
        esac''',
    )
    command = ["sh", ROOT / ".ci/install.sh", *words, "-r", "requirements.txt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    return done, (tmp_path / "commands").read_text()


def test_a_given_environment_keeps_its_torch(tmp_path):
    answer = """list --format=freeze") printf 'six==1\\ntorch==2.1.0+cu121\\ntorchmetrics==1\\n'"""
    (tmp_path / ".venv").mkdir()
    done, commands = install(tmp_path, answer, str(tmp_path / ".venv/bin/python"))
    assert "install --no-input -c" in commands
    assert re.search(r"^  ready after \d+ s$", done.stdout, re.MULTILINE)
    assert (tmp_path / "pins").read_text() == "torch==2.1.0+cu121\n"


LOG = """\
  Downloading https://host/a/torch-2.9.0-cp311-linux.whl (899.8 MB)
Downloading torch (858.1MiB)
Downloading numpy (15.8MiB)
Downloading nvidia_cublas-13.whl (1.2 GB)
Installing collected packages: a, b, c
Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)
Requirement already satisfied: six
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_log_names_only_what_takes_long_and_has_all_if_that_fails(tmp_path, code):
    (tmp_path / "log").write_text(LOG)
    (tmp_path / ".venv").mkdir()
    answer = f'install --no-input"*) cat "{tmp_path}/log"; exit {code}'
    done, _ = install(tmp_path, answer, str(tmp_path / ".venv/bin/python"))
    _, *lines = done.stdout.splitlines()
    assert lines[:4] == [
        "  downloading torch-2.9.0-cp311-linux.whl (899.8 MB)",
        "  downloading torch (858.1MiB)",
        "  downloading nvidia_cublas-13.whl (1.2 GB)",
        "  unpacking packages",
    ]
    assert (done.returncode, len(lines)) == (code, 4 if code else 5)
    assert done.stderr == (LOG if code else "")


def test_an_environment_without_pip_gets_it_or_is_named(tmp_path):
    (tmp_path / ".venv").mkdir()
    python = str(tmp_path / ".venv/bin/python")
    done, commands = install(tmp_path, 'pip --version") exit 1', python)
    assert done.returncode == 0
    assert "\n-m ensurepip" in commands
    done, _ = install(tmp_path, 'pip --version" | *ensurepip*) exit 1', python)
    assert done.returncode == 1
    assert done.stderr == f"error: {python} has no pip, and cannot make it\n"


def test_uv_looks_where_pip_does(tmp_path):
    settings = ":env:.cert='/a'", "global.find-links='/w\\nhttps://w.example'"
    settings += ("global.index-url='https://mirror.example/simple'",)
    # pip passes over folders that are not there
    settings += (f"global.extra-index-url='file:///nowhere file://{tmp_path}'",)
    (tmp_path / "settings").write_text("\n".join(settings))
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".ci").symlink_to(ROOT / ".ci")
    _, commands = install(tmp_path, f'config list") cat {tmp_path}/settings', "--own", "python3")
    (line,) = [line for line in commands.splitlines() if line.startswith("-m uv pip install")]
    places = f" https://mirror.example/simple;file://{tmp_path};/w,https://w.example"
    assert line.endswith(places)
