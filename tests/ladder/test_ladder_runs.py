"""How runs are taken up, followed, retried and ended on one machine; what trains is a stand-in."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from openclip_linattn.errors import UserError
from openclip_linattn.ladder.attempt import Begin, followed
from openclip_linattn.ladder.children import Children
from openclip_linattn.ladder.climb import climb
from openclip_linattn.ladder.failures import last_line
from openclip_linattn.ladder.folders import check_settings
from openclip_linattn.ladder.local import raise_failures, train_ladder
from openclip_linattn.ladder.machine import Machine, Slot
from openclip_linattn.ladder.plan import read_ladder
from openclip_linattn.ladder.runs import Run


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Makes a shell script what runs are trained by; its arguments are the training command's."""

    def make(script: str) -> None:
        path = tmp_path / "stand-in"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return make


@pytest.mark.parametrize(
    ("epochs", "status", "expected"),
    [(0, "running", "trained"), (1, "failed", "resumed"), (2, "finished", "already done")],
)
def test_how_a_run_is_taken_up(make_run, stand_in, tmp_path, epochs, status, expected):
    run = make_run(epochs=epochs, status=status)
    stand_in(f'echo "$@" >> {tmp_path}/started')
    done = []
    (outcome,) = train_ladder([run], Machine(1), after=lambda run, device: done.append((run, device)))
    assert outcome.status == expected
    assert done == [(run, "cpu")]
    started = (tmp_path / "started").read_text().splitlines() if expected != "already done" else []
    assert [line.endswith("--resume latest") for line in started] == {
        "trained": [False], "resumed": [True], "already done": []
    }[expected]  # fmt: skip
    assert run.folder.exists() == (expected != "trained")  # what cannot be resumed was cleared away


def test_progress_is_read_from_the_log(make_run):
    run = make_run()
    assert run.samples_seen() == 64 + 16
    assert replace(run, name="b").samples_seen() == 0


@pytest.mark.slow
def test_a_run_that_training_itself_refuses_is_named_with_the_sentence(new_run, capsys):
    outcomes = train_ladder([new_run], Machine(1), retries=3)
    with pytest.raises(UserError, match=r"the run a failed: exit status 2; .*a\.tar"):
        raise_failures(outcomes)
    assert "taken up again" not in capsys.readouterr().err


def test_a_run_that_is_refused_is_not_tried_again(new_run, stand_in, tmp_path):
    stand_in(f"echo >> {tmp_path}/started\necho error: no shards\nexit 2")
    (outcome,) = train_ladder([new_run], Machine(1), retries=3)
    assert outcome.sentence.startswith("the run a failed: exit status 2; error: no shards (")
    assert (tmp_path / "started").read_text() == "\n"


def test_a_run_that_fails_is_taken_up_again_from_its_checkpoint(new_run, stand_in, tmp_path, capsys):
    stand_in(
        f'echo "$@" >> {tmp_path}/started\nmkdir -p {new_run.folder}/checkpoints\n'
        f'[ "$(wc -l < {tmp_path}/started)" -ge 3 ] && exit 0\n'
        f"touch {new_run.folder}/checkpoints/epoch_1.pt\necho error: a card fell off\nexit 1"
    )
    (outcome,) = train_ladder([new_run], Machine(1), retries=2)
    assert (outcome.status, outcome.message) == ("resumed", "")
    lines = (tmp_path / "started").read_text().splitlines()
    assert [line.endswith("--resume latest") for line in lines] == [False, True, True]
    said = capsys.readouterr().err
    assert said.count("a: taken up again after a failure: exit status 1; error: a card fell off") == 2


def test_a_run_fails_once_its_retries_are_used_up_and_the_others_are_trained(make_run, stand_in, tmp_path):
    bad, good = make_run("bad", epochs=1), make_run("good", epochs=1)
    stand_in(f'echo "$@" >> {tmp_path}/started\ncase "$*" in *"--name bad"*) exit 9;; esac')
    outcomes = train_ladder([bad, good], Machine(1), retries=1)
    assert [outcome.status for outcome in outcomes] == ["failed", "resumed"]
    assert outcomes[0].message.startswith("exit status 9; no output (")
    assert (tmp_path / "started").read_text().count("--name bad") == 2


