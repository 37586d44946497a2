"""Plans become runs, and what is wrong with one is said by file and key before anything is trained."""

import importlib.util
import sys
from pathlib import Path

import pytest
import yaml

from openclip_linattn.errors import UserError
from openclip_linattn.ladder.plan import read_ladder, short
from openclip_linattn.ladder.remarks import remarks

PLANS = Path(__file__).parents[2] / "scaling" / "plans"


def names(ladder) -> set[str]:
    return {run.name for run in ladder.runs}


def flags(run) -> dict[str, str]:
    arguments = run.arguments
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


def test_a_plan_is_a_grid_whose_runs_are_named_by_all_that_differs(write_plan, tmp_path):
    training = {"batch": 32, "learning_rate": [1e-3, 5e-4], "warmup": 2, "precision": "fp32"}
    ladder = read_ladder(
        write_plan(training=training, samples=[256, "1k"], seeds=[0, 3], sizes="ViT-T32-8"), tmp_path / "out"
    )
    assert len(ladder.runs) == 2 * 2 * 2 * 2
    assert "ViT-T32-8-linear-1k-lr5e-4-seed3" in names(ladder)
    run = next(run for run in ladder.runs if run.name == "ViT-T32-8-linear-1k-lr5e-4-seed3")
    expected = {"--model": "ViT-T32-8-linear", "--lr": "0.0005", "--seed": "3", "--train-num-samples": "1000"}
    assert expected.items() <= flags(run).items()
    assert run.folder == tmp_path / "out" / "logs" / run.name


def test_the_largest_runs_come_first(write_plan, tmp_path):
    ladder = read_ladder(write_plan(samples=[256, 512]), tmp_path)
    flop = [rung.flop for rung in ladder.rungs]
    assert flop == sorted(flop, reverse=True)
    assert ladder.runs[0].name.startswith("ViT-T64-8-softmax-512")


def test_samples_are_numbers_short_forms_or_named_numbers(write_plan, tmp_path):
    ladder = read_ladder(write_plan(samples={"short": 256, "long": 1024}, seeds=7), tmp_path)
    assert {(run.name.split("-")[4], run.samples) for run in ladder.runs} == {("short", 256), ("long", 1024)}


def test_overrides_are_for_the_runs_that_they_name_and_later_ones_win(write_plan, tmp_path):
    overrides = [
        {"size": "ViT-T64-8", "learning_rate": [5e-4, 2e-4], "flags": ["--grad-checkpointing"]},
        {"attention": ["linear"], "samples": 512, "warmup": 3, "epochs": 4},
        {"size": "ViT-T64-8", "attention": "linear", "warmup": 4},
    ]
    ladder = read_ladder(write_plan(overrides=overrides, samples=[256, 512]), tmp_path)
    found = {run.name: flags_of(run) for run in ladder.runs}
    assert len(found) == 4 + 8
    assert found["ViT-T32-8-softmax-512-lr1e-3-seed0"] == ("0.001", "2", "2", False)
    assert found["ViT-T32-8-linear-512-lr1e-3-seed0"] == ("0.001", "3", "4", False)
    assert found["ViT-T64-8-linear-256-lr2e-4-seed0"] == ("0.0002", "4", "2", True)
    assert found["ViT-T64-8-linear-512-lr5e-4-seed0"] == ("0.0005", "4", "4", True)


def flags_of(run) -> tuple[str, str, str, bool]:
    values = [run.arguments[run.arguments.index(flag) + 1] for flag in ("--lr", "--warmup", "--epochs")]
    return (values[0], values[1], values[2], "--grad-checkpointing" in run.arguments)


