"""Towers that are not OpenCLIP's own: of transformers for texts, of timm for images."""

import json
from dataclasses import replace

import open_clip
import pytest
import torch
from transformers import BertConfig, BertTokenizerFast

from openclip_linattn import add_model_configs, infvit
from openclip_linattn.errors import UserError
from openclip_linattn.export.checkpoint import export_checkpoint
from openclip_linattn.export.onnx_graphs import read_onnx
from openclip_linattn.export.programs import read_torch
from openclip_linattn.export.towers import find_tower, largest_difference

BERT = "bert-ViT-linear"
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dog", "photo", "of")
IMAGE_SIDE = {"test_vit": 160, "infvit4_16_lininfsa": 224}


@pytest.fixture
def bert(tmp_path, registry):
    """The name of a model with a small BERT, made from a folder, for texts of 12 tokens."""
    text = tmp_path / "text"
    BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=20,
    ).save_pretrained(text)  # fmt: skip
    (text / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(str(text / "vocab.txt")).save_pretrained(text)
    config = open_clip.get_model_config("ViT-T32-8-linear")
    config["text_cfg"] = {
        "hf_model_name": str(text), "hf_tokenizer_name": str(text), "hf_proj_type": "linear", "context_length": 12,
        "tokenizer_kwargs": {"clean": "lower"},
    }  # fmt: skip
    path = tmp_path / f"{BERT}.json"
    path.write_text(json.dumps(config))
    add_model_configs(path)
    return BERT


@pytest.fixture
def timm_model(tmp_path, registry, monkeypatch):
    """Gives the name of a model with an image tower of timm; InfViT is made narrow."""
    monkeypatch.setattr(infvit, "SIZES", {"patch_size": 16, "embed_dim": 32, "depth": 1, "num_heads": 2})

    def register(tower):
        config = open_clip.get_model_config("ViT-T32-8-linear")
        config["vision_cfg"] = {
            "timm_model_name": tower, "timm_model_pretrained": False, "timm_pool": "", "timm_proj": "linear",
            "image_size": IMAGE_SIDE[tower],
        }  # fmt: skip
        path = tmp_path / f"clip-{tower}.json"
        path.write_text(json.dumps(config))
        open_clip.add_model_config(path)
        return path.stem

    return register


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_a_text_tower_of_transformers_is_exported_with_its_tokenizer(form, bert, saved, loaded, tmp_path):
    if form == "onnx":
        pytest.importorskip("onnxruntime")
    weights = loaded.__wrapped__(bert).clip.state_dict()
    out = tmp_path / "out"
    export = export_checkpoint(str(saved(bert, weights)), form, out, towers=["text"])
    described = json.loads((out / "export.json").read_text())
    assert described["towers"]["text"]["shape"] == ["batch", 12]
    assert [described["tokenizer"][name] for name in ("start", "end", "padding")] == [2, 3, 0]
    assert described["tokenizer"]["options"] == {"clean": "lower"}
    assert described["tokenizer"]["example"]["tokens"] == [2, 5, 7, 8, 5, 6, 3]
    assert {"tokenizer.json", *described["tokenizer"]["files"]} < set(export.files)
    read = read_torch(out / "text.pt2") if form == "torch" else read_onnx(out / "text.onnx")
    tokens = torch.randint(5, 9, (5, 12))  # texts without padding, and with nothing else
    tokens[1:, 2:] = 0
    expected = loaded.__wrapped__(bert).clip.encode_text(tokens, normalize=True)
    torch.testing.assert_close(read(tokens), expected, rtol=0, atol=1e-5)


def test_a_hub_folder_with_a_text_tower_of_transformers_can_be_moved(bert, saved, loaded, tmp_path):
    weights = loaded.__wrapped__(bert).clip.state_dict()
    hub = tmp_path / "hub"
    export = export_checkpoint(str(saved(bert, weights)), "hub", hub)
    assert any('set hf_model_name and hf_tokenizer_name in it to "FOLDER"' in note for note in export.notes)
    assert str(tmp_path) not in (hub / "README.md").read_text()
    (tmp_path / "text").rename(tmp_path / "gone")
    config = json.loads((hub / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"].update(hf_model_name=str(hub), hf_tokenizer_name=str(hub))
    (hub / "open_clip_config.json").write_text(json.dumps(config))
    again = open_clip.create_model(f"local-dir:{hub}")
    for name, tensor in weights.items():
        assert torch.equal(again.state_dict()[name], tensor)
    tokens = open_clip.get_tokenizer(f"local-dir:{hub}")(["a photo of a dog"])
    assert tokens.tolist() == [[2, 5, 7, 8, 5, 6, 3, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("tower", IMAGE_SIDE)
def test_an_image_tower_of_timm_is_exported(tower, timm_model, saved, loaded, tmp_path):
    name = timm_model(tower)
    run = saved(name, loaded.__wrapped__(name).clip.state_dict())
    export = export_checkpoint(str(run), "torch", tmp_path / "out", towers=["image"])
    assert export.differences["image"] <= 1e-5
    hub = export_checkpoint(str(run), "hub", tmp_path / "hub")
    assert hub.differences == {"image": 0, "text": 0}
    readme = (tmp_path / "hub" / "README.md").read_text()
    assert ("import openclip_linattn" in readme) == tower.startswith("infvit")


def test_an_image_tower_of_timm_has_an_onnx_graph(timm_model, saved, loaded, tmp_path):
    pytest.importorskip("onnxruntime")
    name = timm_model("infvit4_16_lininfsa")
    run = saved(name, loaded.__wrapped__(name).clip.state_dict())
    export = export_checkpoint(str(run), "onnx", tmp_path / "out", towers=["image"])
    assert export.differences["image"] <= 1e-5


def test_a_model_of_another_class_is_refused(loaded):
    class Other(open_clip.CLIP):
        pass

    whole = loaded("ViT-T32-8-linear")
    mine = replace(whole, clip=object.__new__(Other))
    with pytest.raises(
        UserError, match="a model of class Other cannot be exported; only CLIP and CustomText"
    ):
        find_tower(mine, "image")


def test_a_tower_that_takes_no_images_of_its_size_is_refused(timm_model, loaded):
    mine = loaded.__wrapped__(timm_model("infvit4_16_lininfsa"))
    mine.clip.visual.image_size = (64, 64)
    with pytest.raises(UserError, match=r"computes no image features of \(1, 3, 64, 64\) inputs: "):
        find_tower(mine, "image")


def test_the_difference_is_that_to_the_model_s_own_features(loaded):
    tower = find_tower(loaded("ViT-T32-8-linear"), "text")
    shifted = iter([tower.expected[0], tower.expected[1] + 0.5])
    assert largest_difference(tower, lambda _: next(shifted)) == pytest.approx(0.5)
