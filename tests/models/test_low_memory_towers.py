"""Low-memory inference of every library's towers, stock and converted in their last blocks, with every pooling."""

from collections.abc import Callable, Iterator
from typing import Any

import open_clip
import pytest
import timm
import torch
from open_clip.timm_model import TimmModel
from open_clip.transformer import VisionTransformer
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig, CLIPVisionModel

import openclip_linattn
from openclip_linattn import convert_attention
from openclip_linattn.bench.memory import with_peak
from openclip_linattn.errors import UserError
from openclip_linattn.low_memory.inference import low_memory_inference
from openclip_linattn.ops import OPERATORS

openclip_linattn.register()
OPENCLIP = {"image_size": (32, 24), "patch_size": 8, "width": 32, "layers": 3, "heads": 2, "mlp_ratio": 2.0}
TIMM = {"img_size": (32, 24), "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 7}
QUERIES = {"attn_pooler_queries": 5, "attn_pooler_heads": 2}
CHUNKS = [1, 7, 26, 10_000]
"""Tokens of two images: single ones, uneven chunks, all of them (13 each), and more."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def openclip_tower(**options: Any) -> nn.Module:
    return drawn(VisionTransformer(**OPENCLIP, output_dim=32, **options))


def timm_tower(**options: Any) -> nn.Module:
    return drawn(TimmVisionTransformer(**{**TIMM, **options}))


def drawn(model: Any) -> Any:
    """The model in float64 and in evaluation, with weights at which every part matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5))
    return model.double().eval()


def images_of(height: int = 32, width: int = 24) -> Tensor:
    return torch.randn(2, 3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    parts = output if isinstance(output, tuple) else output.to_tuple()
    return [tensor for part in parts for tensor in tensors(part)]


def assert_same(
    model: nn.Module, images: Tensor, tolerance: float = 1e-10, run: Callable[..., Any] | None = None
) -> None:
    """The outputs in chunks of all sizes are those of the plain pass; float64 leaves 1e-15."""
    run = run or model
    with torch.no_grad():
        expected = tensors(run(images))
    for tokens_per_chunk in CHUNKS:
        with low_memory_inference(model, tokens_per_chunk=tokens_per_chunk):
            got = tensors(run(images))
        for each, other in zip(got, expected, strict=True):
            assert not each.requires_grad
            assert (each.dtype, each.shape) == (other.dtype, other.shape)
            assert ((each - other).norm() / other.norm()).item() < tolerance


@pytest.mark.parametrize("kind", [None, *OPERATORS])
@pytest.mark.parametrize("build", [openclip_tower, timm_tower])
def test_stock_towers_and_those_converted_in_their_last_blocks(build, kind):
    tower = build() if kind is None else convert_attention(build(), kind, blocks=2)
    assert_same(tower, images_of())


@pytest.mark.parametrize(
    "options",
    [
        {"pool_type": "avg"},
        {"pool_type": "avg", "final_ln_after_pool": True},
        {"pool_type": "none"},
        {"output_tokens": True},
        {"attentional_pool": True, "output_tokens": True, **QUERIES},
        {"attentional_pool": "parallel", "output_tokens": True, **QUERIES},
        {"attentional_pool": "cascade", **QUERIES},
        {"no_ln_pre": True, "ls_init_value": 0.5, "patch_dropout": 0.5},
    ],
    ids=str,
)
def test_openclip_poolings_and_parts(options):
    assert_same(convert_attention(openclip_tower(**options), "normlinear", blocks=1), images_of())


@pytest.mark.parametrize(
    "options",
    [
        {"global_pool": "avg"},
        {"global_pool": "avgmax"},
        {"global_pool": "max"},
        {"global_pool": ""},
        {"global_pool": "map"},
        {"reg_tokens": 4},
        {"reg_tokens": 4, "no_embed_class": True, "global_pool": "avg", "pool_include_prefix": True},
        {"class_token": False, "global_pool": "avg"},
        {"pos_embed": "none"},
        {"pos_embed": "none", "class_token": False, "global_pool": "avg", "pre_norm": True},
        {"pre_norm": True, "qk_norm": True, "init_values": 0.5, "scale_attn_norm": True},
        {"block_fn": ResPostBlock, "init_values": 0.3},
        {"qkv_bias": False, "final_norm": False, "num_classes": 0},
        {"drop_path_rate": 0.2, "proj_drop_rate": 0.2, "pos_drop_rate": 0.1, "patch_drop_rate": 0.3},
        {"img_size": (39, 25)},
    ],
    ids=str,
)
def test_timm_poolings_tokens_and_parts(options):
    tower = convert_attention(timm_tower(**options), "neumannlinear", blocks=1)
    images = images_of(*options.get("img_size", (32, 24)))
    assert_same(tower, images)
    # Looked up anew: a bound method would be the plain one.
    assert_same(tower, images, run=lambda x: tower.forward_features(x))  # noqa: PLW0108


@pytest.mark.parametrize("stock", [True, False], ids=["stock", "converted"])
def test_gates_and_projections_of_another_class_are_honoured(stock):
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.roll(1, -1).repeat(1, 1, 3)

    tower = timm_tower()
    for block in tower.blocks:
        if hasattr(block.attn, "gate"):  # timm's attention had none at first
            block.attn.gate = drawn(nn.Linear(32, 32))
        block.attn.qkv = drawn(Adapted(32, 96))
    assert_same(tower if stock else convert_attention(tower, "linear"), images_of())


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, (40, 64)),
        ({"dynamic_img_pad": True}, (41, 60)),
        ({"dynamic_img_pad": True, "no_embed_class": True, "reg_tokens": 1}, (17, 90)),
    ],
    ids=str,
)
def test_timm_towers_of_dynamic_size_interpolate_their_positions(options, size):
    # timm interpolates in float32.
    assert_same(timm_tower(dynamic_img_size=True, **options), images_of(*size), 1e-7)


