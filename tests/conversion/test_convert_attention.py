"""Attention converted in memory: OpenCLIP's, timm's and transformers' models, their weights, masks and features."""

import copy
from typing import Any

import open_clip
import pytest
import torch
from open_clip.transformer import TextTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
)

from openclip_linattn import convert_attention
from openclip_linattn.attention import HeadOperator
from openclip_linattn.errors import UserError
from openclip_linattn.ops import OPERATORS
from openclip_linattn.ops.reference import REFERENCES

KINDS = tuple(OPERATORS)
CAUSAL_KINDS = tuple(kind for kind in KINDS if kind != "lininfsa")

STOCK = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 3, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 3},
}


def stock_clip(**changes: Any) -> open_clip.CLIP:
    """A stock OpenCLIP model, its vision_cfg changed."""
    config = {**STOCK, "vision_cfg": {**STOCK["vision_cfg"], **changes}}
    return grown(open_clip.CLIP(**config))


def timm_vit(**changes: Any) -> VisionTransformer:
    options = {
        "img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 7,
        "qkv_bias": True,
    }  # fmt: skip
    return grown(VisionTransformer(**{**options, **changes}))


def transformers_clip(implementation: str = "sdpa", **text: Any) -> CLIPModel:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config=CLIPTextConfig(
            vocab_size=99, max_position_embeddings=16, eos_token_id=98, pad_token_id=1, bos_token_id=97, **sizes, **text
        ).to_dict(),
        vision_config=CLIPVisionConfig(image_size=32, patch_size=8, **sizes).to_dict(),
        projection_dim=16,
    )  # fmt: skip
    return grown(CLIPModel._from_config(config, attn_implementation=implementation))


def grown(model: Any) -> Any:
    """The model with attention that matters, in evaluation: fresh weights give nearly uniform weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("in_proj", "qkv", "q_proj", "k_proj", "v_proj", "out_proj")):
                parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.dim() > 1 else 0.1))
    return model.eval()


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def texts() -> Tensor:
    """Token ids as OpenCLIP's tokenizer gives them, in a context of 16."""
    return open_clip.SimpleTokenizer(context_length=16)(["a red circle", "two", "something longer than that"])


def ids() -> Tensor:
    """Token ids for transformers' model, the last one its end of text."""
    rows = torch.randint(2, 97, (3, 16), generator=torch.Generator().manual_seed(2))
    rows[:, -1] = 98
    return rows


@torch.no_grad()
def image_features(model: Any) -> Tensor:
    if isinstance(model, CLIPModel):
        return model.vision_model(images()).last_hidden_state
    return model.encode_image(images()) if hasattr(model, "encode_image") else model(images())


@torch.no_grad()
def text_features(model: Any) -> Tensor:
    if isinstance(model, CLIPModel):
        return model.text_model(ids()).last_hidden_state
    return model.encode_text(texts())


def builders() -> dict[str, Any]:
    return {
        "stock": stock_clip,
        "stock-custom-text": lambda: grown(open_clip.CustomTextCLIP(**STOCK)),
        "ours": lambda: grown(
            open_clip.create_model("ViT-T32-8-softmax", force_image_size=32, force_context_length=16)
        ),
        "timm": timm_vit,
        "timm-qk-norm": lambda: timm_vit(qk_norm=True, reg_tokens=2, qkv_bias=False),
        "timm-gated": lambda: timm_vit(scale_attn_norm=True, global_pool="avg", class_token=False),
        "transformers-sdpa": transformers_clip,
        "transformers-eager": lambda: transformers_clip("eager"),
    }


BUILDERS = builders()
TWO_TOWERS = [name for name in BUILDERS if not name.startswith("timm")]


def towers_of(name: str) -> tuple[str, ...]:
    return ("image", "text") if name in TWO_TOWERS else ("image",)


def operators(model: nn.Module) -> list[HeadOperator]:
    return [module for module in model.modules() if isinstance(module, HeadOperator)]


@pytest.mark.parametrize("name", BUILDERS)
def test_softmax_gives_the_library_s_own_features(name):
    model = BUILDERS[name]()
    expected = [image_features(model), *([text_features(model)] if name in TWO_TOWERS else [])]
    assert convert_attention(model, "softmax", towers=towers_of(name)) is model
    found = [image_features(model), *([text_features(model)] if name in TWO_TOWERS else [])]
    assert len(operators(model)) == 3 * len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BUILDERS)
def test_every_kind_computes_its_formula_over_the_library_s_projections(name, kind, monkeypatch):
    """The features of the fast operators are those of the N x N formulas put in their place."""
    towers = towers_of(name) if kind != "lininfsa" else ("image",)
    model = convert_attention(BUILDERS[name](), kind, towers=towers)
    fast = image_features(model), text_features(model) if "text" in towers else None
    for module in operators(model):
        monkeypatch.setattr(module, "operator", REFERENCES[kind])
    slow = image_features(model), text_features(model) if "text" in towers else None
    for mine, formula in zip(fast, slow, strict=True):
        if mine is not None:
            assert (mine - formula).norm() <= 1e-4 * formula.norm()
    assert all(module.kind == kind for module in operators(model) if module.kind != "softmax")


