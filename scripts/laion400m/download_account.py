"""Says how the download of a folder of shards went: rows by result, from img2dataset's *_stats.json.

    python3 download_account.py SHARDS

Exit status 1 where nothing was downloaded, or where a shard was begun and not finished. Needs Python alone.
"""

import json
import sys
from collections import Counter
from pathlib import Path


def main(folder: Path) -> int:
    """Prints the account of a folder; returns the exit status."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for path in sorted(folder.glob("*_stats.json")):
        stats = json.loads(path.read_text(encoding="utf-8"))
        counts.update(
            {key: stats[key] for key in ("count", "successes", "failed_to_download", "failed_to_resize")}
        )
        reasons.update({key: n for key, n in stats["status_dict"].items() if key != "success"})
    rows = counts["count"]
    print(
        f"{folder}: {rows:,} rows, {counts['successes']:,} downloaded, {counts['failed_to_download']:,} failed to "
        f"download, {counts['failed_to_resize']:,} were no readable image"
    )
    for reason, number in reasons.most_common(10):
        print(f"  {number:,} ({number / rows:.1%}): {reason}")
    unfinished = [path.name for path in sorted(folder.glob("*.tar")) if not stats_of(path).exists()]
    if unfinished:
        print(f"error: not finished: {', '.join(unfinished)}; run the download again", file=sys.stderr)
    elif not counts["successes"]:
        print("error: nothing was downloaded", file=sys.stderr)
    return 0 if counts["successes"] and not unfinished else 1


def stats_of(tar: Path) -> Path:
    """The file that img2dataset writes when a shard is done."""
    return tar.with_name(f"{tar.stem}_stats.json")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