def log_line(epoch: int, loss: str) -> str:
    return (
        f"Train Epoch: {epoch} [16/64 (25%)] Logit Scale: 14.3 C_loss: {loss} ({loss}) Loss: {loss} ({loss})"
    )


def test_a_run_that_diverges_is_ended_and_not_taken_up_again(new_run, stand_in, tmp_path):
    lines = "\n".join(log_line(0, "nan") for _ in range(3))
    stand_in(
        f'echo >> {tmp_path}/started\nmkdir -p {new_run.folder}\necho "{lines}" > {new_run.folder}/out.log\n'
        "exec sleep 60"
    )
    (outcome,) = train_ladder([new_run], Machine(1), retries=2)
    assert outcome.message == "it diverged: its loss is nan after 16 samples; lower its learning rate"
    assert (tmp_path / "started").read_text() == "\n"


@pytest.mark.parametrize("losses", [["nan", "nan", "2.1"], ["2.1", "nan", "nan"], ["nan", "nan"]])
def test_few_losses_that_are_not_finite_or_old_ones_do_not_end_a_run(new_run, losses):
    new_run.folder.mkdir()
    log = new_run.folder / "out.log"
    log.write_text("\n".join(log_line(0, "nan") for _ in range(5)))
    begin = Begin.of(new_run)
    with log.open("a") as file:
        file.write("\n" + "\n".join(log_line(0, loss) for loss in losses))
    with subprocess.Popen(["sleep", "0.2"]) as child:
        assert followed(new_run, child, begin, lambda _: None) is None


def test_a_folder_that_is_no_run_is_left_alone(new_run):
    new_run.folder.mkdir()
    (new_run.folder / "out.log").write_text("a run without checkpoints, trained by another command")
    with pytest.raises(UserError, match="no training run of ours"):
        train_ladder([new_run], Machine(1))
    assert (new_run.folder / "out.log").exists()


def test_other_settings_are_refused_with_what_differs(make_run):
    run = make_run(epochs=1)
    recipe = replace(run.recipe, learning_rate=5e-4, extra=("--grad-checkpointing",), val_data=None)
    with pytest.raises(UserError) as refusal:
        train_ladder([replace(run, recipe=recipe)], Machine(1))
    assert str(refusal.value).startswith(
        f"{run.folder} holds a run with other settings: --val-data b.tar was given and is not now; --lr was 0.001 and "
        "is now 0.0005; --grad-checkpointing is new. Choose another folder"
    )


def test_what_training_adds_to_its_command_is_no_other_setting(make_run):
    run = make_run(epochs=1)
    record = json.loads((run.folder / "run.json").read_text())
    record["command"] += " --resume latest --train-data a/00000.tar"
    (run.folder / "run.json").write_text(json.dumps(record))
    check_settings(run)


def test_one_evaluation_that_fails_does_not_end_the_others(make_run):
    runs = [make_run(name, epochs=2, status="finished") for name in ("a", "b", "c")]
    errors = {"a": UserError("no images"), "b": RuntimeError("out of memory")}
    evaluated = []

    def evaluate(run: Run, device: str) -> None:
        if run.name in errors:
            raise errors[run.name]
        evaluated.append(run)

    outcomes = train_ladder(runs, Machine(1), after=evaluate)
    with pytest.raises(UserError) as failures:
        raise_failures(outcomes)
    assert str(failures.value).splitlines() == [
        "the run a failed: not evaluated: no images",
        "the run b failed: not evaluated: RuntimeError: out of memory",
    ]
    assert evaluated == runs[2:]


def test_the_reason_of_a_failure_is_found_in_the_output_of_its_attempt(tmp_path):
    log = tmp_path / "log"
    for text, reason in (
        ("Traceback\n  File x\ntorch.OutOfMemoryError: 3 GB\nI1130 00:26:02.897 cache_hits: 0\n", "3 GB"),
        ("error: no shards\n\n", "error: no shards"),
        ("Train Epoch: 0\nW1130 00:26:02.897 x\n", "Train Epoch: 0"),
        ("", "no output"),
    ):
        log.write_text("error: of an earlier attempt\n" + text)
        assert last_line(log, begin=29).endswith(reason)


