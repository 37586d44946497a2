"""Measures what the attention of trained models does, and writes it to scripts/results/analysis.

    python scripts/measure_analysis.py RUN ... --data SET --random NAME ...
    python scripts/measure_analysis.py --tables

The first runs `openclip-linattn analyze` on the runs, of the drawn shapes SET, and smoothing also on models with
random weights; it writes a JSON file with its command for each analysis, and two pictures. The second prints the
tables of the page beside the results, made of these files.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from openclip_linattn.cli.analyze.options import number, with_interval
from openclip_linattn.errors import UserError
from openclip_linattn.files import read_json, write_json

RESULTS = Path(__file__).parent / "results" / "analysis"
MAPS = ("--images", "4", "--map", "class", "--map", "rollout")
FAITHFULNESS = ("--images", "200", "--label-set", "color")
SPECTRUM = ("--images", "8")
SMOOTHING = ("--tokens", "64,256,1024,4096,16384", "--rows", "2")

Fields = dict[str, Any]


def measure(runs: Sequence[str], data: str, random: Sequence[str], out: Path) -> None:
    """Run the four analyses and write what they find into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    maps(runs, data, out)
    spectrum(runs, data, out)
    faithfulness(runs, data, out)
    smoothing(runs, random, out)


def maps(runs: Sequence[str], data: str, out: Path) -> None:
    """maps.png and maps.json: the overview of the gallery, and how far the weights of every layer spread."""
    with tempfile.TemporaryDirectory() as folder:
        command, found = analyze("maps", *runs, "--data", data, *MAPS, "--out", folder)
        (out / "maps.png").write_bytes((Path(folder) / "maps.png").read_bytes())
    write(out / "maps.json", command, rows=found["maps"])


def spectrum(runs: Sequence[str], data: str, out: Path) -> None:
    """spectrum.json: the means over the heads of every layer, and the sums over layers."""
    from openclip_linattn.analysis.spectrum import by_layer

    command, found = analyze("spectrum", *runs, "--data", data, *SPECTRUM)
    for each in found:
        each["layers"] = by_layer(each.pop("heads"))
        del each["path"]
    write(out / "spectrum.json", command, models=found)


def faithfulness(runs: Sequence[str], data: str, out: Path) -> None:
    """faithfulness.json: a row per model and map, the controls among them."""
    command, found = analyze("faithfulness", *runs, "--data", data, *FAITHFULNESS)
    write(out / "faithfulness.json", command, rows=found["rows"])


def smoothing(runs: Sequence[str], random: Sequence[str], out: Path) -> None:
    """smoothing.json and smoothing.png: the means over layers at every number of tokens."""
    names = [word for name in random for word in ("--random", name)]
    picture = ("--picture", str(out / "smoothing.png"))
    command, found = analyze("smoothing", *runs, *names, *SMOOTHING, *picture)
    for row in found:
        del row["layers"]
    write(out / "smoothing.json", command, rows=found)


def analyze(*words: str) -> tuple[str, Any]:
    """Run `openclip-linattn analyze` in this process, and return its command line and what it prints as JSON."""
    from openclip_linattn.cli import app

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        app(["analyze", *words, "--json"], standalone_mode=False)
    shown = [f".../{Path(word).name}" if Path(word).is_absolute() else word for word in words]
    return shlex.join(["openclip-linattn", "analyze", *shown]), json.loads(printed.getvalue())


def write(path: Path, command: str, **content: Any) -> None:
    """Write what was found, to six digits, below the command and the machine."""
    import torch

    from openclip_linattn.bench.machine import processor

    machine = {"processor": processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    write_json(path, {"command": command, "machine": machine, **rounded(content)})


def rounded(value: Any) -> Any:
    """The value with every float in it rounded to six digits."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def tables(folder: Path = RESULTS) -> dict[str, str]:
    """The page's tables in Markdown, by what they are about."""
    made: dict[str, tuple[str, Callable[[Fields], Iterator[list[str]]]]] = {
        "faithfulness": ("faithfulness", _faithfulness),
        "spectrum": ("spectrum", _spectrum),
        "sum over layers": ("spectrum", _sums),
        "smoothing": ("smoothing", _smoothing),
    }
    found = {}
    for about, (name, table) in made.items():
        head, *rows = table(read_json(folder / f"{name}.json"))
        lines = [head, ["---"] * len(head), *rows]
        found[about] = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return found


def _faithfulness(report: Fields) -> Iterator[list[str]]:
    chance = number("box_area")(report["rows"][0])
    scores = ["ROC-AUC, by chance 0.5", f"PR-AUC, by chance {chance}"]
    yield ["model", "map", "MoRF", "LeRF", "MoRF - LeRF", "MoRF above random", *scores]
    names = ("morf", "lerf", "gap", "above_random", "roc_auc", "pr_auc")
    for row in report["rows"]:
        yield [row["checkpoint"], row["map"], *(with_interval(name)(row) for name in names)]


def _spectrum(report: Fields) -> Iterator[list[str]]:
    yield [
        *("model", "layer", "radius", "largest row sum", "absorption", "token-specific share"),
        *("cosine to the Perron vector", "of a constant vector", "centred", "compared"),
    ]
    names = ("radius", "row_sum_max", "absorption_mean", "token_share")
    names += ("cosine_left", "constant_left", "correlation_left")
    for model in report["models"]:
        for row in model["layers"]:
            numbers = [number(name)(row) for name in names]
            yield [model["checkpoint"], str(row["layer"]), *numbers, f"{row['compared_left']:.0%}"]


def _sums(report: Fields) -> Iterator[list[str]]:
    yield ["model", "norm over closed form", "cosine", "difference", "from other layers", "from the tail"]
    names = ("norm_ratio", "cosine", "difference", "difference_truncated", "tail")
    for model in report["models"]:
        yield [model["checkpoint"], *(number(name)(model["sum_over_layers"]) for name in names)]


def _smoothing(report: Fields) -> Iterator[list[str]]:
    """A row per model, each measure at the least and the largest number of tokens."""
    groups: dict[str, list[Fields]] = {}
    for row in report["rows"]:
        groups.setdefault(row["model"], []).append(row)
    ends = "{:,} → {:,} tokens".format(*(report["rows"][at]["tokens"] for at in (0, -1)))
    measures = {"contrast": "largest / mean", "evenness": "entropy / log N", "gradient": "norm of dw/dq"}
    measures["relative_gradient"] = "relative"
    yield ["attention", f"weights, {ends}", *measures.values()]
    for group in groups.values():
        cells = [" → ".join(number(name, 4)(group[at]) for at in (0, -1)) for name in measures]
        yield [group[0]["attention"], "trained" if group[0]["trained"] else "random", *cells]


def main() -> None:
    """Measure, or print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folder or checkpoint")
    parser.add_argument("--data", help="test images of the drawn shapes")
    parser.add_argument("--random", action="append", default=[], metavar="NAME", help="as for smoothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder to write into")
    parser.add_argument("--tables", action="store_true", help="print the tables, and measure nothing")
    given = parser.parse_args()
    if not given.tables:
        if not given.runs or given.data is None:
            parser.error("give the runs and --data SET, or --tables")
        measure(given.runs, given.data, given.random, given.out)
    for about, table in tables(given.out).items():
        sys.stdout.write(f"{about}\n\n{table}\n\n")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
