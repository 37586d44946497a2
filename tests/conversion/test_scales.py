"""The branches of converted models keep their size, as far as the sums of weights decide it."""

import copy

import open_clip
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from openclip_linattn import convert_attention
from openclip_linattn.attention import OperatorAttention
from openclip_linattn.conversion.scales import typical_sum
from openclip_linattn.ops import OPERATORS
from openclip_linattn.ops.reference import REFERENCES


def attention(kind: str, tokens: int = 197) -> OperatorAttention:
    return OperatorAttention(64, 4, kind=kind, train_tokens=tokens)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [("softmax", 1), ("linear", 1), ("linearelu", 1), ("normlinear", 98.5), ("normlinearmean", 1)],
)
def test_sums_that_the_formula_fixes_are_exact(kind, expected, causal):
    sums = typical_sum(attention(kind), 16, causal=causal)
    torch.testing.assert_close(sums, torch.full((4,), float(expected), dtype=torch.float64))


def test_the_sum_of_lininfsa_is_rho():
    module = attention("lininfsa")
    with torch.no_grad():
        module.rho_logit[:] = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    expected = module.rho_logit.double().sigmoid().detach()
    torch.testing.assert_close(typical_sum(module, 16, causal=False), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["infsa", "neumannlinear"])
def test_other_sums_are_those_of_random_tokens(kind, causal):
    q, k = torch.randn(2, 32, 4, 197, 16, dtype=torch.float64).unbind(0)
    sums = REFERENCES[kind](q, k, torch.ones_like(k[..., :1]), causal=causal).mean((0, 2, 3))
    found = typical_sum(attention(kind), 16, causal=causal)
    torch.testing.assert_close(found, sums, rtol=0.15, atol=0)


def test_softmax_to_normlinear_folds_two_over_the_training_length():
    stock = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=0)
    model = convert_attention(copy.deepcopy(stock), "normlinear")
    for before, after in zip(stock.blocks, model.blocks, strict=True):
        torch.testing.assert_close(after.attn.proj.weight, before.attn.proj.weight * 2 / 17)
        torch.testing.assert_close(after.attn.proj.bias, before.attn.proj.bias, rtol=0, atol=0)
    back = convert_attention(model, "softmax")
    for before, after in zip(stock.blocks, back.blocks, strict=True):
        torch.testing.assert_close(after.attn.proj.weight, before.attn.proj.weight)


def test_a_norm_between_attention_and_projection_settles_the_size():
    stock = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=0, scale_attn_norm=True
    )
    model = convert_attention(copy.deepcopy(stock), "normlinear")
    torch.testing.assert_close(model.blocks[0].attn.proj.weight, stock.blocks[0].attn.proj.weight)


@pytest.mark.parametrize("part", ["image", "text"])
@pytest.mark.parametrize("kind", [kind for kind in OPERATORS if kind not in ("softmax", "lininfsa")])
def test_the_common_part_of_the_values_keeps_its_size(kind, part):
    """With the same value at every token a branch is the sum of its weights times that value."""
    model = open_clip.create_model("ViT-T64-8-softmax")
    convert_attention(model, "softmax", towers=["text"])
    tower = model.visual.transformer if part == "image" else model.transformer
    mask = model.attn_mask if part == "text" else None
    x = torch.randn(2, 37 if part == "image" else 32, 64)
    with torch.no_grad():
        attn = tower.resblocks[0].attn
        attn.in_proj_weight[128:] = 0
        attn.in_proj_bias[128:] = torch.randn(64)
        before = attn(x, attn_mask=mask)
        plain = convert_attention(copy.deepcopy(model), kind, towers=[part], rescale=False)
        convert_attention(model, kind, towers=[part])
        after = tower.resblocks[0].attn(x, attn_mask=mask)
        tower = plain.visual.transformer if part == "image" else plain.transformer
        unscaled = tower.resblocks[0].attn(x, attn_mask=mask)
    tolerance = 0.25 if kind == "neumannlinear" else 0.12  # whose sums differ between rows and draws
    assert (after.mean((0, 1)) - before.mean((0, 1))).norm() < tolerance * before.mean((0, 1)).norm()
    if kind in ("normlinear", "neumannlinear"):
        assert unscaled.norm() > 4 * after.norm()