@pytest.mark.parametrize("kind", OPERATORS)
def test_infvit_classifiers(kind):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 4, "num_classes": 5}
    model = drawn(timm.create_model(f"infvit4_16_{kind}", **sizes, reg_tokens=1))
    assert_same(model, images_of(32, 32))
    assert model(images_of(32, 32)).requires_grad


def test_timm_towers_inside_openclip_models():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.visual = TimmModel("infvit4_16_lininfsa", 12, image_size=224, pool="avg", proj="linear")

        def forward(self, images: Tensor) -> Tensor:
            return self.visual(images)

    with torch.device("meta"):
        model = Model()
    model.visual.trunk = timm_tower(global_pool="avg", num_classes=0)
    model.visual.head = drawn(nn.Linear(32, 12))
    assert_same(model, images_of())
    assert "forward" not in vars(model.visual)
    assert not {"forward", "forward_features"} & vars(model.visual.trunk).keys()


@pytest.mark.parametrize("kind", [None, "lininfsa"])
def test_clip_models_of_transformers(kind):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision = CLIPVisionConfig(image_size=32, patch_size=8, **sizes)
    # "eager" computes softmax in float32.
    model = drawn(CLIPVisionModel._from_config(vision, attn_implementation="sdpa"))
    if kind:
        convert_attention(model, kind, blocks=2)
    assert_same(model, images_of(32, 32))
    with low_memory_inference(model), pytest.raises(UserError, match="output_hidden_states"):
        model(images_of(32, 32), output_hidden_states=True)


def test_attention_dropout_of_transformers_is_refused_in_training_only():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(image_size=32, patch_size=8, attention_dropout=0.1, **sizes)
    model = drawn(CLIPVisionModel._from_config(vision, attn_implementation="sdpa"))
    assert_same(model, images_of(32, 32))
    model.train()
    with low_memory_inference(model), pytest.raises(UserError, match=r"drops values \(CLIP\w*Attention"):
        model(images_of(32, 32))


def test_the_text_tower_of_transformers_stays_plain():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = CLIPTextConfig(vocab_size=99, bos_token_id=97, eos_token_id=98, pad_token_id=1, **sizes)
    vision = CLIPVisionConfig(image_size=32, patch_size=8, **sizes)
    model = CLIPModel._from_config(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict()))
    with low_memory_inference(model):
        changed = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert changed == ["vision_model", "vision_model.encoder"]


