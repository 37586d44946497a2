#!/usr/bin/env bash
# Downloads the images of LAION-400M's parquet files into webdataset shards, with img2dataset. Run again, it goes on
# with the shards that are not there yet. Needs no GPU.
#   bash scripts/laion400m/download.sh PARQUETS SHARDS
# PARQUETS is a parquet file or a folder of them, SHARDS the folder for 00000.tar, 00000_stats.json, ...
# Environment: PROCESSES (default: all cores), THREADS per process (default 128; 64 with systemd-resolved, which does
# not bear more), TIMEOUT in seconds (default 10); for lists with other columns than LAION-400M's: URL_COLUMN,
# CAPTION_COLUMN, and KEEP, those that are kept in the json of each sample.
#
# The settings are those of LAION's own command for LAION-400M,
#   https://github.com/rom1504/img2dataset/blob/main/dataset_examples/laion400m.md
# 256 px, and with img2dataset's defaults a white border to a square, JPEG quality 95 and 10,000 rows per shard. Ours
# are two retries. 413 M rows took LAION 3.5 days on 16 cores with 2 Gbit/s, for 10 TB; since then many links died.
#
# The original lists contain links to illegal images. LAION asks to use Re-LAION instead, from which they are removed
# (https://laion.ai/blog/relaion-5b/). It updates LAION-5B, not LAION-400M, and has no NSFW column: set KEEP, as in
# KEEP='["similarity","punsafe","pwatermark","hash"]'. Where a column is missing, this script says which there are.
#
# Images whose server sends `X-Robots-Tag: noai`, noimageai, noindex or noimageindex are left out: that is
# img2dataset's default (--disallowed_header_directives) and it is kept. They count as failed downloads with the
# reason "Use of image disallowed by X-Robots-Tag directive", and cost that part of the set.
set -euo pipefail
if [ $# != 2 ]; then
    echo "usage: bash scripts/laion400m/download.sh PARQUETS SHARDS" >&2
    exit 2
fi
parquets=$(realpath -m "$1")
shards=$(realpath -m "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/laion400m/img2dataset.sh

url_column=${URL_COLUMN:-URL}
caption_column=${CAPTION_COLUMN:-TEXT}
keep=${KEEP:-[\"NSFW\",\"similarity\",\"LICENSE\"]}
"$IMG2DATASET/bin/python" scripts/laion400m/download_lists.py "$parquets" "$url_column" "$caption_column" "$keep"
mkdir -p "$shards"
exec 9>"$shards/.download.lock"
locked=0
flock --nonblock --conflict-exit-code 75 9 || locked=$?
if [ "$locked" = 75 ]; then # any other status: a file system without locks
    echo "error: another download.sh is at work in $shards" >&2
    exit 2
fi
rm -f "$shards/sizes.json" # of `data check`, which writes it anew: img2dataset stumbles over any .json without a number
"$IMG2DATASET/bin/img2dataset" --url_list "$parquets" --input_format parquet \
    --url_col "$url_column" --caption_col "$caption_column" --save_additional_columns "$keep" \
    --output_folder "$shards" --output_format webdataset --number_sample_per_shard 10000 \
    --image_size 256 --resize_mode border --encode_format jpg --encode_quality 95 \
    --processes_count "${PROCESSES:-$(nproc)}" --thread_count "${THREADS:-128}" \
    --timeout "${TIMEOUT:-10}" --retries 2 --user_agent_token openclip_linattn \
    --incremental_mode incremental --enable_wandb False
# img2dataset ends with status 0 even where nothing could be downloaded.
exec "$IMG2DATASET/bin/python" scripts/laion400m/download_account.py "$shards"
