"""Checkpoints converted to another attention: what is read, what is written, and that it loads."""

import json
import warnings
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.transform import PreprocessCfg
from safetensors.torch import save_file
from typer.testing import CliRunner

from openclip_linattn import add_model_configs
from openclip_linattn.cli import app
from openclip_linattn.configs import check_config
from openclip_linattn.conversion.checkpoint import Conversion, convert_checkpoint
from openclip_linattn.conversion.targets import choose_target
from openclip_linattn.errors import UserError
from openclip_linattn.registration import models
from openclip_linattn.zeroshot.checkpoints import find_checkpoints
from openclip_linattn.zeroshot.encoders.models import load_model

OWN = "convert-test-ViT"
CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


def copied_lists() -> dict[str, object]:
    """What OpenCLIP knows of model configs."""
    lists = {name: getattr(open_clip.factory, name) for name in ("_MODEL_CONFIG_PATHS", "_MODEL_CONFIGS")}
    return {name: old.copy() for name, old in lists.items()}


@pytest.fixture(autouse=True)
def registry(tmp_path, monkeypatch):
    """Stock models of the shapes that the tests need; what a test registers is gone after it."""
    from openclip_linattn import registration

    monkeypatch.chdir(tmp_path)
    for name, old in copied_lists().items():
        monkeypatch.setattr(open_clip.factory, name, old)
    monkeypatch.setattr(registration, "_models", dict(registration._models))
    folder = tmp_path / "stock"
    folder.mkdir()
    t32 = open_clip.get_model_config("ViT-T32-8-softmax")
    t32["vision_cfg"] = {"image_size": 48, "patch_size": 8, "width": 32, "layers": 3, "head_width": 16}
    configs = {
        OWN: CONFIG,
        "stock-ViT-T32-8": t32,
        "stock-ViT-T32-8-quickgelu": {**t32, "quick_gelu": True},
        "stock-ViT-avg": {**CONFIG, "vision_cfg": {**CONFIG["vision_cfg"], "pool_type": "avg"}},
        "stock-ViT-wide": {**CONFIG, "vision_cfg": {**CONFIG["vision_cfg"], "image_size": [32, 64]}},
        "stock-resnet": {**CONFIG, "vision_cfg": {"layers": [1, 1, 1, 1], "width": 8, "image_size": 32}},
        "stock-ViT-timm": {
            **CONFIG,
            "vision_cfg": {"timm_model_name": "vit_tiny_patch16_224", "timm_model_pretrained": False, "image_size": 32},
        },
    }  # fmt: skip
    for name, config in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)


def save(name: str, path: Path, *, ddp: bool = False, **options: object) -> open_clip.CLIP:
    """As training saves: with the optimizer's state."""
    torch.manual_seed(0)
    model = open_clip.create_model(name, **options)
    prefix = "module." if ddp else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {prefix + key: value for key, value in model.state_dict().items()}
    torch.save({"epoch": 2, "name": "x", "state_dict": weights, "optimizer": {"big": torch.zeros(9)}}, path)
    return model.eval()


def load(conversion: Conversion) -> open_clip.CLIP:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return open_clip.create_model(conversion.model, pretrained=str(conversion.output)).eval()


def features(model: open_clip.CLIP) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    size = model.visual.image_size[0]
    texts = open_clip.SimpleTokenizer(context_length=model.context_length)(["red", "a blue square"])
    with torch.no_grad():
        images = model.encode_image(torch.randn(2, 3, size, size, generator=generator))
        return torch.cat((images, model.encode_text(texts)))


