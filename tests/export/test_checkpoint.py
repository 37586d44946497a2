"""The command: what it writes, what a process without this package makes of it, and what it refuses."""

import json
import os
import subprocess
import sys

import open_clip
import pytest
import torch
from typer.testing import CliRunner

from openclip_linattn import add_model_configs, registration
from openclip_linattn.cli import app
from openclip_linattn.errors import UserError
from openclip_linattn.export import checkpoint as export_module
from openclip_linattn.export.checkpoint import export_checkpoint
from openclip_linattn.export.towers import find_tower

NAME = "ViT-T32-8-neumannlinear-text"
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
    towers = [find_tower(loaded(NAME), part) for part in ("image", "text")]
    with torch.no_grad():
        given = {
            tower.part: {"input": batch, "features": tower.encode(batch, normalize=True)}
            for tower in towers
            for batch in tower.batches
        }
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
    assert "neumannlinear" in result.stdout


def test_the_command_says_what_it_wrote_and_how_far_it_is_from_the_model(saved, tmp_path):
    pytest.importorskip("onnxruntime")
    out = tmp_path / "exported"
    arguments = [
        "export",
        str(saved(NAME)),
        "--format",
        "onnx",
        "--out",
        str(out),
        "--tower",
        "image",
        "--json",
    ]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    said = json.loads(result.stdout)
    assert said["files"] == {path.name: path.stat().st_size for path in out.iterdir()}
    assert set(said["files"]) == {"export.json", "image.onnx"}
    assert 0 <= said["differences"]["image"] <= 1e-5
    described = json.loads((out / "export.json").read_text())
    assert described["towers"] == {
        "image": {"file": "image.onnx", "input": "images", "shape": ["batch", 3, 48, 48], "dtype": "float32"}
    }
    assert described["preprocess"]["mean"] == list(open_clip.OPENAI_DATASET_MEAN)


def test_a_hub_folder_gives_the_same_model_again(saved, loaded, tmp_path):
    export = export_checkpoint(str(saved(NAME)), "hub", tmp_path / "hub")
    again, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'hub'}")
    mine = loaded(NAME)
    assert again.visual.transformer.resblocks[0].attn.kind == "neumannlinear"
    assert again.transformer.resblocks[0].attn.kind == "neumannlinear"
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


def test_a_hub_folder_of_a_model_of_ones_own_holds_its_config(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIG_PATHS", list(open_clip.factory._MODEL_CONFIG_PATHS))
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIGS", dict(open_clip.factory._MODEL_CONFIGS))
    monkeypatch.setattr(registration, "_models", dict(registration._models))
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
    monkeypatch.setattr(export_module, "largest_difference", lambda *_: float("nan"))
    with pytest.raises(UserError, match=r"image features of the torch export differ .* nothing was written"):
        export_checkpoint(str(saved("ViT-T32-8-linear")), "torch", tmp_path / "out", towers=["image"])
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
