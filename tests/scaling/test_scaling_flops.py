"""The arithmetic of parameters and multiply-adds, against OpenCLIP's published profile."""

from __future__ import annotations

import math
from typing import Any

import pytest

from openclip_scaling.errors import UserError
from openclip_scaling.flops import ATTENTION_MACS, attention_macs, clip_cost, clip_towers, parse_tower_name

SIZES = {"S": (384, 384, 12, 384, 6), "B": (512, 768, 12, 512, 8), "L": (768, 1024, 24, 768, 12)}


def config(size: str, patch: int = 16, pixels: int = 224) -> dict[str, Any]:
    embed, width, layers, text_width, text_heads = SIZES[size]
    return {
        "embed_dim": embed,
        "vision_cfg": {"image_size": pixels, "patch_size": patch, "width": width, "layers": layers},
        "text_cfg": {
            "context_length": 77,
            "vocab_size": 49408,
            "width": text_width,
            "heads": text_heads,
            "layers": 12,
        },
    }


@pytest.mark.parametrize(
    ("size", "total", "image"),
    [("S", 62.26, 21.81), ("B", 149.62, 86.19), ("L", 427.74, 304.09)],
    ids=list("SBL"),
)
def test_parameters_in_millions(size: str, total: float, image: float) -> None:
    cost = clip_cost(config(size))
    assert cost.parameters / 1e6 == pytest.approx(total, abs=0.005)
    assert cost.image_parameters / 1e6 == pytest.approx(image, abs=0.005)
    assert cost.parameters == cost.image_parameters + cost.text_parameters + 1


@pytest.mark.parametrize(
    ("size", "dense", "softmax", "linear"),
    [("S", 4.24, 0.358, 0.116), ("B", 16.85, 0.715, 0.232), ("L", 59.65, 1.908, 0.620)],
    ids=list("SBL"),
)
def test_image_tower_gmac_at_224(size: str, dense: float, softmax: float, linear: float) -> None:
    tower, _ = clip_towers(config(size))
    products = {
        kind: tower.layers * attention_macs(kind, tower.tokens, tower.width, tower.heads) / 1e9
        for kind in ("softmax", "linear")
    }
    assert products["softmax"] == pytest.approx(softmax, abs=5e-4)
    assert products["linear"] == pytest.approx(linear, abs=5e-4)
    assert tower.macs(tower.tokens) / 1e9 - products["softmax"] == pytest.approx(dense, abs=0.01)


@pytest.mark.parametrize(("patch", "gflop"), [(32, 14.777), (16, 41.086)])
def test_whole_b_model_in_gflop(patch: int, gflop: float) -> None:
    assert 2 * clip_cost(config("B", patch)).gmac == pytest.approx(gflop, abs=5e-4)


@pytest.mark.parametrize(("kind", "growth"), [("softmax", 15.9), ("linear", 3.98), ("lininfsa", 3.98)])
def test_products_from_224_to_448_pixels(kind: str, growth: float) -> None:
    assert attention_macs(kind, 785, 768, 12) / attention_macs(kind, 197, 768, 12) == pytest.approx(
        growth, rel=5e-3
    )


@pytest.mark.parametrize("size", list("SBL"))
def test_linear_saves_a_few_percent_of_the_whole(size: str) -> None:
    saved = 1 - clip_cost(config(size), "linear").gmac / clip_cost(config(size)).gmac
    assert saved == pytest.approx({"S": 0.038, "B": 0.024, "L": 0.019}[size], abs=5e-4)


def test_tower_name_gives_the_same_tower_as_plain_keys() -> None:
    named = config("S")
    named["vision_cfg"] = {
        "image_size": 224, "timm_model_name": "linattn_w384_d12_h6_p16_n197_normlinear_text77",
        "timm_pool": "", "timm_proj": "", "timm_model_pretrained": False,
    }  # fmt: skip
    plain = clip_cost(config("S"), "normlinear", "normlinear")
    assert clip_cost(named) == plain
    assert plain.text_attention == "normlinear"
    assert clip_cost(named, "softmax", "softmax") == clip_cost(config("S"))