@pytest.mark.parametrize("name", BUILDERS)
def test_parameters_stay_the_same_objects_under_the_same_names(name):
    model = BUILDERS[name]()
    before, values = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    convert_attention(model, "infsa", towers=towers_of(name), rescale=False)
    after = dict(model.named_parameters())
    assert {key: id(p) for key, p in after.items() if key in before} == {k: id(p) for k, p in before.items()}
    assert {key.rsplit(".", 1)[-1] for key in after.keys() - before.keys()} == {"rho_logit"}
    for key, value in values.items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=0)


@pytest.mark.parametrize("name", BUILDERS)
def test_converted_models_train(name):
    model = convert_attention(BUILDERS[name](), "neumannlinear", towers=towers_of(name)).train()
    if isinstance(model, CLIPModel):
        loss = model(input_ids=ids(), pixel_values=images(3), return_loss=True).loss
    elif name in TWO_TOWERS:
        loss = model.encode_image(images(), normalize=True).sum() + model.encode_text(texts()).sum()
    else:
        loss = model(images()).square().sum()
    loss.backward()
    for module in operators(model):
        assert module.gamma_logit.grad.abs().min() > 0


@pytest.mark.parametrize("kind", CAUSAL_KINDS)
@pytest.mark.parametrize("name", ["transformers-sdpa", "transformers-eager"])
def test_transformers_text_is_causal_and_blind_to_padding(name, kind):
    model = convert_attention(BUILDERS[name](), kind, towers=["text"]).text_model
    tokens, mask = ids(), torch.ones(3, 16, dtype=torch.long)
    mask[0, 12:] = 0
    mask[1, :4] = 0
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask).last_hidden_state
        later, padded = tokens.clone(), tokens.clone()
        later[:, 9:] = 5
        padded[mask == 0] = 7
        changed_later = model(later, attention_mask=mask).last_hidden_state
        changed_padding = model(padded, attention_mask=mask).last_hidden_state
    present = mask.bool()
    torch.testing.assert_close(changed_padding[present], expected[present])
    early = present.clone()
    early[:, 9:] = False
    torch.testing.assert_close(changed_later[early], expected[early])
    assert not torch.allclose(changed_later[present], expected[present])


@pytest.mark.parametrize("name", ["transformers-sdpa", "transformers-eager"])
def test_softmax_with_padding_equals_transformers_where_there_are_tokens(name):
    model = BUILDERS[name]().text_model
    mask = torch.ones(3, 16, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        expected = model(ids(), attention_mask=mask).last_hidden_state
        convert_attention(model, "softmax", towers=["text"])
        found = model(ids(), attention_mask=mask).last_hidden_state
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)