def test_cards_are_dealt_to_the_runs_that_train_side_by_side(make_run, stand_in, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    runs = [replace(make_run(name, epochs=1), processes=2) for name in ("a", "b")]
    for run in runs:  # as several processes would have begun it
        record = {"status": "running", "command": " ".join(["python", "-m", "t", *run.arguments])}
        (run.folder / "run.json").write_text(json.dumps(record))
    stand_in(f"echo $CUDA_VISIBLE_DEVICES >> {tmp_path}/cards\nsleep 1")
    devices = []
    train_ladder(runs, Machine(2, gpus=4), after=lambda run, device: devices.append(device))
    assert sorted((tmp_path / "cards").read_text().split()) == ["4,5", "6,7"]
    assert sorted(devices) == ["cuda:0", "cuda:2"]
    assert Slot().environment == {"CUDA_VISIBLE_DEVICES": ""}  # a run on the CPU takes no card


def test_fewer_cards_than_the_plan_has_are_told_before_anything_is_trained(write_plan, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    path = write_plan(executor={"local": {"gpus": 2}})
    with pytest.raises(UserError, match=r"executor\.local\.gpus is 2, and PyTorch sees 1 cards here"):
        climb(read_ladder(path, tmp_path / "out"), Console(stderr=True))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_told(write_plan, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=f"--out {out} cannot be made a folder: "):
            climb(read_ladder(write_plan(), out), Console(stderr=True))


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_interrupt_while_runs_are_begun_ends_those_that_have_begun(
    new_run, stand_in, tmp_path, monkeypatch, capsys
):
    stand_in(f"touch {tmp_path}/started\nexec sleep 60")
    submit = ThreadPoolExecutor.submit

    def interrupted(*call: Any) -> None:
        submit(*call)
        wait_until((tmp_path / "started").exists)
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_ladder([new_run], Machine(1), retries=1)
    assert "a: failed: exit status -15; " in capsys.readouterr().err


def test_an_interrupt_says_which_evaluation_is_waited_for_and_begins_none(make_run):
    runs = [make_run(name, epochs=2, status="finished") for name in ("a", "b")]
    shown, evaluated = StringIO(), []
    sentence = "a: it is being evaluated, and the ladder ends when that is done"

    def evaluate(run: Run, device: str) -> None:
        evaluated.append(run.name)
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: sentence in shown.getvalue())

    with pytest.raises(KeyboardInterrupt):
        train_ladder(runs, Machine(1), after=evaluate, console=Console(file=shown))
    assert evaluated == ["a"]


LADDER = """
import sys
from pathlib import Path
from openclip_linattn.ladder.local import train_ladder
from openclip_linattn.ladder.machine import Machine
from openclip_linattn.ladder.runs import Recipe, Run
recipe = Recipe("a.tar", "b.tar", 8, epoch_samples=64, epochs=2, batch_size=8, learning_rate=1e-3, warmup_steps=1)
sys.executable = sys.argv[2]  # what the ladder starts for each run
train_ladder([Run("a", "ViT-T32-8-linear", recipe, Path(sys.argv[1]))], Machine(1))
"""


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_second_ladder_is_refused_and_children_end_with_theirs(new_run, tmp_path, ending):
    sleeper = tmp_path / "sleeper"
    sleeper.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid.part\nmv {tmp_path}/pid.part {tmp_path}/pid\nexec sleep 600\n"
    )
    sleeper.chmod(0o755)
    command = [sys.executable, "-c", LADDER, str(tmp_path), str(sleeper)]
    ladder = subprocess.Popen(command, stderr=subprocess.PIPE)
    wait_until((tmp_path / "pid").exists)
    child = int((tmp_path / "pid").read_text())
    with pytest.raises(UserError, match="another ladder trains in"):
        train_ladder([new_run], Machine(1))
    ladder.send_signal(ending)
    ladder.communicate(timeout=300)  # a machine may be busy
    if ending == signal.SIGTERM:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    else:  # nothing can be done when killed; but the child it left keeps the folder
        with pytest.raises(UserError, match="a run that it left behind"):
            train_ladder([new_run], Machine(1))
        os.kill(child, signal.SIGKILL)


def test_an_interrupt_ends_the_children(tmp_path):
    children = Children()
    child = children.start(["sleep", "60"], tmp_path / "log", {})
    children.terminate()
    started = time.monotonic()
    assert child.wait(timeout=10) != 0
    assert time.monotonic() - started < 10
    with pytest.raises(RuntimeError, match="interrupted"):
        children.start(["sleep", "60"], tmp_path / "log", {})
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
