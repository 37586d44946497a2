#!/usr/bin/env bash
# On one NVIDIA GPU (an H200 in mind), in under eight minutes: the tests of the kernels, the benchmarks, and what they
# are run for: the share of the copy bandwidth that normalised linear attention reaches, and how it compares with
# softmax. A part that fails or hangs does not take the others' results along; the exit status is 1 if one did.
#   bash scripts/bench_h200.sh [FOLDER]          the results as files, by default in bench/
#   bash scripts/bench_h200.sh --tiny [FOLDER]   a smoke form of a minute on a CPU, without the tests
# Without FOLDER but with the environment variable OUT, the results go into one archive in that folder, which is
# written anew after every part.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

options=(--device cuda)
batch=256 long=16384
lengths=(--tokens 64,512,1024,4096,16384,65536,262144,524288,1048576,4194304)
if [ "${1:-}" = --tiny ]; then
    options=(--device cpu --tiny)
    batch=2 long=1024
    lengths=()
    shift
fi
# Without a card this ends here, with a sentence.
stem=$("$PYTHON" -c '
import sys
from openclip_linattn.bench.machine import file_stem, find_device
from openclip_linattn.errors import UserError
try:
    print(file_stem("bench", find_device(sys.argv[1])))
except UserError as error:
    sys.exit(str(error))
' "${options[1]}")
archive=
if [ -n "${1:-}" ] || [ -z "${OUT:-}" ]; then
    folder=${1:-bench}
else
    folder=$(mktemp -d)
    trap 'rm -r "$folder"' EXIT
    archive=$OUT/$stem.tar.gz
    mkdir -p "$OUT"
fi
mkdir -p "$folder"

status=0
# NAME SECONDS COMMAND...: what it prints goes to NAME.log too, and what hangs is ended.
part() {
    local name=$1 seconds=$2 result=0
    shift 2
    echo "== $name" >&2
    timeout --kill-after=10 "$seconds" "$@" 2>&1 | tee "$folder/$name.log" || result=$?
    if [ "$result" != 0 ]; then
        status=1
        echo "$name: exit status $result (124: not done within $seconds s)" | tee -a "$folder/$name.log" >&2
    fi
    if [ -n "$archive" ]; then
        tar -czf "$archive.part" -C "$folder" . && mv "$archive.part" "$archive" || status=1
    fi
}
# NAME SECONDS SUBFOLDER BENCHMARK ARGS...: the seconds bound the measurements; checks and compilation come before.
bench() {
    local name=$1 seconds=$2 results=$folder${3:+/$3} benchmark=$4
    shift 4
    part "$name" $((seconds + 45)) "$PYTHON" -m openclip_linattn.cli bench "$benchmark" "${options[@]}" \
        --seconds "$seconds" --out "$results" "$@"
}

# ViT-B/16, 12 heads of width 64: batch 256 at 224 px, and batch 4 at 2048 px.
kinds=(--operator normlinear --operator linear)
bench vit-b-16-224 10 vit-b-16-224 ops "${kinds[@]}" --batch "$batch" --heads 12 --tokens 197
bench vit-b-16-2048 10 vit-b-16-2048 ops "${kinds[@]}" --batch 4 --heads 12 --tokens "$long"
if [ "${options[1]}" = cuda ]; then
    # Compiling the kernels takes the time: one process per core, of which a card's memory holds 16.
    workers=$(($(nproc) < 16 ? $(nproc) : 16))
    part tests 110 "$PYTHON" -m pytest -q -n "$workers" -m "not slow" tests/ops/triton
fi
bench operators 110 '' ops "${lengths[@]}"
bench towers 30 '' towers

part summary 30 "$PYTHON" scripts/summarise_bench.py "$folder"
exit "$status"