@pytest.mark.parametrize("ddp", [False, True], ids=["single", "ddp"])
@pytest.mark.parametrize(
    ("kind", "text"), [("normlinear", False), ("neumannlinear", True), ("lininfsa", False)]
)
def test_a_stock_checkpoint_becomes_that_of_a_registered_model(tmp_path, kind, text, ddp):
    stock = save("stock-ViT-T32-8", tmp_path / "stock.pt", ddp=ddp)
    done = convert_checkpoint(str(tmp_path / "stock.pt"), kind, model="stock-ViT-T32-8", text=text)
    assert (done.model, done.config) == (f"ViT-T32-8-{kind}{'-text' if text else ''}", None)
    assert done.output == Path(f"{done.model}.pt")
    content = torch.load(done.output, weights_only=True)
    assert content.keys() == {"name", "state_dict", "converted_from"}
    model = load(done)
    expected = {key: value for key, value in stock.state_dict().items() if "out_proj.weight" not in key}
    for key, value in expected.items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=0)
    assert {row.tower for row in done.branches} == ({"image", "text"} if text else {"image"})
    assert [row.block for row in done.branches if row.tower == "image"] == [0, 1, 2]
    with pytest.raises(RuntimeError, match=f"trained with {kind}"):
        open_clip.create_model("ViT-T32-8-linear", pretrained=str(done.output))


def test_a_converted_file_alone_says_its_model_and_finds_the_config_beside_it(tmp_path, monkeypatch):
    from openclip_linattn import registration

    save(OWN, tmp_path / "own.pt")
    known = dict(registration._models)
    lists = copied_lists()
    done = convert_checkpoint(str(tmp_path / "own.pt"), "linear", model=OWN)
    expected = features(load(done))
    monkeypatch.setattr(registration, "_models", known)
    for name, old in lists.items():
        monkeypatch.setattr(open_clip.factory, name, old)
    assert done.model not in open_clip.list_models()
    (checkpoint,) = find_checkpoints([done.output])
    assert checkpoint.model == done.model
    loaded = load_model(checkpoint, device=torch.device("cpu"), precision="fp32")
    torch.testing.assert_close(features(loaded.clip), expected)
    with pytest.raises(UserError, match=r"own\.pt: no run\.json or params\.txt beside it names its model"):
        find_checkpoints([tmp_path / "own.pt"])


def test_branches_keep_their_size_unless_they_are_left_alone(tmp_path):
    save("stock-ViT-T32-8", tmp_path / "stock.pt")
    arguments = {"source": str(tmp_path / "stock.pt"), "kind": "normlinear", "model": "stock-ViT-T32-8"}
    scaled = convert_checkpoint(**arguments, output=tmp_path / "a.pt")
    plain = convert_checkpoint(**arguments, output=tmp_path / "b.pt", rescale=False)
    for row in scaled.branches:
        assert 0.5 < row.after / row.before < 1.5
    assert plain.branches[0].after > 5 * plain.branches[0].before


def test_the_newest_checkpoint_of_a_run_is_taken_with_the_run_s_settings(tmp_path):
    save("ViT-T32-8-linear", tmp_path / "run/checkpoints/epoch_9.pt", force_image_size=64)
    newest = save("ViT-T32-8-linear", tmp_path / "run/checkpoints/epoch_10.pt", force_image_size=64)
    (tmp_path / "run/params.txt").write_text("model: ViT-T32-8-linear\nforce_image_size: 64\n")
    done = convert_checkpoint(str(tmp_path / "run"), "softmax")
    assert done.source.name == "epoch_10.pt"
    assert done.source_kinds == {"image": "linear"}
    assert (done.model, done.config) == ("ViT-T32-8-softmax-64", Path("ViT-T32-8-softmax-64.json"))
    torch.testing.assert_close(load(done).visual.proj, newest.visual.proj)


def test_a_shape_without_a_registered_model_gets_a_config_beside_it(tmp_path):
    stock = save(OWN, tmp_path / "own.pt")
    (tmp_path / "out").mkdir()
    arguments = {"source": str(tmp_path / "own.pt"), "model": OWN, "text": True}
    linear = convert_checkpoint(**arguments, kind="normlinear", output=tmp_path / "out/a.pt")
    assert linear.model == f"{OWN}-normlinear-text"
    assert linear.config == tmp_path / f"out/{linear.model}.json"
    assert {module.kind for module in load(linear).modules() if hasattr(module, "train_tokens")} == {
        "normlinear"
    }
    assert convert_checkpoint(**arguments, kind="normlinear", output=tmp_path / "out/b.pt").config is None
    back = convert_checkpoint(
        str(linear.output), "softmax", model=linear.model, text=True, output=tmp_path / "out/c.pt"
    )
    assert back.model == f"{OWN}-softmax"
    torch.testing.assert_close(features(load(back)), features(stock), rtol=1e-4, atol=1e-5)
    assert sorted(add_model_configs(tmp_path / "out")) == [f"{OWN}-normlinear-text", f"{OWN}-softmax"]
    other = tmp_path / f"out/{OWN}-infsa-text.json"
    other.write_text(json.dumps({**json.loads(linear.config.read_text()), "embed_dim": 17}))
    with pytest.raises(UserError, match="describes another model"):
        convert_checkpoint(**arguments, kind="infsa", output=tmp_path / "out/d.pt")
    assert not (tmp_path / "out/d.pt").exists()
    assert other.exists()


