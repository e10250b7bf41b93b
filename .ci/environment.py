"""Install the packages that the workbook needs and that are missing; called by the Makefile.

With --own, into .venv (created if missing) at the tested versions of constraints.txt. Without, into
the environment of the Python that runs this: packages that fit stay as they are, and PyTorch and
its companions stay at their versions in any case.
"""

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ("torch", "torchvision", "torchaudio", "triton", "numpy", "numba", "jax", "jaxlib")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--stamp", type=Path, required=True)
    parser.add_argument("requirements", nargs="+")
    args = parser.parse_args()
    python = make_environment() if args.own else Path(sys.executable)
    if args.own:
        constraints = (ROOT / ".ci/constraints.txt").read_text()
    else:
        constraints = installed_versions()
    code = install(python, args.requirements, constraints, compile=args.own)
    if code == 0:
        for old in args.stamp.parent.glob(args.stamp.name.rsplit("-", 1)[0] + "-*"):
            old.unlink()
        args.stamp.touch()
    return code


def make_environment() -> Path:
    """Create .venv unless there is one that works; return its Python."""
    python = ROOT / ".venv/bin/python"
    # false for a link to a Python that has since been removed
    if not python.exists():
        version = ".".join(map(str, sys.version_info[:3]))
        print(f"Making .venv with Python {version}", flush=True)
        try:
            venv.create(ROOT / ".venv", clear=True, with_pip=True)
        except subprocess.CalledProcessError:
            sys.exit(
                "error: this Python cannot make virtual environments. On Debian and Ubuntu, "
                f"install python{version.rsplit('.', 1)[0]}-venv."
            )
    return python


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


def install(python: Path, requirements: list[str], constraints: str, *, compile: bool) -> int:
    """Run pip with one line of progress, and print its whole output only if it fails.

    Args:
        compile: all modules on all cores at the end; pip would compile them one by one.
    """
    if subprocess.run([python, "-c", "import pip"], capture_output=True).returncode:
        subprocess.run([python, "-m", "ensurepip"], check=True, capture_output=True)
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "constraints.txt")
        pins.write_text(constraints)
        command = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
        command += ["--progress-bar", "off", "--constraint", str(pins)]
        command += ["--no-compile"] if compile else []
        for file in requirements:
            command += ["--requirement", str(ROOT / file)]
        started = time.monotonic()
        print(f"Installing {' and '.join(requirements)} into {folder_of(python)}", flush=True)
        pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines = []
        for line in pip.stdout:
            lines.append(line)
            show(line.split(), time.monotonic() - started)
        code = pip.wait()
        if compile and not code:
            # packages bring templates, too, which do not compile
            modules = ["-m", "compileall", "-q", "-j", "0", str(python.parent.parent / "lib")]
            subprocess.run([python, *modules], capture_output=True)
    if sys.stdout.isatty():
        print("\r\033[K", end="")
    if code:
        print("".join(lines[-40:]), f"error: pip could not install {requirements}", sep="\n")
    else:
        print(f"  ready after {time.monotonic() - started:.0f} s", flush=True)
    return code


def show(words: list[str], seconds: float) -> None:
    """Print what pip is doing: everything on a terminal, only what takes long in a log."""
    terminal = sys.stdout.isatty()
    if words[:1] == ["Downloading"] and len(words) >= 4:
        name, size, unit = words[1].rsplit("/", 1)[-1].split("-")[0], *words[-2:]
        text = f"downloading {name} {size} {unit}"
        large = unit == "GB)" or (unit == "MB)" and float(size.strip("(")) >= 100)
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
