"""The page's tables of the evaluation, from the JSON of the measurements."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from openclip_linattn.files import read_json

Report = dict[str, Any]


def tables(folder: Path) -> dict[str, str]:
    """Return the Markdown tables of the measurements in `folder`, by what they are about."""
    found: dict[str, str] = {}
    for about, (file, table) in _TABLES.items():
        path = folder / f"{file}.json"
        if path.is_file() and (lines := list(table(read_json(path)))):
            found[about] = "\n".join(lines)
    return found


def _rows(*rows: list[str]) -> Iterator[str]:
    headings, *lines = rows
    yield f"| {' | '.join(headings)} |"
    yield "|" + "---|" * len(headings)
    for line in lines:
        yield f"| {' | '.join(line)} |"


def _libraries(report: Report) -> Iterator[str]:
    headings = ["model", "images", "top-1", "other top-1 than OpenCLIP", "other first five"]
    headings += ["other top-1 than clip_benchmark", "other first five"]
    yield from _rows(
        headings,
        *(
            [
                row["model"],
                f"{row['n']:,}",
                _percent(row["ours"]["top1"]),
                *(
                    str(row[library][key])
                    for library in ("openclip", "clip_benchmark")
                    for key in ("top1_differs", "top5_differs")
                ),
            ]
            for row in report["libraries"]
        ),
    )


def _precisions(report: Report) -> Iterator[str]:
    if not report["precisions"]:
        return
    yield from _rows(
        ["run", "labels", "images", "fp32", "amp_bf16", "points", "right in fp32 only", "in amp_bf16 only"],
        *(
            [
                _run(row),
                f"{row['dataset']}, {row['label_set']}",
                f"{row['n']:,}",
                _percent(row["fp32"]),
                _percent(row["amp_bf16"]),
                f"{row['points']:+.2f}",
                str(row["only_fp32"]),
                str(row["only_amp_bf16"]),
            ]
            for row in report["precisions"]
        ),
    )


def _imagenet21k(report: Report) -> Iterator[str]:
    yield from _rows(
        ["model", "classes", "texts", "time", "time of one core", "peak memory of the process"],
        [
            report["model"],
            f"{report['classes']:,}",
            f"{report['texts']:,}",
            f"{report['seconds'] / 60:.1f} min",
            f"{report['cpu_seconds'] / 60:.1f} min",
            f"{report['peak_rss_bytes'] / 1e9:.2f} GB ({report['peak_rss_bytes_before'] / 1e9:.2f} before)",
        ],
    )


def _speed(report: Report) -> Iterator[str]:
    yield from _rows(
        [
            "model",
            "evaluation",
            "bare tower",
            "ratio",
            "tower, one image",
            "reading, one image",
            "highest ratio",
        ],
        *(
            [
                row["model"],
                f"{row['images_per_s']:.1f} images/s",
                f"{row['tower_images_per_s']:.1f} images/s",
                f"{row['ratio']:.2f}",
                f"{row['tower_ms_per_image']:.1f} ms",
                f"{row['reading_ms_per_image']:.1f} ms",
                f"{row['highest_ratio_on_shared_cores']:.2f}",
            ]
            for row in report["models"]
        ),
    )


def _resolutions(report: Report) -> Iterator[str]:
    rows = report["rows"]
    tokens = {row["image_size"]: row["tokens"] for row in rows}
    lines: dict[tuple[str, str], dict[int, str]] = {}  # by run and labels
    for row in rows:
        line = lines.setdefault((_run(row), f"{row['dataset']}, {row['label_set']}"), {})
        trained = row["image_size"] == row["trained_image_size"]
        line[row["image_size"]] = f"**{_percent(row['top1'])}**" if trained else _percent(row["top1"])
    yield from _rows(
        ["run", "labels", *(f"{size} px, {count} tokens" for size, count in tokens.items())],
        *([*names, *(cells[size] for size in tokens)] for names, cells in lines.items()),
    )


def _run(row: dict[str, Any]) -> str:
    """The model, and the run where that has a name of its own."""
    named = row["run"] not in (None, row["model"])
    return f"{row['model']} ({row['run']})" if named else str(row["model"])


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


_TABLES: dict[str, tuple[str, Callable[[Report], Iterator[str]]]] = {
    "agreement with OpenCLIP and clip_benchmark": ("agreement", _libraries),
    "precision": ("agreement", _precisions),
    "class embeddings of ImageNet-21K": ("imagenet21k", _imagenet21k),
    "speed": ("speed", _speed),
    "resolution": ("resolutions", _resolutions),
}
