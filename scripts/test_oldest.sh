#!/usr/bin/env bash
# Run the Python tests with the oldest torch that the package supports, in an environment of its own (.venv-oldest).
#   bash scripts/test_oldest.sh [arguments of pytest]
# The native module is built anew into this environment; `make dev` afterwards points python/daf_rs back to .venv's build,
# which is the same file.
set -euo pipefail
cd "$(dirname "$0")/.."

venv="$PWD/.venv-oldest"
oldest=$(sed -nE 's/^dependencies = \["torch>=([0-9.]+)"\]$/\1/p' pyproject.toml)
[ -n "$oldest" ] || {
    echo "error: pyproject.toml does not say dependencies = [\"torch>=…\"]" >&2
    exit 1
}
if [ ! -f "$venv/complete" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --upgrade 'pip>=25.1'
    grep -v '^torch' constraints.txt >"$venv/constraints.txt"
    "$venv/bin/python" -m pip install --quiet --progress-bar off --constraint "$venv/constraints.txt" \
        --group dev "torch==$oldest.*"
    touch "$venv/complete"
fi
VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH" PIP_CONSTRAINT="$venv/constraints.txt" \
    "$venv/bin/python" -m maturin develop --release --locked --extras demo
"$venv/bin/python" -c 'import torch; print("torch", torch.__version__)'
"$venv/bin/python" -m pytest "$@"
