"""Any model at any image size: positions resized at loading, or interpolated in every pass."""

import open_clip
import pytest
import torch

from openclip_linattn.errors import UserError
from openclip_linattn.image_tower import interpolate_positions
from openclip_linattn.ops import OPERATORS

NAME = "ViT-T32-8-normlinear"
SIZES = [(48, 96), (24, 40), (96, 96), (8, 8)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint at 48 px and its model."""
    torch.manual_seed(0)
    model = open_clip.create_model(NAME).eval()
    path = tmp_path_factory.mktemp("run") / "epoch_1.pt"
    torch.save({"state_dict": model.state_dict()}, path)
    return model, str(path)


def images_of(*size: int) -> torch.Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", OPERATORS)
def test_every_kind_takes_every_forced_size_with_gradients(kind, size):
    model = open_clip.create_model(f"ViT-T32-8-{kind}", force_image_size=size)
    model.set_grad_checkpointing()
    features = model.encode_image(images_of(*size), normalize=True)
    assert features.shape == (2, 32)
    assert torch.isfinite(features).all()
    features[:, 0].sum().backward()
    assert model.visual.positional_embedding.grad.shape == (size[0] * size[1] // 64 + 1, 32)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_interpolated_positions_are_those_that_openclip_resizes_at_loading(trained, size):
    model, path = trained
    resized = open_clip.create_model(NAME, pretrained=path, force_image_size=size).eval()
    interpolate_positions(model)
    try:
        with torch.no_grad():
            got, expected = (each.encode_image(images_of(*size)) for each in (model, resized))
    finally:
        interpolate_positions(model, False)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_sides_that_fill_no_whole_patch_are_cut():
    model = open_clip.create_model(NAME).eval()
    interpolate_positions(model)
    images = images_of(50, 79)
    with torch.no_grad():
        torch.testing.assert_close(model.encode_image(images), model.encode_image(images[:, :, :48, :72]))


def test_gradients_reach_the_interpolated_positions():
    model = open_clip.create_model(NAME)
    model.set_grad_checkpointing()
    interpolate_positions(model)
    model.encode_image(images_of(80, 64), normalize=True)[:, 0].sum().backward()
    gradient = model.visual.positional_embedding.grad
    assert gradient.shape == (37, 32)
    assert gradient.abs().sum(1).min() > 0


@pytest.mark.parametrize("size", [(96, 96), (24, 96), (40, 48)], ids=str)
def test_another_size_is_refused_also_where_the_number_of_patches_is_the_same(size):
    model = open_clip.create_model(NAME)
    with pytest.raises(UserError, match=rf"{size[0]} x {size[1]} pixels .* 48 x 48: .*interpolate_positions"):
        model.encode_image(images_of(*size))


def test_an_image_smaller_than_a_patch_is_refused():
    model = open_clip.create_model(NAME)
    interpolate_positions(model)
    with pytest.raises(UserError, match="smaller than one patch"):
        model.encode_image(images_of(48, 7))


def test_stock_models_are_refused():
    with torch.device("meta"):
        stock = open_clip.CLIP(**open_clip.get_model_config("ViT-B-16"))
    with pytest.raises(UserError, match="no image tower of this package"):
        interpolate_positions(stock)
