"""The README's benchmark tables are those of the committed results."""

import csv
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "scripts" / "results" / "bench"
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.split("<!-- benchmark -->")[1].split("<!-- end of benchmark -->")[0]
KINDS = ("normlinear", "linear", "neumannlinear", "lininfsa", "infsa")


def results(folder):
    (path,) = (RESULTS / folder).glob("*.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def measured(folder):
    """Rows of forward and backward passes by operator and tokens, all of them checked in their run."""
    rows = {(row["operator"], row["tokens"]): row for row in results(folder) if row["pass"] != "forward"}
    assert {row["check"] for row in rows.values()} == {"passed"}
    return rows


def duration(row):
    if not row["seconds"]:
        return "-"
    seconds = float(row["seconds"])
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def operator_table():
    rows = measured("batch1")
    yield f"| tokens | softmax | {' | '.join(KINDS)} |"
    yield f"|{'---|' * (len(KINDS) + 2)}"
    for tokens in dict.fromkeys(tokens for _, tokens in rows):
        cells = [duration(rows["softmax", tokens])]
        for kind in KINDS:
            ratio = rows[kind, tokens]["softmax_speedup"]
            cells.append(duration(rows[kind, tokens]) + (f" ({float(ratio):.3g}×)" if ratio else ""))
        yield f"| {int(tokens):,} | {' | '.join(cells)} |"


def bare_table():
    yield "| batch | tokens | normlinear / packed bare | / faster bare | linear / faster bare | peak memory / bare |"
    yield f"|{'---|' * 6}"
    for folder in ("batch1", "batch8"):
        rows = measured(folder)
        for tokens in dict.fromkeys(tokens for _, tokens in rows):
            ours, linear, bare, dense = (
                rows[name, tokens] for name in ("normlinear", "linear", "bare", "bare-contiguous")
            )
            same = float(ours["seconds"]) / float(bare["seconds"])
            memory = int(ours["peak_bytes"]) / min(int(bare["peak_bytes"]), int(dense["peak_bytes"]))
            numbers = (same, float(ours["bare_ratio"]), float(linear["bare_ratio"]), memory)
            yield f"| {ours['batch']} | {int(tokens):,} | " + " | ".join(f"{x:.2f}" for x in numbers) + " |"


def tower_table():
    rows = {(row["attention"], row["pixels"]): row for row in results("towers")}
    assert {row["check"] for row in rows.values()} == {"passed"}
    yield "| pixels | tokens | ViT-B-16-softmax | ViT-B-16-normlinear | ratio | ratio of FLOP |"
    yield f"|{'---|' * 6}"
    for pixels in dict.fromkeys(pixels for _, pixels in rows):
        softmax, ours = rows["softmax", pixels], rows["normlinear", pixels]
        times = " | ".join(f"{float(row['seconds']):.3g} s" for row in (softmax, ours))
        ratios = " | ".join(f"{float(ours[name]):.2f}" for name in ("softmax_speedup", "flop_ratio"))
        yield f"| {pixels} | {int(ours['tokens']):,} | {times} | {ratios} |"


def part_table(report):
    yield "| part | time of one sample | share |"
    yield "|---|---|---|"
    for row in report["parts"]:
        yield f"| {row['part']} | {1e6 * row['seconds']:,.0f} µs | {row['share']:.0%} |"


def loader_table(report):
    yield "| data-loader workers | samples/s | over one process that does the parts alone |"
    yield "|---|---|---|"
    for row in report["loaders"]:
        yield f"| {row['workers']} | {row['samples_per_s']:,.0f} | {row['of_parts']:.2f} |"


@pytest.mark.parametrize("table", [part_table, loader_table])
def test_tables_of_reading(table):
    report = json.loads((RESULTS.parent / "reading" / "reading.json").read_text(encoding="utf-8"))
    section = README.split("<!-- reading -->")[1].split("<!-- end of reading -->")[0]
    assert "\n".join(table(report)) in section


def test_cost_of_a_check():
    cost = json.loads((RESULTS.parent / "check" / "cost.json").read_text(encoding="utf-8"))
    rate, laion = cost["rates"]["judging"]["samples_per_second"], cost["laion_400m"]
    text = " ".join(README.split())
    assert f"{rate:,} samples a second and core" in text
    assert (
        f"{laion['samples'] / rate / 3600:.0f} core-hours, {laion['hours_on_64_cores']} hours on 64 cores"
        in text
    )
    assert f"the disk gives {laion['gigabytes_per_second_to_read']:.2g} GB/s" in text


@pytest.mark.parametrize("table", [operator_table, bare_table, tower_table])
def test_tables(table):
    assert "\n".join(table()) in SECTION


@pytest.mark.parametrize(("name", "file"), [("before", "profile-eager.txt"), ("now", "profile.txt")])
def test_profile(name, file):
    """What the attention module allocates, and its copies' share of the time."""
    text = (RESULTS / file).read_text(encoding="utf-8")
    allocated = sum(float(x) for x in re.findall(r"│ ([\d.]+) +│\n", text.split("One attention module")[1]))
    (copies,) = re.findall(r"│ copies +│ [\d,]+ +│ (\d+) +│", text)
    (total,) = re.findall(r"│ all +│ +│ ([\d,]+) +│", text)
    assert f"| {name} | {allocated:.1f} T | {copies} ms | {total} ms |" in SECTION


def test_tables_of_high_resolutions():
    section = README.split("<!-- resolution -->")[1].split("<!-- end of resolution -->")[0]
    with (RESULTS.parent / "resolution" / "resolution.csv").open(encoding="utf-8", newline="") as file:
        rows = {(row["model"], row["pass"], int(row["pixels"])): row for row in csv.DictReader(file)}
    assert not [key for key, row in rows.items() if row["failure"]]
    table = [line for line in section.splitlines() if line.startswith("|")]
    assert table == [*times_by_size(rows), *passes_of_linear_towers(rows)]


RESOLUTION_PAIRS = (
    ("ViT-S-16-softmax", "ViT-S-16-normlinear"),
    ("InfViT-4-16-softmax", "InfViT-4-16-lininfsa"),
)


def seconds_of(row):
    text = (
        f"{float(row['seconds']):,.3g} s"
        if float(row["seconds"]) < 1000
        else f"{float(row['seconds']) / 3600:.3g} h"
    )
    return text if row["status"] == "measured" else f"{text}, extrapolated"


def gib(count):
    return f"{int(count) / 2**30:.2f} GiB"


def times_by_size(rows):
    """One image without gradients in low memory: the time of each tower, and softmax's over the other's."""
    names = [f"`{name}`" for pair in RESOLUTION_PAIRS for name in (*pair, "ratio")]
    lines = [f"| side, px | tokens | {' | '.join(names).replace('`ratio`', 'ratio')} |", "|" + "---|" * 8]
    for pixels in sorted({pixels for _, mode, pixels in rows if mode == "low memory"}):
        cells = [f"{pixels}", f"{int(rows['ViT-S-16-softmax', 'low memory', pixels]['tokens']):,}"]
        for pair in RESOLUTION_PAIRS:
            both = [rows[name, "low memory", pixels] for name in pair]
            ratio = float(both[0]["seconds"]) / float(both[1]["seconds"])
            cells += [*map(seconds_of, both), f"{ratio:.3g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def passes_of_linear_towers(rows):
    """Speed and memory of the linear towers in the passes that were measured."""
    lines = [
        "| tower | px | tokens/s | memory | memory, plain | forward and backward | its memory |",
        "|" + "---|" * 7,
    ]
    for _, name in RESOLUTION_PAIRS:
        for pixels in sorted({pixels for model, _, pixels in rows if model == name}):
            found = [rows.get((name, mode, pixels)) for mode in ("low memory", "plain", "training")]
            memory = [gib(row["peak_bytes"]) if row and row["peak_bytes"] else "-" for row in found]
            both = seconds_of(found[2]) if found[2] else "-"
            cells = [
                f"`{name}`",
                f"{pixels}",
                f"{float(found[0]['tokens_per_s']):,.0f}",
                *memory[:2],
                both,
                memory[2],
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines
