#!/bin/sh
# Install what is missing into an environment: .ci/install.sh /path/bin/python requirements.txt ...
# Packages that fit stay as they are there, and PyTorch and its companions in any case.
#
# With --own before them: into .venv, with the tested versions. It is made if it is not there: from
# the Python that is named, or another one on the PATH, or one that uv fetches. uv installs into it,
# a third of a minute where pip takes a whole one; pip does where uv cannot.
own=
if [ "$1" = --own ]; then own=1; shift; fi
python=$1
shift
needed='Python 3.11 to 3.14'
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT

fits() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null
}
version() {
  { command -v "$1" && "$1" --version; } >/dev/null 2>&1 &&
    echo "$1 is $("$1" --version 2>&1 | tail -n 1)" || echo "there is no $1 that runs"
}
make_environment() {
  for each in "$python" python3 python3.14 python3.13 python3.12 python3.11; do
    # Debian has Pythons without ensurepip, which cannot make environments
    if fits "$each" && "$each" -c 'import ensurepip, venv' 2>/dev/null; then
      [ "$each" = "$python" ] || echo "$(version "$python"), and $needed is needed: taking $each"
      echo "Making .venv with $("$each" --version)"
      "$each" -m venv --clear .venv
      return
    fi
  done
  echo "$(version "$python"), and $needed that can make environments is needed: uv fetches one"
  uv=$(command -v uv) || {
    uv=$tools/bin/uv
    "$python" -m pip install --quiet --disable-pip-version-check --target "$tools" uv
  } >"$tools/log" 2>&1 &&
    "$uv" venv --no-project --seed --clear --python-preference only-managed \
      --python 'cpython>=3.11,<3.15' .venv >>"$tools/log" 2>&1 && return
  tail -n 20 "$tools/log" >&2
  echo "error: uv could not fetch one. Install $needed and name it: make run PYTHON=python3.13" \
    "(on Debian and Ubuntu with its package python3.13-venv), or install uv." >&2
  exit 1
}
pip() {
  "$python" -m pip --disable-pip-version-check "$@"
}
# A setting of pip, which uv does not read: pip config list has `global.find-links='a\nb'`.
# Like pip, without folders that are not there.
setting() {
  for place in $(printf '%s\n' "$settings" | sed -n "s/^[^=]*[.]$1='\(.*\)'\$/\1/p" | sed 's/\\n/ /g'); do
    case $place in file://*) [ -e "${place#file://}" ] || continue ;; esac
    printf '%s\n' "$place"
  done | paste -s -d "$2" -
}
# Run an installer: everything on a terminal, in a log what takes long, and its end if it fails.
follow() {
  if [ -t 1 ]; then "$@"; return; fi
  { "$@" 2>&1; echo $? >"$tools/code"; } | tee "$tools/log" | while read -r line; do
    case $line in
      *Downloading*G*B\) | *Downloading*[0-9][0-9][0-9].[0-9]*M*B\))
        line=${line#*Downloading }
        echo "  downloading ${line##*/}" ;;
      "Installing collected packages:"*) echo "  unpacking packages" ;;
    esac
  done
  read -r code <"$tools/code"
  [ "$code" = 0 ] || tail -n 40 "$tools/log" >&2
  return "$code"
}
install_with_uv() (
  pip install -c .ci/constraints.txt uv >"$tools/log" 2>&1 || exit
  settings=$(pip config list)
  index=$(setting index-url ' ') more=$(setting extra-index-url ' ')
  links=$(setting find-links ,) constraint=$(setting constraint ' ')
  [ -z "$index" ] || export UV_DEFAULT_INDEX="${index%% *}"
  [ -z "$more" ] || export UV_INDEX="$more"
  [ -z "$links" ] || export UV_FIND_LINKS="$links"
  [ -z "$constraint" ] || export UV_CONSTRAINT="$constraint"
  [ -z "$PIP_CERT" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"
  export UV_INDEX_STRATEGY=unsafe-best-match
  follow "$python" -m uv pip install --python "$python" "$@"
)

if [ "$own" ]; then
  fits .venv/bin/python || make_environment
  python=.venv/bin/python
else
  fits "$python" || {
    echo "error: $(version "$python"), and $needed is needed. Activate another environment, or" \
      "none: then one is made here." >&2
    exit 1
  }
fi
[ $# -gt 0 ] || exit 0
"$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >"$tools/log" 2>&1 || {
  cat "$tools/log" >&2
  echo "error: $python has no pip, and cannot make it" >&2
  exit 1
}

echo "Installing packages into $(dirname "$(dirname "$python")"), which takes minutes once"
started=$(date +%s)
if [ ! "$own" ]; then
  kept='^(torch|torchvision|torchaudio|triton|numpy|numba|jax|jaxlib)=='
  pip list --format=freeze | grep -E "$kept" >"$tools/kept"
  follow pip install --no-input -c "$tools/kept" "$@" || exit
else
  install_with_uv -c .ci/constraints.txt "$@" ||
    follow pip install --no-input --no-compile -c .ci/constraints.txt "$@" || exit
  # of large packages whose modules are hardly loaded, Python compiles one when asked for it
  rare='fontTools|google|jedi|mypy|mypyc|networkx|opentelemetry|prompt_toolkit|pydantic|setuptools|sympy/physics'
  rare="$rare|torch/_inductor|torch/testing|wandb|wcwidth"
  "$python" -m compileall -q -j 0 -x "/site-packages/((.*/)?tests?|$rare)/" .venv/lib >/dev/null 2>&1
fi
echo "  ready after $(($(date +%s) - started)) s"
