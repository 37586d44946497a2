"""Registration: every process finds the same models, built-ins stay as they were, stock weights fit."""

import copy
import json
import os
import subprocess
import sys

import open_clip
import pytest
import torch
from open_clip.transformer import VisionTransformer

import openclip_linattn
from openclip_linattn import add_model_configs, register
from openclip_linattn.configs import builtin_folder
from openclip_linattn.errors import UserError
from openclip_linattn.image_tower import interpolate_positions
from openclip_linattn.low_memory.inference import low_memory_inference
from openclip_linattn.ops import OPERATORS
from openclip_linattn.registration import models
from openclip_scaling.flops import clip_cost

PROBE = "print(sorted(n for n in open_clip.list_models() if n.startswith(('ViT-T', 'ViT-B-16-normlinear'))))"


def build_on_meta(config: dict) -> torch.nn.Module:
    """The model's structure without its weights, which makes the large sizes cheap."""
    with torch.device("meta"):
        return open_clip.CLIP(**copy.deepcopy(config))


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import openclip_linattn, open_clip",
        "import open_clip, openclip_linattn",
        "import torch, open_clip",
        "import open_clip",
        "from open_clip_train import main; import open_clip",
        "import clip_benchmark.cli; import open_clip",
        "import openclip_linattn.attention, open_clip",
        "import openclip_linattn.towers, open_clip",
        "import openclip_linattn.image_tower, open_clip",
        "import openclip_linattn.low_memory.inference, open_clip",
        "import openclip_linattn.infvit, open_clip",
        "import openclip_linattn.registration, open_clip",
        "import openclip_linattn.train, open_clip",
        "import openclip_linattn.zeroshot.evaluate, open_clip",
    ],
)
def test_a_fresh_process_finds_the_models(imports):
    code = f"{imports}; {PROBE}"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert "Warning" not in result.stderr
    mine = sorted(name for name in models() if name.startswith(("ViT-T", "ViT-B-16-normlinear")))
    assert result.stdout.strip().splitlines()[-1] == str(mine)


