"""The grid of runs: what submit.py would submit, what train.sbatch asks OpenCLIP for, and what is refused."""

import runpy
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "laion400m"
PAIRS_OF_A_PASS = 407_332_084  # of LAION-400M, as LAION counted


@pytest.fixture(scope="module")
def recipes():
    return runpy.run_path(str(SCRIPTS / "recipes.py"))


def submit(run, *options: str):
    return run(
        sys.executable, SCRIPTS / "submit.py", "--dry-run", "--data", "/data/{00000..00009}.tar", *options
    )


def flags_of(run, *options: str) -> dict[str, str]:
    """The flags of run.py as a table; those without a value have an empty one."""
    result = run(sys.executable, SCRIPTS / "run.py", "--data", "/data", *options)
    assert result.returncode == 0, result.stderr
    table, last = {}, ""
    for line in result.stdout.splitlines()[1:]:
        if line.startswith("--"):
            table[last := line] = ""
        else:
            table[last] = line
    return table


def test_the_grid_is_one_job_for_each_combination(run):
    result = submit(
        run,
        *("--sizes", "S,L", "--attentions", "softmax,normlinear", "--samples", "3B,13B", "--seeds", "0,1"),
        *("--nodes", "2", "--gpus-per-node", "8", "--sbatch=--partition=gpu", "--logs", "/logs"),
    )
    assert result.returncode == 0, result.stderr
    commands = [shlex.split(line.split(" && ")[1]) for line in result.stdout.splitlines()]
    assert len(commands) == 2 * 2 * 2 * 2
    assert len({command[1] for command in commands}) == len(commands)  # the names
    first = commands[0]
    name = "S-16-softmax-3B-lr1e-3-seed0"
    assert first[:3] == ["sbatch", f"--job-name={name}", "--dependency=singleton"]
    assert {
        "--nodes=2",
        "--gpus-per-node=8",
        "--partition=gpu",
        f"--output=/logs/{name}/slurm-%j.txt",
    } <= set(first)
    assert "--data=/data/{00000..00009}.tar" in first
    assert result.stdout.startswith(f"mkdir -p /logs/{name} && sbatch ")


def test_a_printed_job_is_the_run_that_it_names(run):
    result = submit(
        run,
        *("--sizes", "B", "--attentions", "linear", "--samples", "13B", "--gpus-per-node", "4"),
        *("--logs", "/logs", "--", "--zero"),
    )
    options = shlex.split(result.stdout.split("train.sbatch ")[1])
    job = run(sys.executable, SCRIPTS / "run.py", "--per-node", "4", *options)
    assert job.returncode == 0, job.stderr
    folder, *flags = job.stdout.splitlines()
    assert folder == "/logs/B-16-linear-13B-lr5e-4-seed0"
    assert flags[:4] == ["--model", "ViT-B-16-linear", "--name", "B-16-linear-13B-lr5e-4-seed0"]
    assert flags[-1] == "--zero"


def test_the_recipe_of_laions_b_16_run_is_reached(run):
    flags = flags_of(
        run, "--size", "B", "--attention", "softmax", "--samples", "13B", "--nodes", "22", "--per-node", "8"
    )
    assert int(flags["--batch-size"]) == 192
    assert float(flags["--lr"]) == 5e-4
    assert flags["--warmup"] == "10000"
    seen = int(flags["--epochs"]) * int(flags["--train-num-samples"])
    assert seen == pytest.approx(32 * PAIRS_OF_A_PASS, rel=1e-6)
    assert "--grad-checkpointing" not in flags