def test_relative_sources_begin_at_the_plan_s_folder_and_others_stay(write_plan, tmp_path):
    data = {"train": "a::pipe:cat b.tar::s3://c/{0..9}.tar", "val": "v/0.tar", "val_samples": 64}
    evaluation = {"sets": ["imagenet", "retrieval:coco.json", "/elsewhere"]}
    ladder = read_ladder(write_plan(data=data, evaluation=evaluation), tmp_path / "out")
    given = flags(ladder.runs[0])
    assert given["--train-data"] == f"{tmp_path}/a::pipe:cat b.tar::s3://c/{{0..9}}.tar"
    assert (given["--val-data"], given["--val-num-samples"]) == (f"{tmp_path}/v/0.tar", "64")
    assert ladder.evaluation_sets == [f"{tmp_path}/imagenet", f"retrieval:{tmp_path}/coco.json", "/elsewhere"]


def test_several_processes_train_under_torchrun_on_parts_of_the_batch(write_plan, tmp_path):
    training = {"batch": 64, "learning_rate": 1e-3, "warmup": 2, "accumulation": 2}
    ladder = read_ladder(
        write_plan(training=training, executor={"local": {"gpus": 8, "processes": 4}}), tmp_path
    )
    run = ladder.runs[0]
    command = run.command(resume=True)
    assert command[1:8] == [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "--"),
    ]
    assert command[-2:] == ["--resume", "latest"]
    assert (flags(run)["--batch-size"], flags(run)["--accum-freq"]) == ("8", "2")
    assert ladder.rungs[0].samples == 256


def test_only_takes_runs_by_a_pattern(write_plan, tmp_path):
    ladder = read_ladder(write_plan(), tmp_path, "*-softmax-*")
    assert {run.model for run in ladder.runs} == {"ViT-T32-8-softmax", "ViT-T64-8-softmax"}
    with pytest.raises(UserError, match=r"no run of .*plan.yaml has a name like B"):
        read_ladder(write_plan(), tmp_path, "B")


@pytest.mark.parametrize(
    ("rate", "name"), [(1e-3, "1e-3"), (5.12e-4, "5.12e-4"), (0.1, "1e-1"), (2, "2e0"), (1.5e-10, "1.5e-10")]
)
def test_learning_rates_are_short_in_names(rate, name):
    assert short(rate) == name