def test_what_needs_torch_is_found_in_the_package_when_it_is_asked_for():
    for name in openclip_linattn.__all__:
        assert getattr(openclip_linattn, name) is not None
    assert openclip_linattn.low_memory_inference is low_memory_inference
    assert openclip_linattn.interpolate_positions is interpolate_positions
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        openclip_linattn.nothing  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["OPENCLIP_LINATTN_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_plain_openclip_can_be_left_alone(variable, monkeypatch):
    monkeypatch.setenv(variable, "0")
    code = f"import torch, open_clip; {PROBE}"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.slow
def test_broken_user_configs_do_not_break_plain_torch(tmp_path, monkeypatch):
    (tmp_path / "ViT-mine-8-linear.json").write_text("{")
    monkeypatch.setenv("OPENCLIP_LINATTN_MODEL_CONFIGS", str(tmp_path))
    quiet = subprocess.run(
        [sys.executable, "-c", "import torch, open_clip; print(len(open_clip.list_models()))"],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert "ViT-mine-8-linear.json" in quiet.stderr
    loud = subprocess.run(
        [sys.executable, "-c", "import openclip_linattn, open_clip"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert loud.returncode != 0
    assert "UserError" in loud.stderr
    assert "ViT-mine-8-linear.json" in loud.stderr


@pytest.mark.slow
def test_builtin_configs_are_unchanged():
    configs = "{n: open_clip.get_model_config(n) for n in open_clip.list_models()}"
    code = f"import open_clip, json; print(json.dumps({configs}))"
    stock = subprocess.run(
        [sys.executable, "-c", code], env={"OPENCLIP_LINATTN_AUTOLOAD": "0"}, capture_output=True, text=True,
        timeout=240, check=True,
    )  # fmt: skip
    for name, config in json.loads(stock.stdout).items():
        assert open_clip.get_model_config(name) == config


def test_registering_twice_is_the_same_as_once():
    before, hooks = open_clip.list_models(), len(torch.nn.modules.module._global_module_registration_hooks)
    register()
    add_model_configs(builtin_folder())
    assert open_clip.list_models() == before
    assert len(torch.nn.modules.module._global_module_registration_hooks) == hooks


@pytest.mark.parametrize("name", sorted(models()))
def test_every_model_builds_with_the_counted_parameters(name):
    config = open_clip.get_model_config(name)
    model = build_on_meta(config)
    cost = clip_cost(config)
    assert (count(model.visual), count(model)) == (cost.image_parameters, cost.parameters)
    assert isinstance(model.visual, VisionTransformer)
    kinds = {module.kind for module in model.visual.modules() if hasattr(module, "train_tokens")}
    assert kinds == {models()[name].tower.kind}
    text = {module.kind for module in model.transformer.modules() if hasattr(module, "train_tokens")}
    assert text == ({models()[name].tower.kind} if name.endswith("-text") else set())


def test_softmax_b16_has_the_published_parameters():
    model = build_on_meta(open_clip.get_model_config("ViT-B-16-softmax"))
    assert round(count(model) / 1e6, 2) == 149.62
    assert round(count(model.visual) / 1e6, 2) == 86.19


@pytest.mark.parametrize("suffix", [*OPERATORS, "normlinear-text", "neumannlinear-text"])
def test_stock_b16_weights_load_strictly(suffix):
    stock = build_on_meta(open_clip.get_model_config("ViT-B-16")).state_dict()
    model = build_on_meta(open_clip.get_model_config(f"ViT-B-16-{suffix}"))
    if suffix == "softmax":
        result = model.load_state_dict(stock, strict=True, assign=True)
    else:
        with pytest.warns(UserWarning, match="no attention kind") as caught:
            result = model.load_state_dict(stock, strict=True, assign=True)
        assert len(caught) == 1
    assert (result.missing_keys, result.unexpected_keys) == ([], [])


def stock_config(name: str) -> dict:
    """The stock OpenCLIP config that has the sizes of one of our models."""
    config, tower = open_clip.get_model_config(name), models()[name].tower
    config["vision_cfg"] = {
        "image_size": config["vision_cfg"]["image_size"], "patch_size": tower.patch, "width": tower.width,
        "layers": tower.layers, "head_width": tower.width // tower.heads,
    }  # fmt: skip
    return config


@pytest.mark.parametrize("name", ["ViT-T64-8-softmax", "ViT-T64-8-linear", "ViT-T64-8-neumannlinear-text"])
def test_a_seed_gives_the_stock_model_s_weights(name):
    torch.manual_seed(3)
    stock = open_clip.CLIP(**stock_config(name))
    after_stock = torch.rand(())
    torch.manual_seed(3)
    ours = open_clip.create_model(name)
    assert torch.rand(()) == after_stock
    weights = ours.state_dict()
    for key, value in stock.state_dict().items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=0)
    extra = {key.rsplit(".", 1)[-1] for key in weights.keys() - stock.state_dict().keys()}
    assert extra <= {"attention_kind", "gamma_logit"}
    assert bool(extra) == (name != "ViT-T64-8-softmax")


def test_softmax_gives_the_stock_model_s_features():
    torch.manual_seed(3)
    stock = open_clip.CLIP(**stock_config("ViT-T64-8-softmax")).eval()
    ours = open_clip.create_model("ViT-T64-8-softmax").eval()
    ours.load_state_dict(stock.state_dict())
    images, texts = (
        torch.randn(3, 3, 48, 48),
        open_clip.get_tokenizer("ViT-T64-8-softmax")(["a", "b c", "d e f"]),
    )
    with torch.no_grad():
        torch.testing.assert_close(
            ours.encode_image(images), stock.encode_image(images), rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(ours.encode_text(texts), stock.encode_text(texts), rtol=1e-5, atol=1e-6)


def test_custom_text_models_get_their_text_attention_too():
    model = open_clip.create_model("ViT-T32-8-normlinear-text", force_custom_text=True)
    assert {m.kind for m in model.text.modules() if hasattr(m, "train_tokens")} == {"normlinear"}
    assert "text.transformer.attention_kind" in model.state_dict()


def test_a_name_that_is_taken_is_refused(tmp_path):
    content = (builtin_folder() / "ViT-T32-8-linear.json").read_text()
    for name in ("ViT-B-16", "ViT-T64-8-linear"):
        path = tmp_path / f"{name}.json"
        path.write_text(content)
        before = open_clip.get_model_config(name)
        with pytest.raises(UserError, match=f"{name} is taken"):
            add_model_configs(path)
        assert open_clip.get_model_config(name) == before
        path.unlink()


def test_a_model_of_one_s_own_is_one_file(tmp_path):
    config = open_clip.get_model_config("ViT-T32-8-linear")
    config["vision_cfg"]["timm_model_name"] = "linattn_w48_d2_h3_p16_n10_infsa_text32"
    (tmp_path / "my-ViT-infsa.json").write_text(json.dumps(config))
    assert add_model_configs(tmp_path) == ["my-ViT-infsa"]
    model = open_clip.create_model("my-ViT-infsa")
    assert model.encode_image(torch.randn(2, 3, 48, 48)).shape == (2, 32)
    assert model.visual.transformer.resblocks[0].attn.num_heads == 3


def test_image_only_weights_are_refused():
    with pytest.raises(UserError, match="pretrained-image"):
        open_clip.create_model("ViT-T32-8-linear", pretrained_image=True)


def test_the_placeholder_is_no_timm_model():
    import timm

    name = open_clip.get_model_config("ViT-T32-8-linear")["vision_cfg"]["timm_model_name"]
    with pytest.raises(RuntimeError, match="inside OpenCLIP"):
        timm.create_model(name)(torch.zeros(1, 3, 48, 48))
    with pytest.raises(UserError, match="does not take drop_path_rate"):
        timm.create_model(name, drop_path_rate=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-T32-8-linear", "ViT-mine-8-linear"])
def test_two_folders_with_one_name_are_refused(name, tmp_path, monkeypatch):
    """Also where both are new to the process, the package's own configs included."""
    config = json.loads((builtin_folder() / "ViT-T32-8-linear.json").read_text())
    for folder, width in (("a", 48), ("b", 64)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.json").write_text(json.dumps({**config, "embed_dim": width}))
    monkeypatch.setenv("OPENCLIP_LINATTN_MODEL_CONFIGS", f"{tmp_path}/a{os.pathsep}{tmp_path}/b")
    result = subprocess.run(
        [sys.executable, "-c", "import openclip_linattn, open_clip"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert f"the model name {name} is taken by" in result.stderr.splitlines()[-1]
