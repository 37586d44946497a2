"""What cannot train is refused before the model is built, with a sentence and exit status 2."""

import errno
import json
import shutil
import subprocess
import sys
import tarfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from open_clip_train.params import parse_args

from openclip_linattn.errors import UserError
from openclip_linattn.manifest import Manifest, Plan, machine_facts, model_facts, read_manifest
from openclip_linattn.registration import model_name
from openclip_linattn.run_record import default_name
from openclip_linattn.train import main, run
from openclip_linattn.training_data import csv_rows, is_shards, look_at_validation


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--torchscript", "--torchcompile works"),
        ("--trace", "--torchcompile works"),
        ("--force-quick-gelu", "leave it out"),
        ("--pretrained-image", "--pretrained PATH"),
    ],
)
def test_flags_that_cannot_work(flags, capsys, flag, words):
    assert main(["--model", "ViT-T32-8-linear", *flags, flag]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ViT-T32-8-linear does not work with " + flag)
    assert words in error


@pytest.mark.parametrize(
    ("name", "hint"),
    [("ViT-B-16-normliner", "ViT-B-16-normlinear"), ("quite-another-thing", "openclip-linattn models")],
)
def test_unknown_model_gets_a_hint(flags, capsys, name, hint):
    assert main(["--model", name, *flags]) == 2
    error = capsys.readouterr().err
    assert f"unknown model '{name}'" in error
    assert hint in error


def test_stock_models_are_known():
    assert model_name("ViT-B-32") == "ViT-B-32"
    assert model_name("ViT-B/16") == "ViT-B-16"


def test_an_existing_run_is_not_taken_for_a_finished_one(flags, tmp_path):
    folder = tmp_path / "logs" / "old"
    folder.mkdir(parents=True)
    (folder / "out.log").write_text("")
    with pytest.raises(UserError, match="the run 'old' exists already"):
        run(["--model", "ViT-T32-8-linear", *flags, "--name", "old"])


def test_shards_without_captions_end_with_a_sentence(flags, shards, tmp_path):
    source, bare = shards / "00000.tar", tmp_path / "00000.tar"
    with tarfile.open(source) as old, tarfile.open(bare, "w") as new:
        for member in old:
            if not member.name.endswith(".txt"):
                new.addfile(member, old.extractfile(member))
    with pytest.raises(UserError, match=r"0 of 32 samples in 00000\.tar have a txt member"):
        run(["--model", "ViT-T32-8-linear", *flags, "--train-data", str(bare), "--train-num-samples", "32"])


def test_fewer_shards_than_workers_end_with_the_arithmetic(flags):
    with pytest.raises(UserError, match="4 < 6"):
        run(["--model", "ViT-T32-8-linear", *flags, "--workers", "6"])


def test_a_missing_shard_is_named(flags, shards):
    with pytest.raises(UserError, match=r"00004\.tar"):
        run(["--model", "ViT-T32-8-linear", *flags, "--train-data", f"{shards}/{{00000..00004}}.tar"])


def test_a_folder_is_translated(flags, shards, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("openclip_linattn.train.open_clip_main", seen.append)
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    assert (
        run(["--model", "ViT-T32-8-linear", *flags, "--dataset-type", "auto", "--train-data", str(copy)]) == 0
    )
    (argv,) = seen
    args = parse_args(argv)
    assert (args.train_data, args.dataset_type) == (f"{copy}/{{00000..00003}}.tar", "webdataset")


def test_folders_anywhere_are_translated(flags, shards, monkeypatch):
    seen = []
    monkeypatch.setattr("openclip_linattn.train.open_clip_main", seen.append)
    sources = [
        "--train-data",
        f"{shards}::{shards}",
        "--train-num-samples",
        "256",
        "--val-data",
        f"{shards}/test",
    ]
    assert run(["--model", "ViT-T32/8-linear", *flags, *sources]) == 0
    args = parse_args(seen[0])
    assert args.model == "ViT-T32-8-linear"
    assert args.train_data == f"{shards}/{{00000..00003}}.tar::{shards}/{{00000..00003}}.tar"
    assert args.val_data == f"{shards}/test/0.tar"


def test_a_list_of_sources_is_translated(flags, shards, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("openclip_linattn.train.open_clip_main", seen.append)
    listed = tmp_path / "sources.txt"
    listed.write_text(f"# all of them\n{shards}\npipe:cat {shards}/00000.tar\n")
    command = ["--model", "ViT-T32-8-linear", *flags, "--dataset-type", "auto", "--train-data", str(listed)]
    factors = ["--dataset-resampled", "--train-data-upsampling-factors", "2"]
    assert run([*command, "--train-num-samples", "160", *factors]) == 0
    args = parse_args(seen[0])
    assert args.train_data == f"{shards}/{{00000..00003}}.tar::pipe:cat {shards}/00000.tar"
    assert (args.dataset_type, args.train_data_upsampling_factors) == ("webdataset", "2::2")
    facts = read_manifest(tmp_path / "logs" / str(args.name))
    assert facts["unique_samples_expected"] is None  # of weighted shards it is not known


def test_a_table_beside_shards_keeps_its_type(flags, shards, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("openclip_linattn.train.open_clip_main", seen.append)
    command = ["--model", "ViT-T32-8-linear", *flags, "--dataset-type", "auto", "--train-data", str(shards)]
    assert run([*command, "--val-data", str(tmp_path / "val.csv")]) == 0
    args = parse_args(seen[0])
    assert (args.dataset_type, args.train_data) == ("auto", f"{shards}/{{00000..00003}}.tar")


def test_a_factor_for_each_part_is_asked_for(flags, capsys):
    assert main(["--model", "ViT-T32-8-linear", *flags, "--train-data-upsampling-factors", "2::1"]) == 2
    assert "give --dataset-resampled too" in capsys.readouterr().err
    command = ["--model", "ViT-T32-8-linear", *flags, "--dataset-resampled"]
    assert main([*command, "--train-data-upsampling-factors", "2::1"]) == 2
    assert "there are 2 factors for the 1 parts" in capsys.readouterr().err


def test_drawing_without_workers_would_repeat_the_first_epoch(flags, monkeypatch):
    monkeypatch.setattr("openclip_linattn.train.open_clip_main", lambda argv: None)
    command = ["--model", "ViT-T32-8-linear", *flags, "--workers", "0", "--dataset-resampled"]
    with pytest.raises(UserError, match="the same shards in every epoch: give --workers 1"):
        run([*command, "--epochs", "2"])
    assert run(command) == 0


@pytest.mark.parametrize(("processes", "seed"), [(1, 7 + 2), (2, 7)])
def test_a_table_resumed_by_one_process_gets_another_order(flags, monkeypatch, tmp_path, processes, seed):
    seen = []
    monkeypatch.setattr("openclip_linattn.train.open_clip_main", seen.append)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    checkpoint = tmp_path / "epoch_2.pt"
    torch.save({"epoch": 2, "state_dict": {}, "optimizer": {}}, checkpoint)
    table = tmp_path / "table.csv"
    table.write_text("filepath\ttitle\n" + "a.jpg\tone\n" * 64)
    command = ["--model", "ViT-T32-8-linear", *flags, "--dataset-type", "csv", "--train-data", str(table)]
    command += ["--seed", "7", "--epochs", "3"]
    assert run([*command, "--name", "new"]) == 0
    assert run([*command, "--name", "resumed", "--resume", str(checkpoint)]) == 0
    assert [parse_args(argv).seed for argv in seen] == [7, seed]


def test_remote_shards_are_opened_by_our_readers(flags, monkeypatch):
    from webdataset.gopen import gopen_schemes

    seen = []
    monkeypatch.setattr(
        "openclip_linattn.train.open_clip_main", lambda argv: seen.append(gopen_schemes["http"])
    )
    monkeypatch.setitem(gopen_schemes, "http", None)
    monkeypatch.setenv("RANK", "1")
    assert run(["--model", "ViT-T32-8-linear", *flags]) == 0
    assert seen[0].__module__ == "openclip_linattn.data.remote.readers"


@pytest.mark.parametrize("name", ["9.tar", "bare.tar"])
def test_validation_shards_are_looked_at_before_training(flags, tmp_path, name):
    with tarfile.open(tmp_path / "bare.tar", "w"):
        pass
    with pytest.raises(UserError, match="(?s)^--val-data: .*" + name):
        run(["--model", "ViT-T32-8-linear", *flags, "--val-data", str(tmp_path / name)])


@pytest.mark.parametrize(
    ("model", "weights", "words"),
    [
        ("ViT-B-16-linear", "laion400m_e32", r'get_pretrained_cfg\("ViT-B-16", "laion400m_e32"\)'),
        ("ViT-T32-8-linear", "laion400m_e32", "no released weights"),
        ("ViT-T32-8-linear", "nowhere/epoch_1.pt", "no such file"),
    ],
)
def test_weights_that_are_not_there(flags, model, weights, words):
    with pytest.raises(UserError, match=words):
        run(["--model", model, *flags, "--pretrained", weights])
    with pytest.raises(UserError, match="no such checkpoint"):
        run(["--model", model, *flags, "--resume", "nowhere/epoch_1.pt"])


def test_csv_files_are_read_as_openclip_reads_them(tmp_path):
    table = tmp_path / "a.csv"
    table.write_text('filepath\ttitle\na.jpg\tone\nb.jpg\t"two\nlines"\n')
    assert csv_rows(str(table), "\t", ("filepath", "title")) == 2
    with pytest.raises(UserError, match=r"no column 'filepath'.*--csv-separator \(now ','\)"):
        csv_rows(str(table), ",", ("filepath", "title"))
    with pytest.raises(UserError, match="no column 'caption'"):
        csv_rows(str(table), "\t", ("filepath", "caption"))
    for name, content in (("missing.csv", None), ("empty.csv", b""), ("binary.csv", b"\xff\xfe\x00")):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name):
            csv_rows(str(tmp_path / name), "\t", ("filepath", "title"))


@pytest.mark.parametrize("extra", [["--train-num-samples", "20"], ["--train-num-samples", "0"]])
def test_an_epoch_without_a_step_is_refused(flags, extra, tmp_path):
    with pytest.raises(UserError, match="nothing would be trained"):
        run(
            ["--model", "ViT-T32-8-linear", *flags, "--train-data", "", "--dataset-type", "synthetic", *extra]
        )
    assert not (tmp_path / "logs").exists()


def test_an_epoch_of_fewer_batches_than_are_accumulated_is_refused(flags, monkeypatch):
    monkeypatch.setattr("openclip_linattn.train.open_clip_main", lambda argv: None)
    assert run(["--model", "ViT-T32-8-linear", *flags, "--accum-freq", "4"]) == 0
    with pytest.raises(UserError, match="128 samples is less than one step of 160"):
        run(["--model", "ViT-T32-8-linear", *flags, "--accum-freq", "5"])


def test_a_run_with_local_logs_is_not_written_over(flags, tmp_path):
    folder = tmp_path / "logs" / "old"
    folder.mkdir(parents=True)
    (folder / "out-0").write_text("")
    with pytest.raises(UserError, match="the run 'old' exists already"):
        run(["--model", "ViT-T32-8-linear", *flags, "--name", "old", "--log-local"])


def test_an_evaluation_leaves_the_record_of_the_training(flags, shards, monkeypatch, tmp_path):
    monkeypatch.setattr("openclip_linattn.train.open_clip_main", lambda argv: None)
    command = ["--model", "ViT-T32-8-linear", *flags, "--name", "x"]
    assert run(command) == 0
    before = read_manifest(tmp_path / "logs" / "x")
    evaluation = [*command, "--train-data", "", "--val-data", f"{shards}/test/0.tar"]
    assert run([*evaluation, "--resume", "latest"]) == 0
    assert read_manifest(tmp_path / "logs" / "x") == before
    assert run([*evaluation, "--name", "y"]) == 0
    facts = read_manifest(tmp_path / "logs" / "y")
    assert (facts["status"], "seen" in facts) == ("evaluated", False)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_run_that_another_process_is_at_is_left_alone(flags, shards, monkeypatch, tmp_path, evaluates):
    monkeypatch.setattr("openclip_linattn.train.open_clip_main", lambda argv: None)
    folder = tmp_path / "logs" / "x"
    (folder / "checkpoints").mkdir(parents=True)
    partial = folder / "checkpoints" / ".epoch_1.pt.123.tmp"
    partial.write_bytes(b"half")
    command = ["--model", "ViT-T32-8-linear", *flags, "--name", "x", "--resume", "latest"]
    if evaluates:
        command += ["--train-data", "", "--val-data", f"{shards}/test/0.tar"]
    script = (
        "import sys; from pathlib import Path; from openclip_linattn.run_lock import only_process\n"
        "with only_process(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    held = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(held, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another process is at work on the run"):
            run(command)
        assert partial.exists()
        other.kill()
    assert run(command) == 0
    assert not partial.exists()


def test_a_file_system_without_locks_trains_all_the_same(flags, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("openclip_linattn.train.open_clip_main", lambda argv: None)
    monkeypatch.setattr("openclip_linattn.run_lock.fcntl.lockf", refuse)
    assert run(["--model", "ViT-T32-8-linear", *flags, "--name", "x"]) == 0


def test_a_folder_of_logs_that_cannot_be_is_a_sentence(flags, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    command = ["--model", "ViT-T32-8-linear", *flags, "--logs", str(tmp_path / "file")]
    assert main([*command, "--name", "x"]) == 2
    assert "cannot be written (File exists): give --logs a folder" in capsys.readouterr().err


def test_a_record_that_cannot_be_closed_hides_no_failure(flags, monkeypatch, tmp_path, capsys):
    folder = tmp_path / "logs" / "x"

    def fail(argv: list[str]) -> None:
        (folder / "run.json").unlink()
        (folder / "run.json").mkdir()
        raise RuntimeError("out of memory")

    monkeypatch.setattr("openclip_linattn.train.open_clip_main", fail)
    monkeypatch.setattr("openclip_linattn.interruption.LINGER_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        main(["--model", "ViT-T32-8-linear", *flags, "--name", "x"])
    assert "run.json cannot be written (Is a directory)" in capsys.readouterr().err
    shutil.rmtree(folder)

    def lose(argv: list[str]) -> None:
        (folder / "run.json").unlink()
        (folder / "run.json").mkdir()

    monkeypatch.setattr("openclip_linattn.train.open_clip_main", lose)
    assert main(["--model", "ViT-T32-8-linear", *flags, "--name", "x"]) == 2


def test_other_processes_only_train(flags, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("openclip_linattn.train.open_clip_main", seen.append)
    for key, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    assert run(["--model", "ViT-T32-8-linear", *flags, "--workers", "99"]) == 0
    assert len(seen) == 1
    assert not (tmp_path / "logs").exists()


def test_a_run_that_fails_says_so(flags, monkeypatch, tmp_path):
    def fail(argv: list[str]) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("openclip_linattn.train.open_clip_main", fail)
    monkeypatch.setattr("openclip_linattn.interruption.LINGER_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        main(["--model", "ViT-T32-8-linear", *flags, "--name", "x"])
    facts = read_manifest(tmp_path / "logs" / "x")
    assert (facts["status"], facts["error"]) == ("failed", "RuntimeError: out of memory")
    assert facts["seen"] == {"epochs": 0, "steps": 0, "samples": 0}
    monkeypatch.setattr("openclip_linattn.train.open_clip_main", lambda argv: -1)
    assert main(["--model", "ViT-T32-8-linear", *flags, "--name", "y"]) == 1


def test_default_name_is_openclip_s():
    args = Namespace(model="ViT-B-16", lr=5e-4, batch_size=8, workers=2, precision="amp")
    assert default_name(args).endswith("-model_ViT-B-16-lr_0.0005-b_8-j_2-p_amp")


@pytest.mark.parametrize(
    ("data", "kind", "expected"),
    [("a.tar", "auto", True), ("a.csv", "auto", False), ("a", "webdataset", True), (None, "auto", False)],
)
def test_which_data_are_shards(data, kind, expected):
    assert is_shards(data, kind) is expected


def test_a_source_without_an_ending_needs_its_type(flags, shards):
    command = ["--model", "ViT-T32-8-linear", *flags, "--dataset-type", "auto", "--train-num-samples", "32"]
    with pytest.raises(UserError, match="--dataset-type webdataset"):
        run([*command, "--train-data", f"pipe:cat {shards}/00000.tar -"])


@pytest.mark.parametrize(
    ("samples", "batch", "world", "workers", "accum", "steps"),
    [
        (128, 32, 1, 1, 1, 4),
        (100, 32, 1, 1, 1, 4),
        (128, 32, 1, 3, 1, 6),
        (128, 8, 2, 2, 4, 2),
        (130, 8, 2, 2, 4, 2),
    ],
)
def test_steps_are_rounded_as_openclip_rounds(samples, batch, world, workers, accum, steps):
    plan = Plan(samples, batch, world, workers, accum, epochs=2)
    assert plan.steps_per_epoch == steps
    assert plan.totals(2) == {"epochs": 2, "steps": 2 * steps, "samples": 2 * steps * batch * world * accum}


def test_an_interrupted_segment_counts_its_saved_epochs(tmp_path):
    plan = Plan(32, 8, 1, 1, 1, epochs=5)
    manifest = Manifest(tmp_path / "run.json")
    manifest.start(plan, start_epoch=0, name="x")  # killed: the segment never ends
    again = Manifest(tmp_path / "run.json")
    longer = Plan(64, 8, 1, 1, 1, epochs=5)
    again.start(longer, start_epoch=2, name="x")
    again.finish("finished", longer, epochs_done=5)
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["seen"] == {"epochs": 5, "steps": 2 * 4 + 3 * 8, "samples": 2 * 32 + 3 * 64}
    assert list(tmp_path.iterdir()) == [tmp_path / "run.json"]


def test_facts_of_model_and_machine(monkeypatch, tmp_path):
    import open_clip

    facts = model_facts("ViT-B-16", open_clip.get_model_config("ViT-B-16"), image_size=448)
    assert facts["gmac_per_pair"] > 4 * 16.0
    assert facts["attention"] == "softmax"
    short = model_facts("ViT-B-16", open_clip.get_model_config("ViT-B-16"), context_length=32)
    assert short["gmac_per_pair"] < 20.543 - 1.5  # the text tower's 2.98 GMAC by 32 / 77, and less
    monkeypatch.chdir(tmp_path)
    facts = machine_facts(["--name", "a b"])
    assert facts["git_commit"] is None
    assert facts["command"].endswith("--name 'a b'")
    assert Path(tmp_path / "run.json").exists() is False


def test_a_large_validation_set_is_warned_of(shards, capsys, monkeypatch):
    args = Namespace(val_data=f"{shards}/test/0.tar", dataset_type="webdataset")
    look_at_validation(args)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("openclip_linattn.training_data.sample_count", lambda source: 100_000)
    look_at_validation(args)
    assert "100,000 samples" in (error := capsys.readouterr().err)
    assert "120 GB" in error
