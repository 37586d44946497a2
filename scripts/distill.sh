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
case $PYTHON in # macOS has no realpath -s
    /*) ;;
    */*) PYTHON=$PWD/$PYTHON ;;
esac
cd "$here"

fail() {
    echo "error: $1" >&2
    exit 2
}

teacher=$1 kind=$2 out=$3
shift 3
logs=$out name=distilled
words=("$@")
for i in "${!words[@]}"; do # the last one counts, as for OpenCLIP
    case ${words[i]} in
        --model | --model=*) fail "--model is what the conversion makes; the model of a teacher is MODEL=NAME, before bash" ;;
        --name) name=${words[i + 1]:-} ;;
        --name=*) name=${words[i]#*=} ;;
        --logs) logs=${words[i + 1]:-} ;;
        --logs=*) logs=${words[i]#*=} ;;
    esac
done

read -r -d '' -a sets <<<"${EVAL:-}" || true # of all its lines
if [ ${#sets[@]} -gt 0 ]; then # a wrong one must not be found after the training
    "$PYTHON" - "${sets[@]}" <<'END'
import sys

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.opening import open_tasks
from openclip_linattn.zeroshot.options import EvaluationOptions
from openclip_linattn.zeroshot.watching import unwatched

try:
    open_tasks(sys.argv[1:], EvaluationOptions(), unwatched)
except UserError as error:
    print(f"error: EVAL: {error}", file=sys.stderr)
    sys.exit(2)
END
fi

mkdir -p "$out"
asked="$teacher to $kind${MODEL:+, MODEL=$MODEL}${CONVERT:+, CONVERT=$CONVERT}"
if [ ! -f "$out/conversion.json" ]; then
    rm -f "$out/converted.pt" # of a conversion that was interrupted
    # shellcheck disable=SC2086 # CONVERT holds several options
    if ! "$PYTHON" -m openclip_linattn.cli convert "$teacher" --to "$kind" ${MODEL:+--model "$MODEL"} ${CONVERT:-} \
        --output "$out/converted.pt" --json >"$out/conversion.json.new"; then
        rm -f "$out/conversion.json.new"
        [ -n "${MODEL:-}" ] || [ -d "$teacher" ] || echo "(--model NAME is MODEL=NAME here, before bash)" >&2
        exit 2
    fi
    echo "$asked" >"$out/conversion.asked"
    mv "$out/conversion.json.new" "$out/conversion.json"
elif [ -f "$out/conversion.asked" ] && [ "$(cat "$out/conversion.asked")" != "$asked" ]; then
    fail "$out holds the conversion of $(cat "$out/conversion.asked"), not of $asked; give another OUT"
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

if [ ${#sets[@]} -gt 0 ]; then
    "$PYTHON" -m openclip_linattn.cli eval "$logs/$name" "${sets[@]/#/--data=}"
fi
