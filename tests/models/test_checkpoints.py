"""Checkpoints say their attention: the same kind loads, stock softmax starts any kind, another kind is refused."""

import warnings

import open_clip
import pytest
import torch

from openclip_linattn.errors import UserError

KINDS = (
    "softmax",
    "linear",
    "linearelu",
    "normlinear",
    "normlinearmean",
    "infsa",
    "lininfsa",
    "neumannlinear",
)


def save(model: torch.nn.Module, path, *, ddp: bool = False) -> str:
    """As OpenCLIP's training saves: an epoch and a state dict, with DDP's prefix in version 3."""
    prefix = "module." if ddp else ""
    weights = {prefix + key: value for key, value in model.state_dict().items()}
    torch.save({"epoch": 1, "name": "test", "state_dict": weights}, path)
    return str(path)


def features(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    images = torch.randn(3, 3, 48, 48)
    texts = open_clip.get_tokenizer("ViT-T32-8-softmax")(["a red circle", "two", ""])
    with torch.no_grad():
        return model.eval().encode_image(images), model.encode_text(texts)


@pytest.mark.parametrize("ddp", [False, True], ids=["single", "ddp"])
@pytest.mark.parametrize("kind", [*KINDS, "normlinear-text", "neumannlinear-text"])
def test_a_checkpoint_gives_its_features_back(tmp_path, kind, ddp):
    name = f"ViT-T32-8-{kind}"
    model = open_clip.create_model(name)
    path = save(model, tmp_path / "epoch_1.pt", ddp=ddp)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = open_clip.create_model(name, pretrained=path)
    for mine, other in zip(features(model), features(again), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("into", [kind for kind in KINDS if kind != "linear"])
def test_another_kind_is_refused(tmp_path, into):
    path = save(open_clip.create_model("ViT-T32-8-linear"), tmp_path / "epoch_1.pt")
    with pytest.raises(RuntimeError) as caught:
        open_clip.create_model(f"ViT-T32-8-{into}", pretrained=path)
    assert f"trained with linear attention and this model's has {into}" in str(caught.value)
    assert "size mismatch" not in str(caught.value)


def test_another_kind_is_refused_even_when_not_strict():
    weights = open_clip.create_model("ViT-T32-8-normlinear").state_dict()
    with pytest.raises(RuntimeError, match="normlinear attention"):
        open_clip.create_model("ViT-T32-8-normlinearmean").load_state_dict(weights, strict=False)


@pytest.mark.parametrize("strict", [True, False])
def test_a_softmax_text_tower_is_not_taken_for_a_linear_one(strict):
    weights = open_clip.create_model("ViT-T32-8-linear-text").state_dict()
    with pytest.raises(
        UserError, match=r"text tower was trained with linear .* has softmax.*\.\.\.-linear-text\."
    ):
        open_clip.create_model("ViT-T32-8-linear").load_state_dict(weights, strict=strict)


@pytest.mark.parametrize("custom", [False, True], ids=["plain", "custom-text"])
def test_a_softmax_text_tower_starts_a_linear_one_with_a_warning(custom):
    model = open_clip.create_model("ViT-T32-8-linear-text", force_custom_text=custom)
    image_only = open_clip.create_model("ViT-T32-8-linear", force_custom_text=custom).state_dict()
    stock = open_clip.create_model("ViT-T32-8-softmax", force_custom_text=custom).state_dict()
    for weights, words in (
        (stock, "the checkpoint names"),
        (image_only, "the checkpoint's text tower names"),
    ):
        with pytest.warns(UserWarning, match=words) as caught:
            model.load_state_dict(weights)
        assert len(caught) == 1


def test_parts_of_a_checkpoint_are_not_taken_for_stock_weights():
    model = open_clip.create_model("ViT-T32-8-infsa-text")
    weights = {key: value for key, value in model.state_dict().items() if key.startswith("visual.")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        missing = model.load_state_dict(weights, strict=False).missing_keys
        assert "transformer.resblocks.0.attn.rho_logit" in missing
        missing = model.load_state_dict({}, strict=False).missing_keys
    assert "visual.transformer.attention_kind" in missing


def test_openclip_s_own_softmax_refuses_a_linear_checkpoint(tmp_path):
    path = save(open_clip.create_model("ViT-T32-8-linear"), tmp_path / "epoch_1.pt")
    config = open_clip.get_model_config("ViT-T32-8-linear")
    config["vision_cfg"] = {"image_size": 48, "patch_size": 8, "width": 32, "layers": 3, "head_width": 16}
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*visual\.transformer\.attention_kind"):
        open_clip.load_checkpoint(open_clip.CLIP(**config), path)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "softmax"])
def test_softmax_weights_start_any_kind_with_one_warning(tmp_path, kind):
    stock = open_clip.create_model("ViT-T32-8-softmax")
    path = save(stock, tmp_path / "epoch_1.pt")
    with pytest.warns(UserWarning, match=f"stock softmax weights and starts a {kind} model") as caught:
        model = open_clip.create_model(f"ViT-T32-8-{kind}", pretrained=path)
    assert len(caught) == 1
    for key, value in stock.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=0)
    factors = {
        name: p.float().sigmoid().mean().item() for name, p in model.named_parameters() if "rho" in name
    }
    assert all(abs(value - 0.95) < 1e-6 for value in factors.values())
    assert bool(factors) == (kind in ("infsa", "lininfsa"))


def test_a_checkpoint_that_lacks_its_own_factors_is_incomplete():
    weights = open_clip.create_model("ViT-T32-8-infsa").state_dict()
    del weights["visual.transformer.resblocks.1.attn.rho_logit"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*rho_logit"):
        open_clip.create_model("ViT-T32-8-infsa").load_state_dict(weights)


@pytest.mark.parametrize("kind", KINDS)
def test_larger_images_resize_the_positions_only(tmp_path, kind):
    name = f"ViT-T32-8-{kind}"
    model = open_clip.create_model(name)
    path = save(model, tmp_path / "epoch_1.pt")
    for size, grid in ((80, (10, 10)), ((96, 48), (12, 6)), (48, (6, 6))):
        larger = open_clip.create_model(name, pretrained=path, force_image_size=size)
        assert larger.visual.grid_size == grid
        positions = larger.visual.positional_embedding
        assert positions.shape[0] == grid[0] * grid[1] + 1
        torch.testing.assert_close(positions[0], model.visual.positional_embedding[0], rtol=0, atol=0)
        sides = (size, size) if isinstance(size, int) else size
        assert torch.isfinite(larger.encode_image(torch.randn(2, 3, *sides))).all()
    torch.testing.assert_close(features(larger)[0], features(model)[0], rtol=0, atol=0)
