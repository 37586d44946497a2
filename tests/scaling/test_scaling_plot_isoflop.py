"""Curves of equal compute: interpolated points, known minima, honest intervals, figures, and sentences of refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from openclip_scaling.cli import main
from openclip_scaling.errors import UserError
from openclip_scaling.fitting.analysis import Settings, analyse
from openclip_scaling.fitting.optimum import best_split
from openclip_scaling.fitting.points import Points
from openclip_scaling.isoflops.isoflop import isoflop, law_isoflop
from openclip_scaling.isoflops.parabola import Minimum, fit_parabola, minimum_within
from openclip_scaling.pictures import interactive_isoflop
from openclip_scaling.pictures.isoflop_plot import budget_colors, isoflop_figure
from openclip_scaling.pictures.plot import save_figure, styles

SIZES = np.geomspace(1.0, 16.0, 6)  # GMAC per pair
FLOP = 6e9  # of training per GMAC and pair
SETTINGS = Settings(draws=100)
CHINCHILLA = Settings(draws=100, laws=("chinchilla",), x="gmac_per_pair,samples_seen")


def loss(size: Any, samples: Any, level: float = 1.0) -> Any:
    return level * (0.3 + 1.2 * size**-0.5 + 900.0 * samples**-0.5)


def optimum(flop: float) -> float:
    """The size at which A / N^a + B / D^a is lowest where N D is fixed, for the loss above."""
    product = flop / FLOP
    return float(1.2 / 900.0 * product**0.5)


def table(
    sizes: Any = SIZES, kinds: tuple[str, ...] = ("linear", "softmax"), seeds: int = 2, noise: float = 0.0
) -> pd.DataFrame:
    """Runs of every size over the same range of compute, in twelve checkpoints."""
    generator = np.random.default_rng(0)
    rows = []
    for kind in kinds:
        for size in sizes:
            for seed in range(seeds):
                level = 1 + noise * generator.normal()
                for flop in np.geomspace(5e15, 5e17, 12):
                    samples = flop / (FLOP * size)
                    rows.append(
                        {"run": f"{kind}-{size:.3g}-{seed}", "attention": kind, "gmac_per_pair": size,
                         "parameters": 1e6 * size, "samples_seen": samples, "train_flop": flop,
                         "val_loss": loss(size, samples, level)}
                    )  # fmt: skip
    return pd.DataFrame(rows)


def test_points_are_interpolated_between_checkpoints_and_never_beyond() -> None:
    frame = table(seeds=1)
    # A run whose loss is a power of its compute is a straight line, on which interpolation is exact.
    frame["val_loss"] = frame["gmac_per_pair"] ** 0.1 * frame["train_flop"] ** -0.2
    frame = frame[(frame["gmac_per_pair"] > 2) | (frame["train_flop"] < 5e16)]
    early, late = (isoflop(frame, SETTINGS, budgets=[flop]).profiles[0].points for flop in (2e16, 2e17))
    assert early.y == pytest.approx(early.x**0.1 * 2e16**-0.2)
    assert len(early) == len(SIZES)
    assert late.x.min() > 2
    assert late.run == tuple(f"linear-{size:.3g}-0" for size in SIZES if size > 2)


def test_minima_are_those_of_the_law_that_made_the_runs() -> None:
    view = isoflop(table(), SETTINGS)
    assert len(view.budgets) == 4
    assert view.groups == ["linear", "softmax"]
    assert all(": lowest at " in sentence for sentence in view.sentences)
    for profile in view.profiles:
        assert profile.minimum is not None
        assert profile.minimum.size == pytest.approx(optimum(profile.flop), rel=0.1)
        lowest = loss(optimum(profile.flop), profile.flop / FLOP / optimum(profile.flop))
        assert profile.minimum.value == pytest.approx(lowest, rel=0.01)


def test_other_sizes_than_gmac_shift_nothing() -> None:
    by_cost = isoflop(table(), SETTINGS, budgets=[5e16])
    by_parameters = isoflop(table(), SETTINGS, "parameters", [5e16])
    for one, other in zip(by_cost.profiles, by_parameters.profiles, strict=True):
        assert one.minimum is not None
        assert other.minimum is not None
        assert other.minimum.size == pytest.approx(1e6 * one.minimum.size)


def test_the_interval_of_a_minimum_holds_the_truth_in_95_percent_of_cases() -> None:
    generator = np.random.default_rng(1)
    sizes = np.repeat(np.geomspace(1, 20, 4), 2)
    truth = 5.0
    held, found = 0, 0
    for _ in range(2000):
        logs = 0.05 * np.log(sizes / truth) ** 2 + 0.01 * generator.normal(size=len(sizes))
        interval = fit_parabola(
            Points(sizes, np.exp(logs), tuple(f"r{i}" for i in range(len(sizes))))
        ).vertex_interval()
        found += interval is not None
        held += interval is not None and interval[0] <= truth <= interval[1]
    assert found > 1900
    assert 0.94 < held / found < 0.96


def test_the_interval_is_where_the_slope_may_be_zero() -> None:
    generator = np.random.default_rng(2)
    sizes = np.repeat(np.geomspace(1, 20, 5), 2)
    logs = 0.1 * np.log(sizes / 4) ** 2 + 0.01 * generator.normal(size=10)
    parabola = fit_parabola(Points(sizes, np.exp(logs), tuple(f"r{i}" for i in range(10))))
    interval = parabola.vertex_interval()
    assert interval is not None
    assert parabola.vertex is not None
    assert interval[0] < parabola.vertex < interval[1]
    for edge in interval:
        slope = np.array([2 * np.log(edge / parabola.centre), 1.0, 0.0])
        t = slope @ [parabola.a, parabola.b, parabola.c] / np.sqrt(slope @ parabola.covariance @ slope)
        assert abs(t) == pytest.approx(2.3646, abs=1e-3)  # t table, 7 degrees of freedom


def test_three_runs_have_a_minimum_without_an_interval() -> None:
    view = isoflop(table(sizes=SIZES[::2], seeds=1), SETTINGS, budgets=[5e16])
    for profile in view.profiles:
        assert profile.minimum is not None
        assert profile.minimum.interval is None
        assert profile.minimum.label.endswith("(no interval)")
        assert profile.values.min() == pytest.approx(profile.minimum.value, rel=1e-3)


def test_few_runs_are_marked_as_not_reliable() -> None:
    four, twelve = (
        isoflop(table(sizes, seeds=seeds, noise=0.001), SETTINGS, budgets=[5e16]).profiles[0].minimum
        for sizes, seeds in ((SIZES[:4], 1), (SIZES, 2))
    )
    assert four is not None
    assert twelve is not None
    assert (four.reliable, twelve.reliable) == (False, True)
    assert four.label.endswith("not reliable")
    assert "not reliable" not in twelve.label


@pytest.mark.parametrize(
    ("logs", "words"),
    [
        (lambda u: -0.5 * u + 0.02 * u**2, "still falls at the largest size"),
        (lambda u: 0.1 * u + 0.01 * u**2, "rises from the smallest size on"),
        (lambda u: -0.1 * u**2, "does not bend upwards"),
    ],
)
def test_a_curve_without_a_minimum_says_why(logs: Any, words: str) -> None:
    frame = table()
    frame["val_loss"] = np.exp(logs(np.log(frame["gmac_per_pair"])))
    view = isoflop(frame, SETTINGS, budgets=[5e16])
    assert [profile.minimum for profile in view.profiles] == [None, None]
    assert all(words in remark for remark in view.sentences)
    assert len(view.sentences) == 2


def test_ends_of_runs_are_joined_by_size() -> None:
    frame = table(seeds=1)
    frame["run"] = [f"row{i}" for i in range(len(frame))]  # every checkpoint is a run of its own
    with pytest.raises(UserError, match="fewer than 3 model sizes have checkpoints on both sides"):
        isoflop(frame, SETTINGS, budgets=[6.5e16])
    joined = isoflop(frame, Settings(draws=100, points="ends"), budgets=[6.5e16])
    apart = isoflop(table(seeds=1), SETTINGS, budgets=[6.5e16])
    assert joined.profiles[0].points.y == pytest.approx(apart.profiles[0].points.y)


def test_runs_that_were_planned_for_equal_compute_are_compared_there() -> None:
    frame = table(seeds=1)
    frame["run"] = [f"row{i}" for i in range(len(frame))]
    frame["train_flop"] *= np.exp(0.005 * np.sin(np.arange(len(frame))))  # whole batches end a little off
    view = isoflop(frame, SETTINGS)
    assert len(view.budgets) == 4
    planned = np.geomspace(5e15, 5e17, 12)
    for profile in view.profiles:
        assert np.abs(np.log(planned / profile.flop)).min() < 0.02
        assert len(profile.points) == len(SIZES)


def test_ends_that_were_planned_for_one_compute_are_not_interpolated_between_others() -> None:
    planned = np.array([1.049e16, 4.196e16, 1.6784e17])  # one digit less is 5 % away from the first
    rows = table(seeds=1)
    rows = rows[rows.groupby("run").cumcount() < len(planned)].reset_index(drop=True)
    rows["train_flop"] = planned[rows.groupby("run").cumcount()]
    rows["run"] = [f"row{i}" for i in range(len(rows))]
    view = isoflop(rows, Settings(draws=100, points="ends"))
    assert view.budgets == pytest.approx(planned, rel=0.003)
    for profile in view.profiles:
        own = rows[
            (rows["attention"] == profile.group) & np.isclose(rows["train_flop"], profile.flop, rtol=0.003)
        ]
        assert profile.points.y == pytest.approx(own["val_loss"].to_numpy(), rel=2e-3)


def test_a_group_of_two_sizes_is_named_and_the_others_keep_their_colors() -> None:
    frame = table(kinds=("a", "b", "c"), seeds=1)
    frame = frame[(frame["attention"] != "a") | (frame["gmac_per_pair"] < 2)]
    view = isoflop(frame, SETTINGS)
    assert (view.groups, view.drawn) == (["a", "b", "c"], ["b", "c"])
    assert view.sentences[-1] == "a: no curve, fewer than three sizes have a common compute"
    assert [axes.get_title() for axes in isoflop_figure(view).axes if axes.get_visible()] == ["b", "c"]
    colors = {trace["name"]: trace["line"]["color"] for trace in interactive_isoflop.isoflop(view)["data"]
              if trace.get("name") in view.groups}  # fmt: skip
    assert colors == {name: color for name, (color, _) in styles("abc").items() if name != "a"}


def test_selections_that_are_not_made_are_named() -> None:
    notices = isoflop(table(seeds=1), Settings(draws=100, points="frontier"), budgets=[5e16]).notices
    assert "curves of equal compute follow every run; --points frontier is not used for them" in notices


def test_runs_without_a_common_compute_are_not_compared() -> None:
    frame = table(seeds=1)
    frame["train_flop"] *= 1000 ** np.log(frame["gmac_per_pair"])
    with pytest.raises(UserError, match="No training compute was reached by 3 model sizes"):
        isoflop(frame, SETTINGS)


def test_the_curves_of_a_law_have_its_own_minima() -> None:
    analysis = analyse(table(noise=0.002), CHINCHILLA)
    view = law_isoflop(analysis, "chinchilla", [5e16])
    assert view.curve == "chinchilla law"
    for profile, item in zip(view.profiles, analysis.fits, strict=True):
        best = best_split(item.boot, 5e16, FLOP)
        assert profile.minimum is not None
        assert profile.minimum.size == pytest.approx(best["first"])
        assert profile.minimum.interval == pytest.approx(best["first_interval95"])
        assert profile.values.min() == pytest.approx(profile.minimum.value, rel=1e-3)
        at = np.column_stack([profile.sizes, 5e16 / FLOP / profile.sizes])
        assert profile.values == pytest.approx(item.fit.predict(at))


@pytest.mark.parametrize(
    ("frame", "budgets", "words"),
    [
        (table(sizes=SIZES[:2]), [], r"need at least 3 model sizes \(gmac_per_pair\).*linear: 2, softmax: 2"),
        (table(), [1e12], r"--budget 1e\+12: fewer than 3 model sizes.*between 5e\+15 and 5e\+17 FLOP"),
        (table(), [-1.0], "--budget -1: fewer than 3"),
        (table(), [float("nan")], "--budget nan: fewer than 3"),
        (table().drop(columns="gmac_per_pair"), [], "no column 'gmac_per_pair'"),
    ],
    ids=["two-sizes", "out-of-reach", "negative", "nan", "no-size"],
)
def test_what_cannot_be_drawn_is_refused(frame: pd.DataFrame, budgets: list[float], words: str) -> None:
    with pytest.raises(UserError, match=words):
        isoflop(frame, SETTINGS, budgets=budgets)


def test_a_law_of_other_scales_has_no_curves_of_equal_compute() -> None:
    settings = Settings(draws=100, laws=("chinchilla",), x="parameters,samples_seen")
    with pytest.raises(UserError, match="take --x gmac_per_pair,samples_seen"):
        law_isoflop(analyse(table(noise=0.01), settings), "chinchilla")


def test_the_figure_shows_points_curves_and_minima(tmp_path: Path) -> None:
    view = isoflop(table(noise=0.002), SETTINGS)
    figure = isoflop_figure(view)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == ["linear", "softmax"]
    assert panels[0].get_ylabel() == "validation loss (nats)"
    assert all(axes.get_xlabel() == "forward cost per pair (GMAC)" for axes in panels)
    drawn = np.concatenate([np.asarray(line.get_xdata(), dtype=float) for line in panels[0].get_lines()])
    minima = [p.minimum.size for p in view.profiles if p.group == "linear" and p.minimum]
    assert len(minima) == 4
    assert set(minima) <= set(drawn)
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts[:4] == [f"{flop:.3g} FLOP" for flop in view.budgets]
    assert texts[4:] == ["minimum", "95 % interval of its size"]
    save_figure(figure, tmp_path / "isoflop.png")
    pixels = imread(tmp_path / "isoflop.png")[..., :3]
    for color in budget_colors(view).values():
        wanted = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert (np.abs(pixels - wanted).max(axis=-1) < 0.02).sum() > 200


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code or 0)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_command_draws_parabolas_and_laws(tmp_path: Path, capsys: Any, suffix: str) -> None:
    table(noise=0.002).to_csv(tmp_path / "t.csv", index=False)
    common = [str(tmp_path / "t.csv"), "--isoflop", "--draws", "100", "--format", suffix, "--json"]
    out = tmp_path / "figures"
    assert run("plot", *common, "-o", str(out), "--size", "parameters", "--budget", "5e16") == 0
    law = ["--law", "chinchilla", "--x", "gmac_per_pair,samples_seen"]
    assert run("plot", *common, "-o", str(out), *law) == 0
    names = [f"val-loss-isoflop-chinchilla.{suffix}", f"val-loss-isoflop.{suffix}"]
    assert sorted(path.name for path in out.iterdir()) == names
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert all(path.read_bytes().startswith(starts[suffix]) for path in out.iterdir())
    first = json.loads(capsys.readouterr().out.split("}\n")[0] + "}")
    assert [sentence[: sentence.index(".")] for sentence in first["notices"]] == [
        "linear at 5e+16 FLOP: lowest at 3",
        "softmax at 5e+16 FLOP: lowest at 3",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "5e16"], "--budget and --size belong to --isoflop"),
        (["--isoflop", "--size", "nope"], "no column 'nope'"),
        (["--isoflop", "--law", "tied", "--x", "gmac_per_pair,samples_seen", "--size", "parameters"],
         "its first scale is the size"),
        (["--isoflop", "--law", "chinchilla"], "The law chinchilla takes two columns of --x"),
    ],
)  # fmt: skip
def test_the_command_refuses_with_a_sentence(
    tmp_path: Path, capsys: Any, arguments: list[str], words: str
) -> None:
    table(seeds=1).to_csv(tmp_path / "t.csv", index=False)
    assert run("plot", str(tmp_path / "t.csv"), *arguments, "--draws", "100", "-o", str(tmp_path)) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("lowest", "inside"), [(3.9, False), (4.1, True), (31.0, True), (33.0, False)])
def test_a_minimum_beyond_all_sizes_is_no_minimum_among_them(lowest: float, inside: bool) -> None:
    sizes = np.array([4.0, 8.0, 16.0, 32.0])
    points = Points(sizes, np.exp(0.1 * np.log(sizes / lowest) ** 2), ("a", "b", "c", "d"))
    found = minimum_within(fit_parabola(points), points)
    assert isinstance(found, Minimum) == inside
    if isinstance(found, Minimum):
        assert found.size == pytest.approx(lowest)


@pytest.mark.parametrize("exponent", [-0.37, -0.1, 0.0, 0.2])
def test_a_straight_line_has_no_minimum_whatever_rounding_bends(exponent: float) -> None:
    sizes = np.geomspace(1, 16, 4)
    points = Points(sizes, 5 * sizes**exponent, ("a", "b", "c", "d"))
    assert (
        minimum_within(fit_parabola(points), points)
        == "the curve does not bend upwards, so it has no minimum"
    )


def test_a_minimum_beyond_every_float_is_beyond_the_largest_size() -> None:
    sizes = np.geomspace(1, 16, 4)
    points = Points(sizes, np.exp(-0.5 * np.log(sizes) + 1e-5 * np.log(sizes) ** 2), ("a", "b", "c", "d"))
    parabola = fit_parabola(points)
    assert parabola.vertex == np.inf
    assert "still falls at the largest size" in str(minimum_within(parabola, points))
