"""The command: what it writes, what a process without this package makes of it, and what it refuses."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest
import torch
from typer.testing import CliRunner

from openclip_linattn import add_model_configs
from openclip_linattn.cli import app
from openclip_linattn.errors import UserError
from openclip_linattn.export import checkpoint as export_module
from openclip_linattn.export import onnx_graphs
from openclip_linattn.export.checkpoint import export_checkpoint
from openclip_linattn.export.description import describe
from openclip_linattn.export.towers import TOWERS, find_tower
from openclip_linattn.termination import Terminated
from openclip_linattn.zeroshot.checkpoints import Checkpoint

NAME = "ViT-T32-8-infsa-text"
WITHOUT_PACKAGE = """
import json, sys
for name in ("openclip_linattn", "openclip_linattn_autoload", "openclip_scaling"):
    sys.modules[name] = None  # importing it raises
import torch
folder, other = sys.argv[1:]
given = torch.load(f"{folder}/given.pt")
for part, batch in given.items():
    features = torch.export.load(f"{folder}/torch/{part}.pt2").module()(batch["input"])
    torch.testing.assert_close(features, batch["features"], rtol=0, atol=1e-5)
import open_clip
try:
    open_clip.create_model(f"local-dir:{other}")
except RuntimeError as error:
    print(error)