def test_accumulated_steps_keep_the_global_batch(run):
    size = ("--size", "L", "--attention", "infsa", "--samples", "34B", "--nodes", "4", "--per-node", "4")
    chosen = flags_of(run, *size, "--accumulation", "8")
    assert (int(chosen["--batch-size"]), int(chosen["--accum-freq"])) == (86_016 // (16 * 8), 8)
    assert "--grad-checkpointing" in chosen
    fewest = flags_of(run, *size)
    assert (int(fewest["--batch-size"]), int(fewest["--accum-freq"])) == (224, 24)  # 224 is LAION's on 40 GB


def test_relative_paths_begin_where_the_command_was_given(run, tmp_path):
    options = ("--size", "T", "--attention", "linear", "--samples", "1k", "--relative-to", tmp_path)
    sources = (
        "--data",
        "a b/{0..3}.tar::/c/0.tar::s3://d/0.tar::pipe:cat e.tar::${F}/0.tar",
        "--val",
        "v.tar",
    )
    result = run(sys.executable, SCRIPTS / "run.py", *options, *sources)
    folder, *flags = result.stdout.splitlines()
    assert folder == f"{tmp_path}/logs/T32-8-linear-1k-lr1.5e-3-seed0"
    table = dict(pairwise(flags))
    assert table["--train-data"] == (
        f"{tmp_path}/a b/{{0..3}}.tar::/c/0.tar::s3://d/0.tar::pipe:cat e.tar::${{F}}/0.tar"
    )
    assert table["--val-data"] == f"{tmp_path}/v.tar"


CARDS = ("--gpus-per-node", "8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--gpus-per-node", "7"), ("33,792", "7 processes", "6 or 8")),
        ((*CARDS, "--attentions", "sofmax"), ("no model ViT-B-16-sofmax",)),
        ((*CARDS, "--sizes", "H"), ("size H", "B 13B")),
        ((*CARDS, "--sizes", "T"), ("size T", "T 1k")),
        ((*CARDS, "--accumulation", "7"), ("33,792", "7 accumulated steps", "another --accumulation")),
        ((), ("size B", "--gpus-per-node")),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_submitted(run, options, words):
    result = submit(run, "--sizes", "B", "--attentions", "softmax", "--samples", "13B", *options)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in words), result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nodes", "0"), "'0' is not a whole number above zero"),
        (("--accumulation", "0"), "'0' is not a whole number above zero"),
        (("--gpus-per-node", "-8"), "'-8' is not a whole number above zero"),
        (("--sizes", ","), "name at least one"),
        (("00001.tar", "00002.tar"), "what is 00001.tar for? Patterns, such as that of --data, need quotes"),
    ],
)
def test_numbers_and_lists_that_make_no_sense_are_refused(run, options, words):
    result = submit(run, "--sizes", "T", "--attentions", "softmax", "--samples", "1k", *options)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr


def test_where_sbatch_fails_the_rest_is_not_submitted_and_the_account_says_so(run, tmp_path):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\ncase "$*" in *linear*) exit 3; esac\n')
    sbatch.chmod(0o755)
    result = run(
        *(sys.executable, SCRIPTS / "submit.py", "--sizes", "T", "--attentions", "softmax,linear,infsa"),
        *("--samples", "1k", "--data", "/data", "--logs", tmp_path / "logs"),
        PATH=str(tmp_path),
    )
    assert result.returncode == 1
    assert result.stderr == (
        "error: T32-8-linear-1k-lr1.5e-3-seed0 is not submitted: sbatch ended with status 3; 1 of 3 runs are\n"
    )


def test_the_evaluation_passes_over_runs_without_checkpoints_and_needs_one_with_some(run, tmp_path):
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    result = run("bash", SCRIPTS / "evaluate.sh", tmp_path, tmp_path)
    assert result.returncode == 2
    assert f"no numbered checkpoint yet: {tmp_path}/begun/checkpoints" in result.stderr
    assert f"no run in {tmp_path} has checkpoints to evaluate" in result.stderr


def test_a_refused_run_ends_before_training_is_started(run, tmp_path):
    result = run(
        *("bash", SCRIPTS / "train.sbatch", "--size", "T", "--attention", "none", "--samples", "1k"),
        *("--data", tmp_path, "--logs", tmp_path),
    )
    assert (result.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "no model ViT-T32-8-none" in result.stderr


def test_every_recipe_is_a_model_and_divides_over_whole_nodes(recipes):
    for recipe in recipes["RECIPES"]:
        assert recipe.batch % 8 == 0, recipe
        assert recipe.size in recipes["MODELS"]
        assert recipe.warmup * recipe.batch < recipe.epochs * recipe.epoch_samples, recipe


def test_the_published_batches_are_laions_cards_times_their_share(recipes):
    published = {
        (recipe.size, recipe.samples): recipe.batch
        for recipe in recipes["RECIPES"]
        if recipe.source == "published"
    }
    assert published == {
        ("B", "3B"): 344 * 256,
        ("B", "13B"): 176 * 192,
        ("B", "34B"): 176 * 512,
        ("L", "3B"): 396 * 224,
        ("L", "13B"): 768 * 112,
        ("L", "34B"): 1024 * 84,
    }