def test_custom_text_models_stay_custom(tmp_path):
    stock = save("stock-ViT-T32-8", tmp_path / "run/checkpoints/epoch_1.pt", force_custom_text=True)
    (tmp_path / "run/params.txt").write_text("model: stock-ViT-T32-8\nforce_custom_text: True\n")
    done = convert_checkpoint(str(tmp_path / "run"), "infsa", text=True)
    assert json.loads(done.config.read_text())["custom_text"] is True
    assert "text.transformer.attention_kind" in load(done).state_dict()
    torch.testing.assert_close(load(done).visual.proj, stock.visual.proj)
    assert isinstance(load(done), open_clip.CustomTextCLIP)


def test_a_tag_is_loaded_through_openclip(tmp_path, monkeypatch):
    save("stock-ViT-T32-8", tmp_path / "weights.pt")
    asked = []
    monkeypatch.setattr(
        open_clip, "get_pretrained_cfg", lambda model, tag: {"url": tag} if tag == "laion" else {}
    )
    monkeypatch.setattr(
        open_clip, "download_pretrained", lambda config: asked.append(config) or str(tmp_path / "weights.pt")
    )
    done = convert_checkpoint("laion", "linear", model="stock-ViT-T32-8")
    assert asked == [{"url": "laion"}]
    load(done)
    with pytest.raises(UserError, match=r"laion is no file or folder; .* --model"):
        convert_checkpoint("laion", "linear")
    with pytest.raises(UserError, match="no pretrained tag of stock-ViT-T32-8: it has none"):
        convert_checkpoint("other", "linear", model="stock-ViT-T32-8")

    def offline(config: object) -> str:
        raise OSError("no network\nat all")

    monkeypatch.setattr(open_clip, "download_pretrained", offline)
    with pytest.raises(UserError, match=r"could not be downloaded: no network$"):
        convert_checkpoint("laion", "linear", model="stock-ViT-T32-8")


def test_what_only_the_table_of_tags_says_is_not_lost(tmp_path, monkeypatch):
    save("stock-ViT-T32-8", tmp_path / "weights.pt")
    tags = {
        "quick": {"quick_gelu": True},
        "other": {"mean": (0.5, 0.5, 0.5), "std": PreprocessCfg.std, "resize_mode": "squash"},
    }
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda model, tag: tags[tag])
    monkeypatch.setattr(open_clip, "download_pretrained", lambda config: str(tmp_path / "weights.pt"))
    with pytest.raises(UserError, match=r"trained with QuickGELU.* give --model stock-ViT-T32-8-quickgelu"):
        convert_checkpoint("quick", "linear", model="stock-ViT-T32-8")
    done = convert_checkpoint("quick", "linear", model="stock-ViT-T32-8-quickgelu")
    assert not any("--image" in note for note in done.notes)
    done = convert_checkpoint("other", "infsa", model="stock-ViT-T32-8")
    assert done.notes[-1].endswith("give --image-mean 0.5 0.5 0.5 --image-resize-mode squash")


def test_every_model_of_openclip_has_a_valid_target_or_a_reason():
    targets, ours = {}, set(models())
    for name in open_clip.list_models():
        config = open_clip.get_model_config(name)
        size = config["vision_cfg"].get("image_size", 224)
        for text in (False, True):
            try:
                target = choose_target(
                    name, config, "normlinear", text=text, last=None, custom_text=False, image_size=size
                )
            except UserError:
                continue
            if name not in ours:
                check_config(Path(f"{target.name}.json"), target.content)
                targets[name, text] = target.name
    assert targets["ViT-L-14-336-quickgelu", True] == "ViT-L-14-336-normlinear-text"
    assert targets["roberta-ViT-B-32", False] == "roberta-ViT-B-32-normlinear"
    assert ("roberta-ViT-B-32", True) not in targets
    assert targets["ViT-H-14-worldwide", False] == "ViT-H-14-worldwide-normlinear"


