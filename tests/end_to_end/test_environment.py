"""`make` picks the right Python, refuses the wrong one, and installs what is asked for."""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
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
        ({"VIRTUAL_ENV": str(ROOT / ".venv")}, ".venv/bin/python"),
        (
            {"CONDA_PREFIX": "/conda/ml", "CONDA_DEFAULT_ENV": "ml"},
            '"/conda/ml/bin/python"',
        ),
        ({"CONDA_PREFIX": "/conda", "CONDA_DEFAULT_ENV": "base"}, ".venv/bin/python"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, "python3"),
        ({"COLAB_RELEASE_TAG": "release-colab"}, "python3"),
    ],
)
def test_make_uses_the_environment_that_is_there(variables, python):
    made = make("-n", "run", **variables)
    dry = made.stdout
    assert f"\n{python} -m lib run" in f"\n{dry}"
    assert not made.stderr
    is_own = python == ".venv/bin/python"
    assert ("--own" in dry) == is_own or ".workbook-run" not in dry


def test_an_environment_whose_python_was_removed_is_made_anew(tmp_path):
    for name in ("Makefile", "requirements.txt", ".ci"):
        (tmp_path / name).symlink_to(ROOT / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (stamp,) = re.findall(r'--stamp "(\S+)"', make("-n", "run", folder=tmp_path).stdout)
    (tmp_path / stamp).touch()
    assert "--stamp" not in make("-n", "run", folder=tmp_path).stdout
    python.unlink()
    python.symlink_to(tmp_path / "removed")
    again = make("-n", "run", folder=tmp_path).stdout
    assert f'python3 .ci/environment.py --own --stamp "{stamp}"' in again


def test_make_run_passes_its_settings_on():
    dry = make("-n", "run", "NOTEBOOKS=01 02", "PARAMETERS=laptop").stdout
    assert "-m lib run --parameters laptop --notebooks 01 02" in dry


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


@pytest.mark.parametrize("version", ["3.9", "3.14"])
def test_another_python_is_refused_with_what_to_do(tmp_path, version):
    fake = tmp_path / "python3"
    major, minor = version.split(".")
    changed = f"import sys; sys.version_info = ({major}, {minor}); exec(sys.argv[1])"
    fake.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "Python {version}.1" && exit\n'
        f"exec {sys.executable} -c '{changed}' \"$2\"\n"
    )
    fake.chmod(0o755)
    done = make("run", KAGGLE_KERNEL_RUN_TYPE="Batch", PYTHON=str(fake), TMPDIR=str(tmp_path))
    assert done.returncode != 0
    assert f"is Python {version}.1, and Python 3.10 to 3.13 is needed" in done.stderr
    assert "make run PYTHON=python3.12" in done.stderr


def test_a_missing_python_is_named():
    done = make("run", KAGGLE_KERNEL_RUN_TYPE="Batch", PYTHON="python-none", TMPDIR="/nowhere")
    assert "no python-none here" in done.stderr


def names(file: str) -> set[str]:
    lines = (ROOT / file).read_text().splitlines()
    found = [re.match(r"[A-Za-z0-9_.-]+", line) for line in lines if not line.startswith("#")]
    return {match[0].lower().replace("_", "-") for match in found if match}


def test_every_requirement_has_a_tested_version():
    wanted = names("requirements.txt") | names(".ci/requirements-dev.txt")
    assert len(wanted) > 20
    assert wanted <= names(".ci/constraints.txt")


def test_uv_takes_the_tested_versions():
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    lines = (ROOT / ".ci/constraints.txt").read_text().splitlines()
    wanted = names("requirements.txt")
    assert settings["constraint-dependencies"] == [
        line for line in lines if line.split("=")[0] in wanted
    ]


@pytest.fixture(scope="module")
def environment():
    spec = importlib.util.spec_from_file_location("environment", ROOT / ".ci/environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_given_environment_keeps_its_torch(environment):
    import importlib.metadata

    kept = environment.installed_versions().splitlines()
    assert f"torch=={importlib.metadata.version('torch')}" in kept
    assert f"numpy=={importlib.metadata.version('numpy')}" in kept


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("  Downloading https://host/a/torch-2.9.0-cp311-linux.whl (899.8 MB)", "torch 899.8MB"),
        ("Downloading torch (858.1MiB)", "torch 858.1MiB"),
        ("Downloading numpy (15.8MiB)", ""),
        ("Downloading nvidia_cublas-13.whl (1.2 GB)", "nvidia_cublas"),
        ("Installing collected packages: a, b, c", "unpacking 3 packages"),
        ("Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)", ""),
        ("Requirement already satisfied: six", ""),
    ],
)
def test_a_log_names_only_what_takes_long(environment, capsys, line, shown):
    environment.show(line.split(), 1.0)
    out = capsys.readouterr().out
    assert shown in out.replace("(", "").replace(")", "")
    assert bool(out) == bool(shown)


def test_uv_looks_where_pip_does(environment, monkeypatch, tmp_path):
    settings = tmp_path / "pip.conf"
    settings.write_text(
        "[global]\nindex-url = https://mirror.example/simple\n"
        f"find-links = {tmp_path}\n  https://wheels.example\nextra-index-url = file:///nowhere\n"
    )
    for name in ("PIP_INDEX_URL", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    options = environment.settings_of_pip(sys.executable)
    pairs = set(itertools.pairwise(options))
    assert ("--default-index", "https://mirror.example/simple") in pairs
    assert {("--find-links", str(tmp_path)), ("--find-links", "https://wheels.example")} <= pairs
    assert not any("nowhere" in option for option in options)
