import json
import shutil
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch

from openclip_linattn import registration
from openclip_linattn.configs import builtin_folder
from openclip_linattn.epochs import recorded_epoch
from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.checkpoints import Checkpoint, CheckpointError, find_checkpoints, read_params
from openclip_linattn.zeroshot.encoders.models import check_model_name, choose_device, load_model

CPU = torch.device("cpu")


def names(found: list[Checkpoint]) -> list[str]:
    return [each.path.name for each in found]


def plain_run(folder: Path, *epochs: object) -> Path:
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    for epoch in epochs:
        (checkpoints / f"epoch_{epoch}.pt").touch()
    (folder / "params.txt").write_text("model: ViT-B-32\n")
    return folder


@pytest.mark.parametrize("inside", [".", "checkpoints"])
def test_a_folder_gives_its_epochs_in_order(tmp_path: Path, inside: str) -> None:
    run = plain_run(tmp_path / "run", 10, 9, 1, "latest", "x")
    (run / "checkpoints" / "epoch_3.pt").mkdir()
    assert names(find_checkpoints([run / inside])) == ["epoch_1.pt", "epoch_9.pt", "epoch_10.pt"]


def test_latest_counts_only_when_named(tmp_path: Path) -> None:
    run = plain_run(tmp_path / "run", "latest")
    with pytest.raises(UserError, match=r"holds no epoch_N\.pt; name .*epoch_latest\.pt itself"):
        find_checkpoints([run])
    assert names(find_checkpoints([run / "checkpoints" / "epoch_latest.pt"])) == ["epoch_latest.pt"]


def test_a_checkpoint_named_twice_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = plain_run(tmp_path / "run", 1, 2)
    monkeypatch.chdir(run)
    found = find_checkpoints(["checkpoints/epoch_2.pt", run, "./checkpoints"])
    assert names(found) == ["epoch_2.pt", "epoch_1.pt"]
    assert all(each.path.is_absolute() for each in found)


@pytest.mark.parametrize("sources", [[], ["nowhere.pt"], ["empty"]])
def test_nothing_to_evaluate_is_explained(
    tmp_path: Path, sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        UserError, match=r"no checkpoint was named|nowhere\.pt does not exist|holds no epoch_N\.pt"
    ):
        find_checkpoints(sources)


def test_run_json_comes_before_params(tmp_path: Path) -> None:
    run = plain_run(tmp_path / "run", 1)
    (run / "params.txt").write_text(
        "force_image_size: 64\nforce_quick_gelu: True\nimage_mean: [0.5, 0.5, 0.5]\n"
    )
    (run / "run.json").write_text(json.dumps({"model": "ViT-B-16", "force_image_size": 96}))
    (found,) = find_checkpoints([run])
    assert (found.model, found.run) == ("ViT-B-16", run.resolve())
    assert found.settings == {"force_image_size": 96, "force_quick_gelu": True, "image_mean": [0.5] * 3}