def test_quick_gelu_is_said(tmp_path):
    save("stock-ViT-T32-8-quickgelu", tmp_path / "stock.pt")
    done = convert_checkpoint(str(tmp_path / "stock.pt"), "linear", model="stock-ViT-T32-8-quickgelu")
    assert done.model == "ViT-T32-8-linear"
    assert any("QuickGELU" in note for note in done.notes)
    save("stock-ViT-T32-8", tmp_path / "plain.pt")
    done = convert_checkpoint(str(tmp_path / "plain.pt"), "infsa", model="stock-ViT-T32-8")
    assert not any("QuickGELU" in note for note in done.notes)


@pytest.mark.parametrize(
    ("model", "kind", "options", "words"),
    [
        ("stock-ViT-avg", "linear", {}, "vision_cfg.pool_type = 'avg'"),
        ("stock-ViT-wide", "linear", {}, "not square"),
        ("stock-resnet", "linear", {}, "ResNet"),
        ("stock-ViT-timm", "linear", {}, "timm image tower"),
        (OWN, "flash", {}, "unknown attention kind 'flash'"),
        (OWN, "lininfsa", {"text": True}, "no causal form.*leave out --text"),
        (OWN, "linear", {"output": Path("exists.pt")}, "exists already"),
        (OWN, "linear", {"output": Path("stock")}, "stock is a folder; .* such as stock/converted.pt"),
        (OWN, "linear", {"output": Path("no/where.pt")}, "does not exist"),
        (OWN, "linear", {"output": Path("x.safetensors")}, r"ends in \.pt"),
        ("ViT-T32-8-linear", "linear", {}, "has linear attention already"),
        ("ViT-T32-8-softmax", "softmax", {"text": True}, "has softmax attention already"),
        ("ViT-T32-8-linear-text", "infsa", {}, "--text"),
        ("ViT-T32-8-linear", "softmax", {"model": "ViT-T32-8-infsa"}, "trained with linear"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_nothing_is_left(tmp_path, model, kind, options, words):
    save(model, tmp_path / "source.pt")
    (tmp_path / "exists.pt").write_text("here")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=words):
        convert_checkpoint(str(tmp_path / "source.pt"), kind, **{"model": model, **options})
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("form", ["bare", "half", "safetensors"])
def test_weights_are_read_in_every_form(tmp_path, form):
    weights = {key: value.contiguous() for key, value in save(OWN, tmp_path / "x.pt").state_dict().items()}
    path = tmp_path / ("own.safetensors" if form == "safetensors" else "own.pt")
    if form == "half":
        weights = {
            key: value.half() if value.is_floating_point() else value for key, value in weights.items()
        }
    save_file(weights, path) if form == "safetensors" else torch.save(weights, path)
    done = convert_checkpoint(str(path), "linear", model=OWN)
    model = load(done)
    assert model.visual.proj.dtype == torch.float32
    torch.testing.assert_close(model.visual.proj, weights["visual.proj"].float())


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "other model"])
def test_damaged_files_are_refused_and_nothing_is_left(tmp_path, damage):
    save("ViT-T32-8-softmax" if damage == "other model" else OWN, tmp_path / "source.pt")
    content = (tmp_path / "source.pt").read_bytes()
    damaged = {"empty": b"", "cut": content[: len(content) // 2], "text": b"no checkpoint\n"}
    (tmp_path / "source.pt").write_bytes(damaged.get(damage, content))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=f"source.pt does not load as {OWN}"):
        convert_checkpoint(str(tmp_path / "source.pt"), "linear", model=OWN)
    assert sorted(tmp_path.iterdir()) == before


def test_an_output_that_cannot_be_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "source.pt").write_text("no checkpoint")
    with pytest.raises(UserError, match="stock is a folder"):
        convert_checkpoint(str(tmp_path / "source.pt"), "linear", model=OWN, output=Path("stock"))


