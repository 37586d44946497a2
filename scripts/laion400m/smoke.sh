#!/usr/bin/env bash
# The whole road at the smallest size, in about a minute on a CPU and without SLURM: drawn shapes instead of LAION's
# images, checked, cleaned, trained on with two kinds of attention, evaluated, and collected into a report.
#   bash scripts/laion400m/smoke.sh [FOLDER]      by default quickstart/laion400m
set -euo pipefail
folder=$(realpath -m "${1:-$(dirname "${BASH_SOURCE[0]}")/../../quickstart/laion400m}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh

mkdir -p "$folder"
"$PYTHON" -m openclip_linattn.cli data shapes "$folder/shards" --samples 512 --test-samples 64 --samples-per-shard 128
bash scripts/laion400m/check.sh "$folder/shards"
bash scripts/laion400m/clean.sh "$folder/shards" "$folder/clean" --samples-per-shard 128 --min-caption 5
for attention in softmax normlinear; do
    bash scripts/laion400m/train.sbatch --size T --attention "$attention" --samples 1k \
        --data "$folder/clean" --val "$folder/shards/test/0.tar" --logs "$folder/logs"
done
bash scripts/laion400m/evaluate.sh "$folder/logs" "$folder/shards/test"
# Two checkpoints of one run stand for two runs here: enough for a line, though not for a law.
bash scripts/laion400m/collect.sh "$folder/logs" "$folder/report" --points all