def test_parse_tower_name() -> None:
    tower = parse_tower_name("linattn_w96_d4_h3_p8_neumannlinear")
    assert (tower.width, tower.layers, tower.heads, tower.patch) == (96, 4, 3, 8)
    assert (tower.train_tokens, tower.kind, tower.text_train_tokens) == (None, "neumannlinear", None)
    assert parse_tower_name("linattn_w96_d4_h3_p8_n37_linear_text77").text_train_tokens == 77


@pytest.mark.parametrize(
    "name",
    ["", "vit_base_patch16_224", "linattn_w384_d12_h6_p16", "linattn_w384_d12_h6_p16_n197_typo", "x linattn"],
)
def test_foreign_tower_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"does not describe a tower|Unknown attention kind"):
        parse_tower_name(name)


def test_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"'lienar'.*softmax, linear"):
        clip_cost(config("S"), "lienar")
    with pytest.raises(UserError, match="Unknown attention kind"):
        clip_cost(config("S"), "linear", "nope")


def test_every_kind_counts_and_only_its_own_parameters_are_added() -> None:
    base = clip_cost(config("S"))
    for kind in ATTENTION_MACS:
        cost = clip_cost(config("S"), kind)
        assert math.isfinite(cost.gmac)
        extra = 72 if kind in {"infsa", "lininfsa", "neumannlinear"} else 0  # one number per head and layer
        assert cost.image_parameters - base.image_parameters == extra


@pytest.mark.parametrize(
    ("kind", "macs"),
    [("softmax", 2 * 197**2 * 384), ("infsa", 2 * 197**2 * 384), ("linear", 2 * 197 * 384 * 64),
     ("linearelu", 2 * 197 * 384 * 64), ("normlinear", 2 * 197 * 384 * 64), ("lininfsa", 3 * 197 * 384)],
)  # fmt: skip
def test_products_of_one_layer(kind: str, macs: int) -> None:
    assert attention_macs(kind, 197, 384, 6) == macs


def test_neumann_products_match_a_count_of_its_matrix_products() -> None:
    tokens, heads, d = 197, 6, 64
    shapes = [(d + 1, tokens, d + 1)] * 3 + [(d + 1, tokens, d), (tokens, d + 1, d), (d + 1, d + 1, d)]
    solve = (d + 1) ** 3 / 3
    expected = heads * (sum(a * b * c for a, b, c in shapes) + solve)
    assert attention_macs("neumannlinear", tokens, heads * d, heads) == pytest.approx(expected, rel=1e-12)


def test_train_flops_is_six_times_forward_mac_per_sample() -> None:
    cost = clip_cost(config("B"))
    assert cost.train_flops(1000) == pytest.approx(6 * cost.gmac * 1e9 * 1000)


def test_patch_dropout_lowers_training_only() -> None:
    dropped = config("B")
    dropped["vision_cfg"]["patch_dropout"] = 0.5
    cost, full = clip_cost(dropped), clip_cost(config("B"))
    assert cost.gmac == full.gmac
    assert 0.5 * full.gmac < cost.train_gmac < 0.62 * full.gmac


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_cfg": {"layers": [3, 4, 6, 3], "width": 64}}, "ResNet"),
        ({"vision_cfg": {"timm_model_name": "convnext_base"}}, "does not describe a tower"),
        ({"vision_cfg": {"width": 100}}, "does not divide"),
        ({"vision_cfg": {"attentional_pool": True}}, "attentional_pool"),
        ({"vision_cfg": {"image_size": 8}}, "patches"),
        ({"vision_cfg": {"patch_dropout": 1.0}}, "patch_dropout"),
        ({"vision_cfg": {"layers": 0}}, "layers"),
        ({"vision_cfg": None}, "no vision_cfg"),
        ({"text_cfg": {"hf_model_name": "roberta-base"}}, "hf_model_name"),
        ({"text_cfg": {"heads": 7}}, "does not divide"),
        ({"embed_dim": None}, "embed_dim"),
        ({"embed_dim": True}, "embed_dim"),
        ({"multimodal_cfg": {}}, "multimodal_cfg"),
    ],
)  # fmt: skip
def test_what_the_arithmetic_does_not_cover_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        clip_cost({**config("B"), **change})