def test_timm_masks_are_honoured_or_refused():
    stock = timm_vit()
    model = convert_attention(copy.deepcopy(stock), "softmax")
    linear = convert_attention(copy.deepcopy(stock), "linear")
    padding = torch.zeros(2, 1, 1, 17, dtype=torch.bool)
    padding[1, ..., 13:] = True
    mask = (~padding).expand(2, 1, 17, 17)
    with torch.no_grad():
        features = [each.forward_features(images(), attn_mask=mask) for each in (stock, model)]
        causal = [each.forward_features(images(), is_causal=True) for each in (stock, model)]
        bias = torch.randn(17, 17)
        for each in (model, linear):
            with pytest.raises(UserError, match="mask"):
                each.forward_features(images(), attn_mask=bias)
    torch.testing.assert_close(features[1][0], features[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(features[1][1, :13], features[0][1, :13], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(causal[1], causal[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_last_blocks_alone_can_be_converted(name):
    model = convert_attention(BUILDERS[name](), "linear", blocks=2, towers=towers_of(name))
    assert [module.kind for module in operators(model)] == ["linear"] * (
        2 * len(towers_of(name))
    ) or name == "ours"
    labels = {
        bytes(value.tolist()).decode() for key, value in model.state_dict().items() if "attention_kind" in key
    }
    assert labels == {"softmax1+linear2"}
    convert_attention(model, "linear", towers=towers_of(name))
    assert [module.kind for module in operators(model)] == ["linear"] * (3 * len(towers_of(name)))


@pytest.mark.parametrize("name", BUILDERS)
def test_the_state_dict_says_the_kind(name):
    stock = BUILDERS[name]()
    converted = convert_attention(copy.deepcopy(stock), "normlinear", towers=towers_of(name))
    weights = copy.deepcopy(converted.state_dict())
    with pytest.raises(RuntimeError, match="attention"):
        copy.deepcopy(stock).load_state_dict(weights)
    other = convert_attention(copy.deepcopy(stock), "linear", towers=towers_of(name))
    with pytest.raises(UserError, match="trained with normlinear attention and this model's has linear"):
        other.load_state_dict(weights)
    convert_attention(other, "normlinear", towers=towers_of(name))
    other.load_state_dict(weights)
    torch.testing.assert_close(image_features(other), image_features(converted))
    with pytest.warns(UserWarning, match="names no attention kind") as caught:
        other.load_state_dict(stock.state_dict())
    assert len(caught) == (2 if name.startswith("transformers") else 1)  # the text tower comes first there
    back = convert_attention(converted, "softmax", towers=towers_of(name))
    assert back.state_dict().keys() == stock.state_dict().keys()
    assert (image_features(back) - image_features(stock)).norm() <= 2e-5 * image_features(stock).norm()


def test_our_models_become_those_of_the_other_name():
    model = open_clip.create_model("ViT-T32-8-linear-text")
    convert_attention(model, "infsa", towers=("image", "text"))
    other = open_clip.create_model("ViT-T32-8-infsa-text")
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        pixels = torch.randn(2, 3, 48, 48)
        torch.testing.assert_close(other.encode_image(pixels), model.encode_image(pixels))
    assert {module.train_tokens for module in operators(model.visual)} == {37}


@pytest.mark.parametrize("build", [CLIPVisionModel, CLIPVisionModelWithProjection])
def test_vision_models_of_transformers_are_converted(build):
    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )  # fmt: skip
    model = grown(build(config))
    with torch.no_grad():
        expected = model(images()).last_hidden_state
        found = convert_attention(model, "softmax")(images()).last_hidden_state
        linear = convert_attention(model, "normlinear")(images()).last_hidden_state
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert not torch.allclose(linear, expected)
    assert {module.train_tokens for module in operators(model)} == {17}
    with pytest.raises(UserError, match="has no text tower"):
        convert_attention(model, "linear", towers="text")


def test_a_text_tower_alone_is_converted():
    text = TextTransformer(context_length=16, width=32, heads=2, layers=2, output_dim=8)
    assert len(operators(convert_attention(text, "linear", towers="text"))) == 2
    with pytest.raises(UserError, match="TextTransformer has no image tower"):
        convert_attention(text, "linear")


class Scaled(nn.MultiheadAttention):
    """Looks like softmax attention, and is something else."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        output, weights = super().forward(*arguments, **options)
        return 2 * output, weights


def with_other_attention() -> open_clip.CLIP:
    model = stock_clip()
    model.visual.transformer.resblocks[2].attn.__class__ = Scaled
    return model


def with_flash() -> CLIPModel:
    model = transformers_clip()
    model.vision_model.config._attn_implementation = "flash_attention_2"
    return model


REFUSED = {
    "a linear layer": (lambda: nn.Linear(2, 2), "linear", {}, "Linear cannot be converted: give an OpenCLIP CLIP"),
    "a wrapped model": (lambda: nn.Sequential(stock_clip()), "linear", {}, "bare"),
    "a ResNet": (
        lambda: open_clip.CLIP(8, {"layers": [1, 1, 1, 1], "width": 8, "image_size": 32}, STOCK["text_cfg"]),
        "linear", {}, "ModifiedResNet, and only ViTs",
    ),
    "custom blocks": (lambda: stock_clip(qk_norm=True), "linear", {}, "CustomResidualAttentionBlock"),
    "other attention": (with_other_attention, "linear", {}, "Scaled computes something else"),
    "flash": (with_flash, "linear", {}, "flash_attention_2.*set_attn_implementation"),
    "dropout": (lambda: timm_vit(attn_drop_rate=0.1), "linear", {}, "drops weights at a rate of 0.1"),
    "text dropout": (
        lambda: transformers_clip(attention_dropout=0.2), "linear", {"towers": ["text"]}, "rate of 0.2",
    ),
    "timm text": (timm_vit, "linear", {"towers": ["text"]}, "no text tower"),
    "an unknown tower": (timm_vit, "linear", {"towers": ["visual"]}, "unknown tower 'visual'"),
    "no tower": (stock_clip, "linear", {"towers": []}, "no tower was named"),
    "an unknown kind": (timm_vit, "flash", {}, "unknown attention kind 'flash'"),
    "lininfsa for text": (stock_clip, "lininfsa", {"towers": ["image", "text"]}, "no causal form"),
    "too many blocks": (stock_clip, "linear", {"blocks": 4}, "3 blocks, so the last 4"),
    "no blocks": (stock_clip, "linear", {"blocks": 0}, "3 blocks, so the last 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_and_left_alone(case):
    build, kind, options, words = REFUSED[case]
    model = build()
    types = [type(module) for module in model.modules()]
    with pytest.raises(UserError, match=words):
        convert_attention(model, kind, **options)
    assert [type(module) for module in model.modules()] == types
    assert not any("attention_kind" in key for key in model.state_dict())