def test_two_files_that_disagree_are_refused_unless_told(tmp_path: Path) -> None:
    run = plain_run(tmp_path / "run", 1)
    (run / "run.json").write_text('{"model": "ViT-B-16"}')
    with pytest.raises(UserError, match=r"run\.json says model 'ViT-B-16' and params\.txt says 'ViT-B-32'"):
        find_checkpoints([run])
    assert find_checkpoints([run], "ViT-L-14")[0].model == "ViT-L-14"


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_broken_run_json_is_named(tmp_path: Path, text: str) -> None:
    run = plain_run(tmp_path / "run", 1)
    (run / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json"):
        find_checkpoints([run])


def test_a_checkpoint_of_no_run_needs_the_model(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.touch()
    with pytest.raises(UserError, match="give --model NAME"):
        find_checkpoints([path])
    (found,) = find_checkpoints([path], "ViT-B-32")
    assert (found.run, found.results_folder, found.settings) == (None, None, {})


def test_params_of_openclip_are_read(tmp_path: Path) -> None:
    path = tmp_path / "params.txt"
    path.write_text(
        "checkpoint_path: a: b, c/checkpoints\ncsv_separator: \t\nforce_image_size: [64, 32]\n"
        "model: ViT-B-16\nno colon\nresume: None\n"
    )
    assert read_params(path) == {
        "checkpoint_path": "a: b, c/checkpoints",
        "csv_separator": "",
        "force_image_size": [64, 32],
        "model": "ViT-B-16",
        "resume": None,
    }


def test_an_unknown_model_gets_the_closest_names(make: Any) -> None:
    with pytest.raises(CheckpointError, match=r"unknown model 'ViT-B16'; the closest are .*ViT-B-16"):
        check_model_name("ViT-B16")
    with pytest.raises(CheckpointError, match="unknown model '#'"):
        check_model_name("#")
    assert check_model_name("ViT-B/16") == "ViT-B-16"


@pytest.mark.parametrize("name", ["hf-hub:some/model", "local-dir:/tmp"])
def test_a_scheme_that_ignores_the_checkpoint_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="weights of its own"):
        check_model_name(name)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_weights_of_the_file_are_loaded(tmp_path: Path, make: Any, prefix: str) -> None:
    path = make.checkpoint(tmp_path / "run", 1, seed=5, prefix=prefix)
    torch.manual_seed(5)
    expected = open_clip.create_model(make.model).state_dict()
    loaded = load_model(find_checkpoints([path])[0], device=CPU, precision="fp32")
    assert not loaded.clip.training
    assert all(torch.equal(value, expected[key]) for key, value in loaded.clip.state_dict().items())


def test_the_settings_of_the_run_are_used(tmp_path: Path, make: Any) -> None:
    torch.manual_seed(0)
    model = open_clip.create_model(make.model, force_image_size=[48, 64])
    path = make.checkpoint(tmp_path / "run", 1, seed=0)
    torch.save({"state_dict": model.state_dict()}, path)
    params = path.parent.parent / "params.txt"
    params.write_text(f"model: {make.model}\nforce_image_size: [48, 64]\nimage_mean: [0.1, 0.2, 0.3]\n")
    loaded = load_model(find_checkpoints([path])[0], device=CPU, precision="fp32")
    assert loaded.image_size == [48, 64]
    assert "0.1, 0.2, 0.3" in str(loaded.transform)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04"])
def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path, make: Any, content: bytes) -> None:
    path = tmp_path / "epoch_1.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"epoch_1\.pt does not load as"):
        load_model(find_checkpoints([path], make.model)[0], device=CPU, precision="fp32")


@pytest.mark.parametrize(
    "state", [{}, {"logit_scale": torch.zeros(())}, "other size"], ids=["none", "few", "size"]
)
def test_weights_of_another_model_are_refused(tmp_path: Path, make: Any, state: Any) -> None:
    path = make.checkpoint(tmp_path / "run", 1, seed=0)
    if state == "other size":
        state = torch.load(path, weights_only=True)["state_dict"]
        state["text_projection"] = torch.zeros(32, 8)
    torch.save({"state_dict": state}, path)
    with pytest.raises(CheckpointError, match="does not load as"):
        load_model(find_checkpoints([path])[0], device=CPU, precision="fp32")


def test_the_epoch_is_read_from_the_name_or_the_file(run_folder: Path, tmp_path: Path, make: Any) -> None:
    folder = run_folder / "checkpoints"
    found = find_checkpoints([run_folder, folder / "epoch_latest.pt"])
    assert [recorded_epoch(each.path) for each in found] == [2, 10, 7]
    other = tmp_path / "weights.pt"
    torch.save({"logit_scale": torch.zeros(())}, other)
    assert recorded_epoch(find_checkpoints([other], make.model)[0].path) is None


def test_a_device_that_is_not_there_is_explained() -> None:
    assert choose_device("cpu") == CPU
    with pytest.raises(UserError, match="device 'tpu9' cannot be used"):
        choose_device("tpu9")


def test_a_config_beside_a_lone_file_is_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MODEL_CONFIG_PATHS", "_MODEL_CONFIGS"):
        monkeypatch.setattr(open_clip.factory, name, getattr(open_clip.factory, name).copy())
    monkeypatch.setattr(registration, "_models", dict(registration._models))
    own = "own-ViT-T32-8-linear"
    shutil.copy(builtin_folder() / "ViT-T32-8-linear.json", tmp_path / f"{own}.json")
    (tmp_path / "lone.pt").touch()
    for name in (own, "own-ViT-T32/8-linear"):
        (found,) = find_checkpoints([tmp_path / "lone.pt"], name)
        assert check_model_name(found.model) == own


def test_a_model_that_is_meant_for_some_checkpoints_is_not_given_to_runs_of_another(tmp_path: Path) -> None:
    run = plain_run(tmp_path / "run", 1)
    (tmp_path / "lone.pt").touch()
    with pytest.raises(
        UserError, match=r"--model ViT-B-16 is for all checkpoints, and .*run records ViT-B-32"
    ):
        find_checkpoints([run, tmp_path / "lone.pt"], "ViT-B-16")
    assert [each.model for each in find_checkpoints([run, tmp_path / "lone.pt"], "ViT-B-32")] == [
        "ViT-B-32"
    ] * 2
    assert [each.model for each in find_checkpoints([run], "ViT-B-16")] == ["ViT-B-16"]
