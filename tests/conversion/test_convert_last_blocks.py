"""Models whose last blocks alone have another attention than softmax: their configs, checkpoints, cost and refusals."""

import json

import open_clip
import pytest
import torch

from openclip_linattn import add_model_configs
from openclip_linattn.attention import OperatorAttention
from openclip_linattn.configs import read_config
from openclip_linattn.conversion.checkpoint import convert_checkpoint
from openclip_linattn.conversion.targets import choose_target
from openclip_linattn.errors import UserError
from openclip_scaling.flops import clip_cost, parse_tower_name


@pytest.fixture(autouse=True)
def registry(tmp_path, monkeypatch):
    """What a test registers is gone after it."""
    from openclip_linattn import registration

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIG_PATHS", list(open_clip.factory._MODEL_CONFIG_PATHS))
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIGS", dict(open_clip.factory._MODEL_CONFIGS))
    monkeypatch.setattr(registration, "_models", dict(registration._models))


def config_of(tower: str) -> dict:
    config = open_clip.get_model_config("ViT-T32-8-softmax")
    config["vision_cfg"]["timm_model_name"] = tower
    return config


def kinds(transformer: torch.nn.Module) -> list[str]:
    return [m.kind for m in transformer.modules() if isinstance(m, OperatorAttention)]


def save(name: str, path: str) -> open_clip.CLIP:
    torch.manual_seed(0)
    model = open_clip.create_model(name)
    torch.save({"epoch": 1, "name": "x", "state_dict": model.state_dict()}, path)
    return model


@pytest.mark.parametrize("text", [False, True])
def test_the_last_blocks_are_converted_and_load_again(text):
    save("ViT-T32-8-softmax", "source.pt")
    ending = "-text" if text else ""
    done = convert_checkpoint("source.pt", "infsa", model="ViT-T32-8-softmax", text=text, last=2)
    assert done.model == f"ViT-T32-8-infsa-last2{ending}"
    model = open_clip.create_model(done.model, pretrained=str(done.output))
    assert kinds(model.visual) == ["softmax", "infsa", "infsa"]
    assert kinds(model.transformer) == (["softmax", "infsa", "infsa"] if text else [])
    for name, words in (
        (f"ViT-T32-8-infsa{ending}", "softmax1.infsa2 attention and this model's has infsa"),
        ("ViT-T32-8-softmax", r"this model's has softmax.*of ours, one named \.\.\.-infsa-last2"),
    ):
        with pytest.raises(UserError, match=words):
            open_clip.create_model(name, pretrained=str(done.output))


def test_more_and_more_blocks_can_be_converted(tmp_path):
    save("ViT-T32-8-softmax", "source.pt")
    one = convert_checkpoint("source.pt", "linear", model="ViT-T32-8-softmax", last=1)
    two = convert_checkpoint(str(one.output), "linear", model=one.model, last=2)
    assert two.source_kinds == {"image": "softmax2+linear1"}
    three = convert_checkpoint(str(two.output), "linear", model=two.model)
    assert (one.model, two.model, three.model) == (
        "ViT-T32-8-linear-last1", "ViT-T32-8-linear-last2", "ViT-T32-8-linear",
    )  # fmt: skip
    straight = convert_checkpoint(
        "source.pt", "linear", model="ViT-T32-8-softmax", last=3, output=three.output.with_name("b.pt")
    )
    assert straight.model == three.model
    weights = [torch.load(each.output, weights_only=True)["state_dict"] for each in (three, straight)]
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=0, atol=0)


def test_the_text_tower_can_follow():
    save("ViT-T32-8-softmax", "source.pt")
    image = convert_checkpoint("source.pt", "linear", model="ViT-T32-8-softmax", last=2)
    both = convert_checkpoint(str(image.output), "linear", model=image.model, last=2, text=True)
    assert both.model == "ViT-T32-8-linear-last2-text"
    assert [row.after == row.before for row in both.branches if row.tower == "image"] == [True] * 3


def test_a_shorter_text_tower_limits_the_last_blocks():
    def choose(last: int, *, text: bool) -> str:
        config = open_clip.get_model_config("ViT-L-14")  # 24 and 12 blocks
        arguments = {"text": text, "last": last, "custom_text": False, "image_size": 224}
        return choose_target("ViT-L-14", config, "linear", **arguments).name

    assert choose(11, text=True) == "ViT-L-14-linear-last11-text"
    assert choose(12, text=False) == "ViT-L-14-linear-last12"
    with pytest.raises(UserError, match="text tower of ViT-L-14 has 12 blocks, so the last 12"):
        choose(12, text=True)


@pytest.mark.parametrize(
    ("source", "kind", "options", "words"),
    [
        ("ViT-T32-8-softmax", "linear", {"last": 4}, "3 blocks, so the last 4"),
        ("ViT-T32-8-softmax", "softmax", {"last": 2}, "has softmax attention"),
        ("ViT-T32-8-linear", "infsa", {"last": 2}, "has linear attention"),
        ("ViT-T32-8-linear", "linear", {"last": 2}, "has linear attention"),
        ("ViT-T32-8-linear", "softmax", {"last": 2}, "has linear attention"),
    ],
)
def test_other_mixtures_are_refused(tmp_path, source, kind, options, words):
    save(source, "source.pt")
    with pytest.raises(UserError, match=words):
        convert_checkpoint("source.pt", kind, model=source, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]


def test_the_config_names_the_last_blocks(tmp_path):
    tower = "linattn_w32_d3_h2_p8_n37_neumannlinear_last2_text32"
    described = parse_tower_name(tower)
    assert (described.kind, described.last, described.text_train_tokens) == ("neumannlinear", 2, 32)
    path = tmp_path / "ViT-mixed.json"
    path.write_text(json.dumps(config_of(tower)))
    assert add_model_configs(path) == ["ViT-mixed"]
    model = open_clip.create_model("ViT-mixed")
    assert kinds(model.visual) == kinds(model.transformer) == ["softmax", "neumannlinear", "neumannlinear"]
    cost = clip_cost(config_of(tower))
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (cost.image_attention, cost.text_attention) == ("neumannlinear_last2", "neumannlinear_last2")


def test_the_cost_lies_between_those_of_the_two_kinds():
    def gmac(ending: str) -> float:
        return clip_cost(config_of(f"linattn_w32_d3_h2_p8_n37_{ending}")).image_gmac

    softmax, linear = gmac("softmax"), gmac("linear")
    assert gmac("linear_last1") == pytest.approx(softmax + (linear - softmax) / 3)


@pytest.mark.parametrize("ending", ["linear_last3", "linear_last0", "softmax_last2", "linear_last4_text32"])
def test_configs_that_name_no_mixture_are_refused(tmp_path, ending):
    path = tmp_path / "ViT-mixed.json"
    path.write_text(json.dumps(config_of(f"linattn_w32_d3_h2_p8_n37_{ending}")))
    with pytest.raises(UserError, match="timm_model_name"):
        read_config(path)
