#!/usr/bin/env bash
# On one NVIDIA GPU (an H200 in mind), in under eight minutes: the operators' tests, then the benchmarks, then the
# share of the copy bandwidth that normalised linear attention reaches. Results go into OUT (default: bench).
#   bash scripts/bench_h200.sh [OUT]
#   bash scripts/bench_h200.sh --tiny [OUT]    a smoke form of a minute on a CPU, without the tests
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

options=(--device cuda)
batch=256 long=16384
lengths=(--tokens 64,1024,4096,16384,65536,262144,524288,1048576,4194304)
if [ "${1:-}" = --tiny ]; then
    options=(--device cpu --tiny)
    batch=2 long=1024
    lengths=()
    shift
fi
out=${1:-bench}
# SECONDS FOLDER BENCHMARK ARGS...: the seconds bound the measurements; checks come before them, and a kernel that
# hangs is ended.
bench() {
    local seconds=$1 folder=$2 benchmark=$3
    shift 3
    timeout $((seconds + 45)) "$PYTHON" -m openclip_linattn.cli bench "$benchmark" "${options[@]}" \
        --seconds "$seconds" --out "$folder" "$@"
}

if [ "${options[1]}" = cuda ]; then
    status=0
    timeout 100 "$PYTHON" -m pytest -q -x tests/ops || status=$?
    if [ "$status" = 124 ]; then
        echo "tests/ops did not end within 100 s; the benchmarks check every operator again" >&2
    elif [ "$status" != 0 ]; then
        exit "$status"
    fi
fi

# ViT-B/16, 12 heads of width 64: batch 256 at 224 px, and batch 4 at 2048 px.
kinds=(--operator normlinear --operator linear)
status=0
bench 10 "$out/vit-b-16-224" ops "${kinds[@]}" --batch "$batch" --heads 12 --tokens 197 || status=1
bench 10 "$out/vit-b-16-2048" ops "${kinds[@]}" --batch 4 --heads 12 --tokens "$long" || status=1
bench 130 "$out" ops "${lengths[@]}" || status=1
bench 30 "$out" towers || status=1

"$PYTHON" - "$out"/vit-b-16-*/ops-*.json <<'END'
import json
import sys

for path in sys.argv[1:]:
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    copy = report["ceilings"]["copy_bytes_per_s"]
    for row in report["rows"]:
        if row["operator"] != "normlinear":
            continue
        what = f"normlinear {row['pass']}, B*H {row['batch'] * row['heads']}, N {row['tokens']}"
        if row["seconds"] is None or row["check"] != "passed":
            print(f"{what}: no share ({row['check']}, {row['status']})")
        else:
            share = row["least_bytes_per_s"] / copy
            print(f"{what}: {share:.0%} of the measured copy bandwidth of {copy / 1e12:.3g} TB/s")
END
exit "$status"
