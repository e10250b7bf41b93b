"""Install the packages that the workbook needs and that are missing; called by the Makefile.

Into the environment of the Python that runs this: packages that fit stay as they are, and PyTorch
and its companions stay at their versions in any case. With --own, the environment is .venv, and
gets the tested versions of constraints.txt.

Into .venv uv installs, a third of a minute where pip takes a whole one; pip does where uv cannot.
"""

import argparse
import ast
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Settings of pip, from its files and variables, as options of uv
PIP_SETTINGS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
}
# Large packages of whose modules next to none is loaded: Python compiles one when asked for it.
RARELY_LOADED = (
    "fontTools|google|jedi|mypy|mypyc|networkx|opentelemetry|prompt_toolkit|pydantic|setuptools|"
    "sympy/physics|torch/_inductor|torch/testing|wandb|wcwidth"
)
KEPT = ("torch", "torchvision", "torchaudio", "triton", "numpy", "numba", "jax", "jaxlib")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--stamp", type=Path, required=True)
    parser.add_argument("requirements", nargs="+")
    args = parser.parse_args()
    tested = ROOT / ".ci/constraints.txt"
    constraints = tested.read_text(encoding="utf-8") if args.own else installed_versions()
    code = install(Path(sys.executable), args.requirements, constraints, is_own=args.own)
    if code == 0:
        for old in args.stamp.parent.glob(args.stamp.name.rsplit("-", 1)[0] + "-*"):
            old.unlink()
        args.stamp.touch()
    return code


def folder_of(python: Path) -> Path:
    """Return the environment's folder, relative to the workbook if it is in it."""
    folder = python.parent.parent
    return folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder


def installed_versions() -> str:
    """Return the versions that an environment not our own keeps, as pip constraints."""
    lines = []
    for name in KEPT:
        try:
            lines.append(f"{name}=={importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return "\n".join(lines)


def install(python: Path, requirements: list[str], constraints: str, *, is_own: bool) -> int:
    """Install with one line of progress, and print the whole output only if that fails.

    Args:
        is_own: into .venv: by uv if possible, and with modules compiled, on all cores.
    """
    if subprocess.run([python, "-c", "import pip"], capture_output=True).returncode:
        made = subprocess.run([python, "-m", "ensurepip"], capture_output=True, text=True)
        if made.returncode:
            sys.exit(f"{made.stderr}error: {python} has no pip, and cannot make it")
    pip = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    pip += ["--progress-bar", "off"]
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "constraints.txt")
        pins.write_text(constraints)
        wanted = ["--constraint", str(pins)]
        for file in requirements:
            wanted += ["--requirement", str(ROOT / file)]
        started = time.monotonic()
        print(f"Installing {' and '.join(requirements)} into {folder_of(python)}", flush=True)
        code = 1
        if is_own:
            code, _ = follow([*pip, "--quiet", *wanted[:2], "uv"], started)
            if not code:
                uv = [python, "-m", "uv", "pip", "install", "--python", python]
                code, _ = follow([*uv, *settings_of_pip(python), *wanted], started)
        if code:
            code, lines = follow([*pip, *["--no-compile"] * is_own, *wanted], started)
        if is_own and not code:
            # packages bring templates, too, which do not compile, and tests of their own
            left_out = f"/site-packages/((.*/)?tests?|{RARELY_LOADED})/"
            modules = ["-m", "compileall", "-q", "-j", "0", "-x", left_out]
            modules.append(str(python.parent.parent / "lib"))
            subprocess.run([python, *modules], capture_output=True)
    if sys.stdout.isatty():
        print("\r\033[K", end="")
    if code:
        print("".join(lines[-40:]), f"error: pip could not install {requirements}", sep="\n")
    else:
        print(f"  ready after {time.monotonic() - started:.0f} s", flush=True)
    return code


def settings_of_pip(python: Path) -> list[str]:
    """Return where pip looks for packages, as options of uv, which does not read pip's settings."""
    command = [python, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    options = []
    for line in lines:
        name, _, value = line.partition("=")
        option = PIP_SETTINGS.get(name.rpartition(".")[2])
        for place in ast.literal_eval(value).split() if option else []:
            # pip passes over folders that are not there
            if "://" not in place or not place.startswith("file://") or Path(place[7:]).exists():
                options += [option, place]
    # as pip: of all indexes, the newest version
    return [*options, "--index-strategy", "unsafe-best-match"]


def follow(command: list, started: float) -> tuple[int, list[str]]:
    """Run an installer, showing what it does; return its exit code and its output."""
    environment = os.environ.copy()
    if "PIP_CERT" in environment:
        environment.setdefault("SSL_CERT_FILE", environment["PIP_CERT"])
    program = subprocess.Popen(
        list(map(str, command)),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    for line in program.stdout:
        lines.append(line)
        show(line.split(), time.monotonic() - started)
    return program.wait(), lines


def show(words: list[str], seconds: float) -> None:
    """Print what pip or uv is doing: everything on a terminal, only what takes long in a log."""
    terminal = sys.stdout.isatty()
    if words[:1] == ["Downloading"] and len(words) >= 3:
        # pip: a file and "(899.8 MB)"; uv: a name and "(858.1MiB)"
        name = words[1].rsplit("/", 1)[-1].split("-")[0]
        size = "".join(words[2:]).strip("()")
        text = f"downloading {name} {size}"
        number = size.rstrip("GMKkiB")
        large = "G" in size or ("M" in size and float(number) >= 100)
    elif words[:1] == ["Collecting"]:
        text, large = f"looking for {words[1]}", False
    elif words[:3] == ["Installing", "collected", "packages:"]:
        text, large = f"unpacking {len(words) - 3} packages", True
    else:
        return
    if terminal:
        print(f"\r\033[K  {text[:70]}  {seconds:.0f} s", end="", flush=True)
    elif large:
        print(f"  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
