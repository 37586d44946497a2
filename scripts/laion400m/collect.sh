#!/usr/bin/env bash
# From run folders to fitted laws: OUT/table.csv (every checkpoint), OUT/fits.json (the laws of each kind of attention
# with their intervals) and OUT/report.md with its pictures. Needs no GPU.
#   bash scripts/laion400m/collect.sh LOGS OUT [OPTIONS OF `openclip-scaling report`]
# Only the last checkpoint of each run counts (--points ends): the learning rate falls to zero there, and a checkpoint
# on the way is worse than a run of that length.
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: bash scripts/laion400m/collect.sh LOGS OUT [OPTIONS]" >&2
    exit 2
fi
logs=$(realpath -m "$1")
out=$(realpath -m "$2")
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh

mkdir -p "$out"
"$PYTHON" -m openclip_scaling.cli collect "$logs" --output "$out/table.csv"
exec "$PYTHON" -m openclip_scaling.cli report "$logs" --output "$out" --points ends "$@"
