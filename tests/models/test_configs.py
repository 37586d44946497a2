"""Model configs: a fault in one is refused with the file, the key and what is allowed."""

import json
from pathlib import Path

import pytest

from openclip_linattn.configs import (
    CONFIGS_VARIABLE,
    builtin_folder,
    config_folders,
    read_config,
    read_configs,
)
from openclip_linattn.errors import UserError


@pytest.fixture
def content() -> dict:
    return json.loads((builtin_folder() / "ViT-T32-8-normlinear.json").read_text())


def write(folder: Path, content: object, name: str = "ViT-mine-8-linear") -> Path:
    path = folder / f"{name}.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_every_shipped_config_is_valid():
    names = [config.name for config in read_configs(builtin_folder())]
    assert len(names) == len(set(names))
    sizes = (
        "ViT-S-16",
        "ViT-B-16",
        "ViT-L-16",
        "InfViT-4-16",
        "ViT-T32-8",
        "ViT-T48-8",
        "ViT-T64-8",
        "ViT-T96-8",
    )
    for size in sizes:
        for kind in (
            "softmax",
            "linear",
            "normlinear",
            "normlinearmean",
            "infsa",
            "lininfsa",
            "neumannlinear",
        ):
            assert f"{size}-{kind}" in names
        for kind in ("linear", "normlinear", "normlinearmean", "infsa", "neumannlinear"):
            assert f"{size}-{kind}-text" in names
        assert f"{size}-softmax-text" not in names
        assert f"{size}-lininfsa-text" not in names


def test_training_length_is_one_constant_per_family():
    tokens = {config.name: config.tower.train_tokens for config in read_configs(builtin_folder())}
    assert {count for name, count in tokens.items() if "-16-" in name} == {197}
    assert {count for name, count in tokens.items() if "-8-" in name} == {37}


def test_the_files_are_what_the_script_writes():
    script = Path(__file__).parents[2] / "scripts" / "write_model_configs.py"
    namespace: dict = {"__name__": "write_model_configs"}
    exec(compile(script.read_text(), script, "exec"), namespace)
    written = {path.stem: json.loads(path.read_text()) for path in builtin_folder().glob("*.json")}
    assert written == namespace["all_configs"]()


def tower(name: str) -> dict:
    return {"timm_model_name": name}


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("", {"embedding_dim": 32}, ["unknown key embedding_dim", "embed_dim"]),
        ("", {"embed_dim": None}, ["embed_dim is None"]),
        ("", {"embed_dim": True}, ["embed_dim is True"]),
        ("", {"quick_gelu": True}, ["unknown key quick_gelu"]),
        ("vision_cfg", {"ls_init_value": 1e-4}, ["unknown key vision_cfg.ls_init_value", "image_size"]),
        ("vision_cfg", {"width": 64}, ["unknown key vision_cfg.width"]),
        ("vision_cfg", {"timm_pool": "avg"}, ["vision_cfg.timm_pool is 'avg'"]),
        ("vision_cfg", {"timm_model_pretrained": True}, ["vision_cfg.timm_model_pretrained"]),
        ("vision_cfg", {"image_size": 50}, ["50", "patch size 8"]),
        ("vision_cfg", {"image_size": "48"}, ["image_size", "'48'"]),
        ("vision_cfg", tower("vit_base_patch16_224"), ["vit_base_patch16_224", "normlinear"]),
        ("vision_cfg", tower("linattn_w32_d3_h2_p8_n37_lineer"), ["lineer", "normlinear", "softmax"]),
        ("vision_cfg", tower("linattn_w32_d3_h2_p8_linear"), ["training tokens"]),
        ("vision_cfg", tower("linattn_w32_d3_h3_p8_n37_linear"), ["32", "3 heads"]),
        ("vision_cfg", tower("linattn_w32_d3_h2_p8_n37_lininfsa_text32"), ["lininfsa", "causal"]),
        ("vision_cfg", {"timm_model_name": 7}, ["timm_model_name is 7"]),
        ("text_cfg", {"hf_model_name": "bert"}, ["unknown key text_cfg.heads", "hf_tokenizer_name"]),
        ("text_cfg", {"witdh": 32}, ["unknown key text_cfg.witdh"]),
        ("text_cfg", {"heads": 5}, ["text_cfg.width 32", "5 heads"]),
        ("text_cfg", {"layers": 0}, ["text_cfg.layers is 0"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_wrong_value_is_named(tmp_path, content, section, change, words):
    (content[section] if section else content).update(change)
    path = write(tmp_path, content)
    with pytest.raises(UserError) as caught:
        read_config(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("key", ["embed_dim", "vision_cfg", "text_cfg"])
def test_half_config_is_refused(tmp_path, content, key):
    del content[key]
    path = write(tmp_path, content)
    with pytest.raises(UserError, match=f"{path.name}: the key {key} is missing"):
        read_config(path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"x"'])
def test_what_is_no_json_object_is_refused(tmp_path, text):
    with pytest.raises(UserError, match=r"ViT-mine-8-linear\.json"):
        read_config(write(tmp_path, text))


@pytest.mark.parametrize("name", ["tiny-linear", "ViT-coca-8", "ViT-SigLIP-8"])
def test_name_that_openclip_would_misread_is_refused(tmp_path, content, name):
    with pytest.raises(UserError, match="name must"):
        read_config(write(tmp_path, content, name))


def test_missing_and_empty_folders_are_named(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        read_configs(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no model config"):
        read_configs(tmp_path)


def test_environment_variable_adds_folders(tmp_path, monkeypatch):
    monkeypatch.setenv(CONFIGS_VARIABLE, f"{tmp_path}")
    assert config_folders() == [builtin_folder(), tmp_path]
