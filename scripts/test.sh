#!/usr/bin/env bash
# Sets up an environment in the checkout and runs every check: lint, format, types, tests.
#   bash scripts/test.sh            all of it
#   bash scripts/test.sh --tiny     a smoke form: lint and the quickest tests
#   bash scripts/test.sh ARGS...    all of it, with arguments for pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
if [ "${1:-}" = --tiny ]; then
    exec "$PYTHON" -m pytest -q tests/models/test_configs.py
fi
"$PYTHON" -m mypy
# One thread per process: the small tensors of the tests gain nothing from more, and processes run side by side.
workers=$(nproc) # before the next line, which nproc would heed
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
exec "$PYTHON" -m pytest -n "$workers" "$@"