def test_registered_models_with_softmax_before_their_last_blocks():
    name = "ViT-T32-8-normlinear"
    model = open_clip.create_model(name).double().eval()
    convert_attention(model, "softmax")
    convert_attention(model, "linear", blocks=1)
    assert [block.attn.kind for block in model.visual.transformer.resblocks][-2:] == ["softmax", "linear"]
    assert_same(model, images_of(48, 48), run=model.encode_image)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "weights"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: openclip_tower(no_ln_pre=True, ls_init_value=0.5, pool_type="avg", output_tokens=True),
        lambda: timm_tower(qk_norm=True, pre_norm=True, init_values=0.5),
        lambda: timm_tower(pos_embed="none", pre_norm=True, class_token=False, global_pool="avg"),
        lambda: timm_tower(dynamic_img_size=True),
    ],
    ids=["openclip", "timm", "no positions", "dynamic size"],
)
def test_lower_precisions_err_as_the_plain_pass_and_give_its_dtypes(build, autocast, dtype):
    tower, images = convert_attention(build(), "normlinear", blocks=2), images_of()
    if hasattr(tower, "dynamic_img_size") and tower.dynamic_img_size:
        images = images_of(40, 32)
    with torch.no_grad():
        exact = tensors(tower(images))
        tower, images = (tower.float(), images.float()) if autocast else (tower.to(dtype), images.to(dtype))
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            plain = tensors(tower(images))
            with low_memory_inference(tower, tokens_per_chunk=7):
                got = tensors(tower(images))
    for each, other, truth in zip(got, plain, exact, strict=True):
        assert each.dtype == other.dtype
        # As far from the truth as the plain pass, whose roundings are others; 1e-3 where that is exact by chance.
        assert (each - truth).norm() < 2 * (other - truth).norm() + 1e-3 * truth.norm()


@pytest.mark.filterwarnings("ignore:.*Profiler")
@pytest.mark.parametrize("library", ["openclip", "timm"])
def test_stock_softmax_holds_keys_and_values_but_no_weights(library):
    if library == "openclip":
        tower = VisionTransformer(**{**OPENCLIP, "image_size": 384}, output_dim=32, pool_type="avg")
    else:
        tower = TimmVisionTransformer(**{**TIMM, "img_size": 384}, global_pool="avg")
    tower.eval()
    images, stream = torch.randn(1, 3, 384, 384), 2305 * 32 * 4
    with low_memory_inference(tower, tokens_per_chunk=64):
        # The stream, keys and values; PyTorch's kernels for the CPU take up to one stream for themselves.
        assert with_peak(lambda: tower(images), torch.device("cpu"))[1] < 4.5 * stream


@pytest.mark.parametrize(
    "options",
    [{f"{part}_rate": 0.1} for part in ("drop_path", "attn_drop", "proj_drop", "pos_drop", "patch_drop")],
    ids=str,
)
def test_dropping_in_training_is_refused(options):
    tower = timm_tower(**options)
    with low_memory_inference(tower):
        tower(images_of())
        tower.train()
        with pytest.raises(UserError, match=r"drops values .*model\.eval"):
            tower(images_of())


@pytest.mark.parametrize(
    ("options", "size", "reason"),
    [
        ({}, (32, 32), r"32 x 32 pixels .* 32 x 24: .*img_size=\(32, 32\).*dynamic_img_size"),
        ({"dynamic_img_size": True}, (32, 33), r"32 x 33 pixels.* whole patches of 8 x 8: .*dynamic_img_pad"),
        (
            {"dynamic_img_pad": True, "img_size": (30, 20)},
            (30, 20),
            r"3 x 2 patches.* 4 x 3: .*whole patches",
        ),
    ],
    ids=str,
)
def test_images_that_timm_does_not_take_are_refused(options, size, reason):
    tower = timm_tower(**options)
    with low_memory_inference(tower), pytest.raises(UserError, match=reason):
        tower(images_of(*size))


def test_masks_and_unknown_parts_are_refused():
    tower = timm_tower()
    with low_memory_inference(tower):
        for options in ({"attn_mask": torch.ones(13, 13)}, {"is_causal": True}):
            with pytest.raises(UserError, match="masks"):
                tower(images_of(), **options)
    distilled = timm.create_model("deit_tiny_distilled_patch16_224")
    hybrid = timm_tower(block_fn=ParallelScalingBlock)
    for model, reason in ((distilled, "VisionTransformerDistilled"), (hybrid, "ParallelScalingBlock")):
        with pytest.raises(UserError, match=reason), low_memory_inference(model):
            pass
