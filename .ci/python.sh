#!/bin/sh
# Check that an environment has Python 3.11 to 3.14: .ci/python.sh /path/bin/python
# With --own, make .venv unless it has one: from the Python that is named, or another one on the
# PATH, or one that uv fetches. (So this cannot be written in Python.)
own=
if [ "$1" = --own ]; then own=1; shift; fi
python=$1
needed='Python 3.11 to 3.14'

fits() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null
}
version() {
  { command -v "$1" && "$1" --version; } >/dev/null 2>&1 &&
    echo "$1 is $("$1" --version 2>&1 | tail -n 1)" || echo "there is no $1 that runs"
}

if [ ! "$own" ]; then
  fits "$python" && exit
  echo "error: $(version "$python"), and $needed is needed. Activate another environment, or" \
    "none: then one is made here." >&2
  exit 1
fi

fits .venv/bin/python && exit
for each in "$python" python3 python3.14 python3.13 python3.12 python3.11; do
  # Debian has Pythons without ensurepip, which cannot make environments
  if fits "$each" && "$each" -c 'import ensurepip, venv' 2>/dev/null; then
    [ "$each" = "$python" ] || echo "$(version "$python"), and $needed is needed: taking $each"
    echo "Making .venv with $("$each" --version)"
    exec "$each" -m venv --clear .venv
  fi
done

echo "$(version "$python"), and $needed that can make environments is needed: uv fetches one"
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
uv=$(command -v uv) || {
  uv=$tools/bin/uv
  "$python" -m pip install --quiet --disable-pip-version-check --target "$tools" uv
} >"$tools/log" 2>&1 &&
  "$uv" venv --no-project --clear --python-preference only-managed \
    --python 'cpython>=3.11,<3.15' .venv >>"$tools/log" 2>&1 && exit
tail -n 20 "$tools/log" >&2
echo "error: uv could not fetch one. Install $needed and name it: make run PYTHON=python3.13" \
  "(on Debian and Ubuntu with its package python3.13-venv), or install uv." >&2
exit 1
