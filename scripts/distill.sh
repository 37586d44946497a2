#!/usr/bin/env bash
# Gives a trained softmax CLIP linear attention and distils the softmax model into it: convert, distil, evaluate.
#   bash scripts/distill.sh TEACHER KIND OUT --train-data SHARDS ... [flags of OpenCLIP's training]
#   EVAL='shapes digits' bash scripts/distill.sh ...    evaluates the student on these sets at the end
#   MODEL=ViT-B-16 bash scripts/distill.sh laion400m_e32 normlinear OUT ...    a teacher that no run describes
#   LAUNCH='torchrun --nproc_per_node 8 -m --' bash scripts/distill.sh ...     on several GPUs
# TEACHER is a checkpoint, a run folder or a pretrained tag; CONVERT='--text' hands options to the conversion. OpenCLIP
# adds the cross-entropy to the teacher's similarities to the contrastive loss, and takes no --accum-freq with it.
set -euo pipefail
if [ $# -lt 4 ]; then
    sed -n 's/^#   //p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi

here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
PYTHON=$(realpath -s "$PYTHON")
cd "$here"

teacher=$1 kind=$2 out=$3
shift 3
mkdir -p "$out"
if [ ! -f "$out/conversion.json" ]; then
    rm -f "$out/converted.pt" # of a conversion that was interrupted
    # shellcheck disable=SC2086 # CONVERT holds several options
    "$PYTHON" -m openclip_linattn.cli convert "$teacher" --to "$kind" ${MODEL:+--model "$MODEL"} ${CONVERT:-} \
        --output "$out/converted.pt" --json >"$out/conversion.json.new"
    mv "$out/conversion.json.new" "$out/conversion.json"
fi
field() { "$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]] or "")' "$out/conversion.json" "$1"; }
weights=$(field source) teacher_model=$(field source_model) student=$(field model)
config=$(field config)
if [ -n "$config" ]; then
    export OPENCLIP_LINATTN_MODEL_CONFIGS=$config${OPENCLIP_LINATTN_MODEL_CONFIGS:+:$OPENCLIP_LINATTN_MODEL_CONFIGS}
fi
"$PYTHON" -c 'import json, sys; print(*json.load(open(sys.argv[1]))["notes"], sep="\n")' "$out/conversion.json" >&2

read -ra launch <<<"${LAUNCH:-$PYTHON -m}"
"${launch[@]}" openclip_linattn.train --model "$student" --pretrained "$out/converted.pt" \
    --distill-model "$teacher_model" --distill-pretrained "$weights" --logs "$out" --name distilled "$@"

sets=()
for set in ${EVAL:-}; do sets+=(--data "$set"); done
if [ ${#sets[@]} -gt 0 ]; then
    "$PYTHON" -m openclip_linattn.cli eval "$out/distilled" "${sets[@]}"
fi