TRAINING = {"batch": 32, "learning_rate": 1e-3, "warmup": 2, "epochs": 2, "precision": "fp32"}
REFUSALS = {
    "unknown key": ({"atentions": ["linear"]}, "atentions: there is no such key; the keys here are sizes, "),
    "unknown inner key": ({"executor": {"local": {"job": 2}}}, "executor.local.job: there is no such key; .*jobs"),
    "missing key": ({"sizes": None}, "sizes: the key is missing"),
    "missing inner key": ({"training": {"batch": 32, "warmup": 1}}, "training.learning_rate: the key is missing"),
    "wrong type": ({"training": {**TRAINING, "batch": "many"}}, "training.batch: .*integer, not 'many'"),
    "truth for a number": ({"retries": True}, "retries: .*integer, not True"),
    "zero": ({"training": {**TRAINING, "learning_rate": 0}}, "training.learning_rate.0: .*greater than 0, not 0"),
    "nothing": ({"attentions": []}, "attentions: .*at least 1 item"),
    "schedule": ({"training": {**TRAINING, "schedule": "linear"}}, "training.schedule: .*'cosine'.*, not 'linear'"),
    "precision": ({"training": {**TRAINING, "precision": "fp8"}}, "training.precision: it can be fp32, amp,"),
    "points": ({"report": {"points": "best"}}, "report.points: it can be all, ends,"),
    "samples": ({"samples": "many"}, "samples.many: .*integer, not 'many'"),
    "unknown model": ({"attentions": "soft"}, "sizes, attentions: there is no model ViT-T32-8-soft; `openclip-linattn"),
    "same size twice": ({"sizes": ["ViT-T32-8", "ViT-T32-8"]}, "two runs have the name ViT-T32-8-softmax-256-"),
    "same rate twice": ({"training": {**TRAINING, "learning_rate": [1e-3, 0.001]}}, "two runs have the name"),
    "batch": ({"executor": {"local": {"gpus": 8, "processes": 5}}}, "training.batch: 32 cannot be cut .* for 5 proc"),
    "accumulation": ({"training": {**TRAINING, "accumulation": 3}}, "training.batch: 32 cannot .* 3 accumulated"),
    "epochs": ({"training": {**TRAINING, "epochs": 3}}, "training.epochs: 256 samples cannot be cut into 3 equal"),
    "warm-up": ({"training": {**TRAINING, "warmup": 8}}, "training.warmup: 8 steps are not less than the 8 of the"),
    "flag of its own": ({"training": {**TRAINING, "flags": ["--lr=1"]}}, "training.flags: --lr=1 is set by the ladder"),
    "resume": ({"training": {**TRAINING, "flags": ["--resume", "x"]}}, "training.flags: --resume is set by"),
    "override's key": ({"overrides": [{"size": "ViT-T32-8", "lr": 1}]}, "overrides.0.lr: there is no such key"),
    "override's size": ({"overrides": [{"size": "ViT-B-16"}]}, "overrides.0.size: ViT-B-16 is not in the plan, which"),
    "override's value": ({"overrides": [{"batch": -1}]}, "overrides.0.batch: .*greater than 0, not -1"),
    "abbreviated flag": ({"training": {**TRAINING, "flags": ["--accum=2"]}}, "training.flags: --accum=2 is set by"),
    "cool-down": ({"training": {**TRAINING, "schedule": "const-cooldown"}}, "needs --epochs-cooldown=N among flags"),
    "infinite": ({"training": {**TRAINING, "learning_rate": "1e999"}}, "training.learning_rate.0: .*finite number"),
    "samples twice": ({"samples": [256, 256]}, "samples: a number is there twice"),
    "name of samples": ({"samples": {"a/b": 256}}, "samples: 'a/b' is a part of names of folders and jobs"),
    "empty source": ({"data": {"train": ""}}, "data.train: .*at least 1 character"),
    "scale": ({"report": {"scale": "flops"}}, "report.scale: there is no scale flops; train_flop, samples_seen"),
    "no data": ({"data": {}}, "data: give either train, the shards to train on, or drawn"),
    "two data": ({"data": {"train": "a", "drawn": {}}}, "data: give either train, the shards to train on, or drawn"),
    "val of drawn": ({"data": {"drawn": {}, "val": "a"}}, "data: val and val_samples belong to train"),
    "two places": ({"executor": {"local": {}, "slurm": {}}}, "executor: give either local or slurm"),
    "processes on a CPU": ({"executor": {"local": {"processes": 2}}}, "executor.local: OpenCLIP trains with several"),
    "cards": ({"executor": {"local": {"gpus": 4, "jobs": 5}}}, "executor.local: 5 jobs of 1 processes need"),
    "nodes": ({"executor": {"slurm": {"nodes": 2}}}, "executor.slurm: OpenCLIP trains on several nodes with cards"),
    "two throughputs": ({"budget": {"tflops": 1, "measure": True}}, "budget: give either tflops or measure"),
    "limit alone": ({"budget": {"max_cpu_hours": 1}}, "budget: a limit needs an estimate: give tflops, or measure"),
    "measuring": ({"budget": {"measure": True}, "executor": {"slurm": {}}}, "budget.measure trains on this machine"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_a_wrong_plan_is_refused_by_file_and_key(write_plan, tmp_path, what):
    sections, sentence = REFUSALS[what]
    path = write_plan(**sections)
    with pytest.raises(UserError, match=rf"(?s){path}: (?=.*{sentence})"):
        read_ladder(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sizes: [a", "is not valid YAML: .*line 1"),
        ("sizes: a\nsizes: b", "is not valid YAML: the key sizes is there twice"),
        ("- sizes", "must hold the keys of a plan: sizes, attentions"),
        ("", "must hold the keys of a plan"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, text, sentence):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=sentence):
        read_ladder(path, tmp_path)
    with pytest.raises(UserError, match=r"none\.yaml cannot be read: No such file"):
        read_ladder(tmp_path / "none.yaml", tmp_path)


def test_what_a_plan_repeats_can_be_merged(tmp_path):
    from openclip_linattn.ladder.plan_file import _Loader

    assert yaml.load("a: &a {b: 1, c: 2}\nd: {<<: *a, c: 3}", _Loader)["d"] == {"b": 1, "c": 3}


def test_numbers_in_a_plan_are_those_that_people_mean(tmp_path):
    from openclip_linattn.ladder.plan_file import _Loader

    text = "a: 1e-3\nb: 1_000\nc: 24:00:00\nd: 0.5\ne: 1.5e+2\nf: '7'\ng: ViT-B-16\nh: 1.\ni: -2\nj: .5"
    assert yaml.load(text, _Loader) == {
        "a": 1e-3, "b": 1000, "c": "24:00:00", "d": 0.5, "e": 150.0, "f": "7", "g": "ViT-B-16", "h": 1.0, "i": -2,
        "j": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_plans_that_come_with_the_package_are_right(path, tmp_path):
    from openclip_linattn.ladder.budget import Throughput, estimate

    ladder = read_ladder(path, tmp_path)
    tflops = ladder.spec.budget.tflops
    assert tflops is not None
    estimate(ladder, Throughput(tflops, "assumed"), 1).check()
    assert f"openclip-linattn ladder scaling/plans/{path.name}" in path.read_text()
    assert bool(remarks(ladder)) == (path.stem == "paper")


def test_losses_that_cannot_be_fitted_are_told_beforehand(write_plan, tmp_path):
    overrides = [{"size": "ViT-T64-8", "accumulation": 2}, {"size": "ViT-T32-8", "samples": 512, "batch": 64}]
    data = {"train": "shards", "val": "held-out"}
    for sections, found in (
        ({"data": data, "overrides": overrides[:1]}, ["val_loss of 16, 32"]),
        ({"overrides": overrides[:1]}, []),  # without a validation set
        ({"data": data, "overrides": overrides[:1], "report": {"metrics": ["a/top1"]}}, []),
        ({"overrides": overrides, "samples": [256, 512]}, ["train_loss of 32, 64"]),
    ):
        told = remarks(read_ladder(write_plan(**sections), tmp_path))
        assert len(told) == len(found)
        for sentence, (metric, sizes) in zip(told, (each.split(" ", 1) for each in found), strict=True):
            assert sentence.startswith(f"{metric} will not be fitted")
            assert sentence.endswith(sizes)


def test_the_plan_on_laion400m_has_the_recipes_of_its_scripts(tmp_path):
    scripts = PLANS.parents[1] / "scripts" / "laion400m"
    where = importlib.util.spec_from_file_location("recipes", scripts / "recipes.py")
    recipes = importlib.util.module_from_spec(where)
    sys.modules["recipes"] = recipes  # for its dataclasses
    try:
        where.loader.exec_module(recipes)
    finally:
        del sys.modules["recipes"]
    runs = read_ladder(PLANS / "paper.yaml", tmp_path).runs
    assert len(runs) == 27
    for run in runs:
        _, size, _, _, samples = run.name.split("-")[:5]
        recipe, ours = recipes.find_recipe(size, samples), run.recipe
        wanted = (recipe.learning_rate, recipe.batch, recipe.warmup, recipe.epochs, recipe.epoch_samples)
        assert wanted == (
            ours.learning_rate, ours.batch_size, ours.warmup_steps, ours.epochs, ours.epoch_samples
        )  # fmt: skip
        assert ours.accumulation == recipes.fewest_steps(recipe, run.processes)
        expected = {*recipes.COMMON, *recipes.FLAGS[size]} - {"--resume", "latest", "--save-frequency"}
        assert expected <= {part for flag in run.arguments for part in flag.split("=")}
