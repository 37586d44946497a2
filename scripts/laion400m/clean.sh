#!/usr/bin/env bash
# Rewrites what is usable into even shards of 10,000 pairs, without duplicates and without what LAION marks as unsafe.
#   bash scripts/laion400m/clean.sh SHARDS CLEAN [OPTIONS OF `openclip-linattn data clean`]
# Run again after an interruption it goes on; CLEAN/account.json says what was left out and why.
#
# Without OPTIONS the filters are: a CLIP similarity of at least 0.3 and captions of at least 5 characters, which are
# LAION-400M's own (arXiv 2111.02114) and drop nothing unless the list is another one; no pair that is marked NSFW; and
# one pair for each image, by its bytes. OPTIONS replace all of these. A list without LAION-400M's columns needs that,
# such as Re-LAION's, which has no NSFW: clean.sh SHARDS CLEAN --min-similarity 0.28 --deduplicate image
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: bash scripts/laion400m/clean.sh SHARDS CLEAN [OPTIONS]" >&2
    exit 2
fi
shards=$(realpath -m "$1")
clean=$(realpath -m "$2")
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh

[ $# != 0 ] || set -- --min-similarity 0.3 --min-caption 5 --drop-nsfw NSFW --deduplicate image
exec "$PYTHON" -m openclip_linattn.cli data clean "$shards" "$clean" --samples-per-shard 10000 "$@"
