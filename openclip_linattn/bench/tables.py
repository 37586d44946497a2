"""A report as a table on standard output, with plain words where a number would not be true."""

from collections.abc import Callable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from openclip_linattn.bench.report import FAILED, Report, Row
from openclip_linattn.bench.sweep import EXTRAPOLATED, MEASURED
from openclip_linattn.bench.words import bytes_text, count_text, seconds_text

_PLAIN_WIDTH = 180  # a file or a pipe has no width to keep to
_NOTHING = "-"
_Cell = Callable[[Row], str]


def print_report(report: Report) -> None:
    """Prints one table per pass, and below them how the numbers were measured."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    for direction in dict.fromkeys(str(row["pass"]) for row in report.rows):
        console.print(_table(report, direction))
    for line in _notes(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(report: Report, direction: str) -> Table:
    columns = _OPERATORS if report.benchmark == "ops" else _TOWERS
    energy = report.methods["energy"] != "not measured"
    shown = {heading: cell for heading, cell in columns.items() if energy or heading != "energy"}
    table = Table(title=direction, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    size = next(iter(shown))
    for number, heading in enumerate(shown):
        table.add_column(heading, justify="left" if number == 1 else "right", no_wrap=number < 2)
    rows = [row for row in report.rows if row["pass"] == direction]
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        cells = [escape(cell(row)) for cell in shown.values()]
        last = following is not None and shown[size](following) != shown[size](row)
        table.add_row(*cells, end_section=last)
    return table


def _notes(report: Report) -> list[str]:
    ceilings, environment = report.ceilings, report.environment
    where = environment["device"]
    if environment["device_type"] == "cpu":
        where += f", {environment['threads']} thread(s)"
    shares = {
        "ops": "floor: the time to move the least bytes (4T forward, 11T with backward; T is one (B, H, N, D) tensor) "
        "or to do the products, whichever is longer, at these rates, over the time",
        "towers": "floor: the time of the products at the measured rate, over the time; FLOP ratio: the products of "
        "the softmax tower over the row's",
    }
    return [
        f"{where}; torch {environment['torch']}; {environment['dtype']}; kernels: {environment['kernel']}",
        f"measured in this run: copy {ceilings['copy_bytes_per_s'] / 1e9:,.0f} GB/s (read and written), "
        f"matrix products {ceilings['matmul_flops_per_s'] / 1e12:,.3g} TFLOP/s",
        shares[report.benchmark],
        f"time: median of the rounds, spread: their middle half; {report.methods['time']}",
        f"memory: {report.methods['memory']}",
        f"energy: {report.methods['energy']}",
    ]


def _status(row: Row) -> str:
    """Empty for a plain measurement."""
    return "" if row["status"] == MEASURED else str(row["status"])


def _time(row: Row) -> str:
    return _NOTHING if row["seconds"] is None else seconds_text(row["seconds"])


def _spread(row: Row) -> str:
    if row["seconds_q1"] is None:
        return _NOTHING
    return f"{100 * (row['seconds_q3'] - row['seconds_q1']) / row['seconds']:.0f} %"


def _rate(column: str) -> _Cell:
    return lambda row: _NOTHING if row[column] is None else count_text(row[column])


def _peak(row: Row) -> str:
    return _NOTHING if row["peak_bytes"] is None else bytes_text(row["peak_bytes"])


def _peak_in_tensors(row: Row) -> str:
    return _NOTHING if row["peak_T"] is None else f"{row['peak_T']:.2f}"


def _energy(row: Row) -> str:
    return "not measured" if row["energy_joules"] is None else f"{row['energy_joules']:.3g} J"


def _ratio(column: str, form: str) -> _Cell:
    """A ratio of a candidate that passed its check; against an extrapolated time it says so."""

    def cell(row: Row) -> str:
        if row["check"] == FAILED:
            return FAILED
        if row[column] is None:
            return _NOTHING
        extrapolated = column == "softmax_speedup" and row.get("softmax_status") == EXTRAPOLATED
        return form.format(row[column]) + (f" ({EXTRAPOLATED})" if extrapolated else "")

    return cell


def _text(column: str) -> _Cell:
    return lambda row: str(row[column])


def _count(column: str) -> _Cell:
    return lambda row: f"{row[column]:,}"


_SPEEDUP, _SHARE = "{:,.2f}x", "{:.0%}"
_OPERATORS: dict[str, _Cell] = {
    "tokens": _count("tokens"),
    "operator": _text("operator"),
    "time": _time,
    "spread": _spread,
    "tokens/s": _rate("tokens_per_s"),
    "peak": _peak,
    "peak/T": _peak_in_tensors,
    "softmax/time": _ratio("softmax_speedup", _SPEEDUP),
    "time/bare": _ratio("bare_ratio", _SPEEDUP),
    "floor/time": _ratio("floor_share", _SHARE),
    "energy": _energy,
    "": _status,
}
_TOWERS: dict[str, _Cell] = {
    "px": _count("pixels"),
    "model": _text("model"),
    "tokens": _count("tokens"),
    "time": _time,
    "spread": _spread,
    "images/s": _rate("images_per_s"),
    "tokens/s": _rate("tokens_per_s"),
    "peak": _peak,
    "softmax/time": _ratio("softmax_speedup", _SPEEDUP),
    "FLOP ratio": _ratio("flop_ratio", _SPEEDUP),
    "floor/time": _ratio("floor_share", _SHARE),
    "energy": _energy,
    "": _status,
}
