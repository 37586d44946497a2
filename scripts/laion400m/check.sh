#!/usr/bin/env bash
# Checks every shard of a folder as OpenCLIP reads it: what is usable, what is lost and why.
#   bash scripts/laion400m/check.sh SHARDS [OPTIONS OF `openclip-linattn data check`]
#   bash scripts/laion400m/check.sh SHARDS --slurm-array 64 --slurm partition=cpu --slurm timeout_min=240
# The second form shares the shards among 64 SLURM tasks. Run again, only new or changed shards are read. Beside the
# folder lie SHARDS.check.json (the whole report) and SHARDS.check.png (its picture) afterwards. Numbers missing
# between the first and the last shard are listed and passed over: LAION-400M of today has gaps.
set -euo pipefail
if [ $# = 0 ]; then
    echo "usage: bash scripts/laion400m/check.sh SHARDS [OPTIONS]" >&2
    exit 2
fi
shards=$(realpath -m "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh

exec "$PYTHON" -m openclip_linattn.cli data check "$shards" --allow-missing \
    --report "$shards.check.json" --picture "$shards.check.png" "$@"