def test_weights_of_a_run_that_diverged_are_refused_by_name(tmp_path):
    weights = save(OWN, tmp_path / "source.pt").state_dict()
    weights["visual.proj"][0, 0] = torch.nan
    torch.save({"state_dict": weights}, tmp_path / "source.pt")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"NaN or infinite numbers in 1 of its weights, visual\.proj first"):
        convert_checkpoint(str(tmp_path / "source.pt"), "linear", model=OWN)
    assert sorted(tmp_path.iterdir()) == before


def test_a_config_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    save(OWN, tmp_path / "source.pt")
    before = sorted(tmp_path.iterdir())

    def refuse(path: Path, content: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("openclip_linattn.conversion.checkpoint.write_json", refuse)
    with pytest.raises(UserError, match=rf"{OWN}-linear\.json cannot be written .*Permission denied"):
        convert_checkpoint(str(tmp_path / "source.pt"), "linear", model=OWN)
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    save(OWN, tmp_path / "source.pt")
    before = sorted(tmp_path.iterdir())

    def write(content: object, path: Path) -> None:
        path.write_bytes(b"part")
        raise RuntimeError("PytorchStreamWriter failed writing file\nmore")

    monkeypatch.setattr(torch, "save", write)
    with pytest.raises(
        UserError, match=r"a\.pt cannot be written \(PytorchStreamWriter failed writing file\)"
    ):
        convert_checkpoint(str(tmp_path / "source.pt"), "linear", model=OWN, output=tmp_path / "a.pt")
    assert sorted(tmp_path.iterdir()) == before


def test_a_name_that_is_taken_leaves_no_config(tmp_path):
    save(OWN, tmp_path / "source.pt")
    done = convert_checkpoint(str(tmp_path / "source.pt"), "linear", model=OWN)
    others = tmp_path / "others"
    others.mkdir()
    content = {**json.loads(done.config.read_text()), "embed_dim": 17}
    for name in (f"{OWN}-infsa", f"{OWN}-infsa-32"):
        (others / f"{name}.json").write_text(json.dumps(content))
    add_model_configs(others)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match="is taken by"):
        convert_checkpoint(str(tmp_path / "source.pt"), "infsa", model=OWN)
    assert sorted(tmp_path.iterdir()) == before


def test_a_result_that_does_not_load_is_taken_away(tmp_path, monkeypatch):
    from openclip_linattn.conversion import checkpoint

    save(OWN, tmp_path / "source.pt")
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(
        checkpoint, "noise_images", lambda clip, count: torch.full((count, 3, 32, 32), torch.nan)
    )
    with pytest.raises(UserError, match="other features"):
        convert_checkpoint(str(tmp_path / "source.pt"), "linear", model=OWN)
    assert sorted(tmp_path.iterdir()) == before


def test_the_command_prints_branches_and_how_to_load(tmp_path):
    save("ViT-T32-8-softmax", tmp_path / "source.pt")
    runner = CliRunner()
    arguments = ["convert", "source.pt", "--to", "normlinear", "--model", "ViT-T32-8-softmax"]
    shown = runner.invoke(app, [*arguments, "--no-rescale"])
    assert shown.exit_code == 0, shown.output
    assert "ViT-T32-8-softmax (image softmax) to ViT-T32-8-normlinear, not rescaled" in shown.output
    assert 'create_model("ViT-T32-8-normlinear", pretrained="ViT-T32-8-normlinear.pt")' in shown.output
    as_json = runner.invoke(app, [*arguments, "--text", "--json"])
    content = json.loads(as_json.stdout)
    assert content["model"] == "ViT-T32-8-normlinear-text"
    assert [row["tower"] for row in content["branches"]] == ["image"] * 3 + ["text"] * 3
    again = runner.invoke(app, arguments)
    assert isinstance(again.exception, UserError)
    own = runner.invoke(app, [*arguments, "--last", "1", "--output", "stock/a.pt"])
    config = tmp_path / "stock/ViT-T32-8-normlinear-last1.json"
    assert f"OPENCLIP_LINATTN_MODEL_CONFIGS={config} is set" in own.output
