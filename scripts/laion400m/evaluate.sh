#!/usr/bin/env bash
# Zero-shot accuracy of every checkpoint of every run, on one or more evaluation sets. Checkpoints that have a row
# already are passed over, so it can be run while others still train.
#   bash scripts/laion400m/evaluate.sh LOGS SET... [-- OPTIONS OF `openclip-linattn eval`]
# SET is a webdataset of clip_benchmark's layout, such as ImageNet's validation images from
# https://huggingface.co/datasets/clip-benchmark/wds_imagenet1k (the folder test). Rows go to
# LOGS/<run>/checkpoints/zeroshot.jsonl, where collect.sh finds them.
set -euo pipefail
if [ $# -lt 2 ] || [ "$2" = -- ]; then
    echo "usage: bash scripts/laion400m/evaluate.sh LOGS SET... [-- OPTIONS]" >&2
    exit 2
fi
logs=$(realpath -m "$1")
shift
sets=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    sets+=(--data "$(realpath -m "$1")")
    shift
done
[ $# = 0 ] || shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh

shopt -s nullglob
runs=()
for folder in "$logs"/*/checkpoints; do
    numbered=("$folder"/epoch_[0-9]*.pt)
    if [ ${#numbered[@]} != 0 ]; then
        runs+=("$folder")
    else
        echo "no numbered checkpoint yet: $folder" >&2
    fi
done
if [ ${#runs[@]} = 0 ]; then
    echo "error: no run in $logs has checkpoints to evaluate; it must be the folder that was --logs in training" >&2
    exit 2
fi
exec "$PYTHON" -m openclip_linattn.cli eval "${runs[@]}" "${sets[@]}" "$@"