"""


def test_the_files_work_without_this_package_and_a_hub_folder_fails_there(saved, loaded, tmp_path):
    run = saved(NAME)
    export_checkpoint(str(run), "torch", tmp_path / "torch")
    export_checkpoint(str(run), "hub", tmp_path / "hub")
    towers = [find_tower(loaded(NAME), part) for part in TOWERS]
    given = {tower.part: {"input": tower.batches[-1], "features": tower.expected[-1]} for tower in towers}
    torch.save(given, tmp_path / "given.pt")
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE, tmp_path, tmp_path / "hub"],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "Unknown model" in result.stdout
    assert "infsa" in result.stdout


def test_the_command_says_what_it_wrote_and_how_far_it_is_from_the_model(saved, tmp_path, monkeypatch):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(onnx_graphs, "LARGEST_FILE", 1000)  # the weights come beside the graph
    out = tmp_path / "exported"
    arguments = ["export", str(saved("ViT-T32-8-linear")), "--format", "onnx", "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--tower", "image", "--json"], catch_exceptions=False)
    said = json.loads(result.stdout)
    assert said["files"] == {path.name: path.stat().st_size for path in out.iterdir()}
    assert set(said["files"]) == {"export.json", "image.onnx", "image.onnx.data"}
    assert 0 <= said["differences"]["image"] <= 1e-5
    described = json.loads((out / "export.json").read_text())
    assert described["towers"]["image"]["file"] == "image.onnx"
    model = onnx.load(out / "image.onnx")  # finds its weights under the folder's last name
    (entry,) = model.metadata_props
    assert (entry.key, json.loads(entry.value)) == ("export.json", described)


def test_the_description_says_all_that_a_program_needs(loaded):
    mine = loaded("ViT-T32-8-linear", force_context_length=16)
    run = Path("/cluster/logs/linear")
    checkpoint = Checkpoint(run / "checkpoints" / "epoch_2.pt", "ViT-T32-8-linear", run=run)
    towers = [find_tower(mine, part) for part in TOWERS]
    described = json.loads(json.dumps(describe(checkpoint, mine, towers, ".pt2", [])))
    assert described["checkpoint"] == "linear/checkpoints/epoch_2.pt"
    common = {"output": "features", "width": 32}
    assert described["towers"] == {
        "image": {"file": "image.pt2", "input": "images", "shape": ["batch", 3, 48, 48], "dtype": "float32"} | common,
        "text": {"file": "text.pt2", "input": "tokens", "shape": ["batch", 16], "dtype": "int64"} | common,
    }  # fmt: skip
    assert described["preprocess"]["mean"] == list(open_clip.OPENAI_DATASET_MEAN)
    assert described["logit_scale"] == pytest.approx(mine.clip.logit_scale.exp().item())
    assert described["logit_bias"] is None
    tokenizer = described["tokenizer"]
    example = tokenizer["example"]
    assert mine.tokenizer([example["text"]])[0, : len(example["tokens"])].tolist() == example["tokens"]
    assert [example["tokens"][0], example["tokens"][-1]] == [tokenizer["start"], tokenizer["end"]]
    assert tokenizer["options"] == {}


def test_a_scale_that_is_no_number_is_refused(loaded):
    mine = loaded.__wrapped__("ViT-T32-8-linear")
    mine.clip.logit_scale.data.fill_(torch.nan)
    with pytest.raises(UserError, match="the model's own logit scale is NaN or infinite"):
        describe(Checkpoint(Path("epoch_1.pt"), "ViT-T32-8-linear"), mine, [], ".pt2", [])


def test_a_hub_folder_gives_the_same_model_again(saved, loaded, tmp_path):
    export = export_checkpoint(str(saved(NAME)), "hub", tmp_path / "hub")
    again, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'hub'}")
    mine = loaded(NAME)
    assert again.visual.transformer.resblocks[0].attn.kind == "infsa"
    assert again.transformer.resblocks[0].attn.kind == "infsa"
    assert set(export.files) == {"README.md", "open_clip_config.json", "open_clip_model.safetensors"}
    assert export.differences == {"image": 0, "text": 0}
    for name, tensor in mine.clip.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert [type(step) for step in transform.transforms] == [type(step) for step in mine.transform.transforms]
    tokenizer = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'hub'}")
    assert torch.equal(tokenizer(["a dog"]), mine.tokenizer(["a dog"]))


def test_a_hub_folder_keeps_the_settings_of_the_run(saved, tmp_path):
    run = saved("ViT-T32-8-linear")
    with (run / "params.txt").open("a") as file:
        file.write("force_image_size: 64\nforce_context_length: 16\nimage_interpolation: bilinear\n")
    export_checkpoint(str(run), "hub", tmp_path / "hub")
    again = open_clip.create_model(f"local-dir:{tmp_path / 'hub'}")
    assert tuple(again.visual.image_size) == (64, 64)
    assert again.context_length == 16
    assert again.visual.preprocess_cfg["interpolation"] == "bilinear"


def test_a_hub_folder_of_a_model_of_ones_own_holds_its_config(saved, tmp_path, registry):
    config = open_clip.get_model_config("ViT-T32-8-linear")
    config["vision_cfg"]["timm_model_name"] = "linattn_w32_d2_h2_p8_n37_linear"
    path = tmp_path / "own-vit.json"
    path.write_text(json.dumps(config))
    add_model_configs(path)
    export = export_checkpoint(str(saved("own-vit")), "hub", tmp_path / "hub")
    assert json.loads((tmp_path / "hub" / "own-vit.json").read_text()) == config
    assert 'add_model_configs("FOLDER/own-vit.json")' in export.notes[0]
    assert 'add_model_configs("FOLDER/own-vit.json")' in (tmp_path / "hub" / "README.md").read_text()


def test_nothing_is_left_where_features_differ(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "hub_differences", lambda *_: {"image": 0.0, "text": float("nan")})
    with pytest.raises(UserError, match=r"text features of the hub export differ .* nothing was written"):
        export_checkpoint(str(saved("ViT-T32-8-linear")), "hub", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_weights_that_are_no_numbers_are_refused_as_the_model_s_own_fault(saved, loaded, tmp_path):
    weights = dict(loaded("ViT-T32-8-linear").clip.state_dict())
    weights["ln_final.bias"] = torch.full_like(weights["ln_final.bias"], torch.nan)
    with pytest.raises(UserError, match="the model's own text features are NaN or infinite"):
        export_checkpoint(str(saved("ViT-T32-8-linear", weights)), "hub", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["torch", "hub"])
def test_nothing_is_left_on_a_disk_that_is_full(form, saved, tmp_path):
    run = saved("ViT-T32-8-softmax")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # bytes of a file
    try:
        with pytest.raises(UserError, match="cannot be written"):
            export_checkpoint(str(run), form, tmp_path / "out", towers=TOWERS if form == "hub" else ["image"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(("interruption", "status"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_an_interrupted_command_leaves_nothing(interruption, status, saved, tmp_path, monkeypatch):
    def interrupt(*_):
        raise interruption

    monkeypatch.setattr(export_module, "write_hub_folder", interrupt)
    run = saved("ViT-T32-8-linear")
    result = CliRunner().invoke(app, ["export", str(run), "--format", "hub", "--out", str(tmp_path / "out")])
    assert (result.exit_code, result.stderr) == (status, "Interrupted: nothing was written.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"form": "hub", "towers": ["image"]}, "leave --tower out"),
        ({"form": "tensorrt"}, "unknown format 'tensorrt'"),
        ({"form": "torch", "towers": []}, "got none"),
        ({"form": "torch", "output": "full"}, "full exists already"),
        ({"form": "torch", "output": "absent/out"}, "absent does not exist"),
        ({"form": "torch"}, "absent.pt is no file or folder"),
    ],
)
def test_what_cannot_be_exported_is_refused(arguments, sentence, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    options = {"output": "out", **arguments}
    output = tmp_path / options.pop("output")
    with pytest.raises(UserError, match=sentence):
        export_checkpoint(str(tmp_path / "absent.pt"), output=output, **options)
    assert not (tmp_path / "out").exists()


def test_without_the_packages_of_onnx_there_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("openclip_linattn.export.onnx_graphs.find_spec", lambda _: None)
    with pytest.raises(
        UserError, match=r"needs onnx and onnxscript: pip install 'openclip-linattn\[export\]'"
    ):
        export_checkpoint("any.pt", "onnx", tmp_path / "out")
