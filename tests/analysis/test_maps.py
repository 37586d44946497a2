"""Maps against the N x N weights of the layers, and what is drawn of them."""

import open_clip
import pytest
import torch

import openclip_linattn
from openclip_linattn.analysis.gallery import ModelMaps, write_gallery
from openclip_linattn.analysis.layers import read_layers
from openclip_linattn.analysis.maps import METHODS, TokenMaps, token_maps
from openclip_linattn.analysis.tiles import image_tile, map_tile
from openclip_linattn.analysis.weights.implied import hop_of
from openclip_linattn.errors import UserError
from openclip_linattn.ops import OPERATORS


@pytest.fixture(params=OPERATORS)
def visual(request):
    openclip_linattn.register()
    torch.manual_seed(0)
    return open_clip.create_model(f"ViT-T32-8-{request.param}").visual.eval()


def test_maps_are_the_weights_of_the_explicit_form_on_the_grid(visual, dense):
    images = torch.randn(2, 3, 48, 48)
    layers = []
    read_layers(visual, images, lambda layer: layers.append(layer.double()))
    found = {maps.method: maps for maps in token_maps(visual, images, METHODS, gamma=0.9)}
    weights = torch.stack([dense(layer) for layer in layers], 1)
    shape = (2, len(layers), layers[0].q.shape[1], 6, 6)
    assert found["class"].attention == layers[0].kind
    close = {"rtol": 1e-7, "atol": 1e-10}
    torch.testing.assert_close(found["class"].values, weights[..., 0, 1:].view(shape), **close)
    torch.testing.assert_close(found["received"].values, weights[..., 1:].mean(-2).view(shape), **close)
    identity = torch.eye(37, dtype=torch.float64)
    hop = hop_of(layers[1], 0.9)
    matrix = hop.weights.times(identity.expand(2, shape[2], -1, -1))
    walks = torch.linalg.inv(identity - hop.gamma * matrix) - identity
    torch.testing.assert_close(
        found["arrivals"].values[:, 1], walks[..., 1:].mean(-2).view(2, -1, 6, 6), **close
    )
    torch.testing.assert_close(found["katz"].values[:, 1], walks.sum(-1)[..., 1:].view(2, -1, 6, 6), **close)
    shares = (weights / weights.sum(-1, keepdim=True).clamp_min(1e-12)).mean(2)
    product = identity
    for layer in range(len(layers)):
        product = (identity + shares[:, layer]) / 2 @ product
        expected = product[:, 0, 1:].view(2, 1, 6, 6)
        torch.testing.assert_close(found["rollout"].values[:, layer], expected, **close)


def test_a_layer_and_a_head_are_chosen_or_the_last_and_the_mean():
    values = torch.rand(2, 3, 4, 5, 5)
    maps = TokenMaps("class", "softmax", values)
    torch.testing.assert_close(maps.choose(None, None), values[:, 2].mean(1))
    torch.testing.assert_close(maps.choose(1, 3), values[:, 1, 3])
    with pytest.raises(UserError, match="no layer 3; the tower has 3"):
        maps.choose(3, None)
    with pytest.raises(UserError, match="no head 4; a layer has 4"):
        maps.choose(None, 4)
    one = TokenMaps("rollout", "softmax", values[:, :, :1])
    torch.testing.assert_close(one.choose(0, 2), values[:, 0, 0])


def test_models_whose_names_become_the_same_have_files_of_their_own(tmp_path):
    maps = [TokenMaps("class", "softmax", torch.rand(1, 1, 1, 2, 2))]
    models = [ModelMaps(name, torch.rand(1, 3, 4, 4), maps) for name in ("a/b", "a-b", "a b")]
    paths = write_gallery(models, ["picture"], tmp_path, layer=None, head=None)
    assert {path.name for path in paths} == {
        *("maps.png", "layers-a-b.png", "layers-a-b-2.png", "layers-a-b-3.png"),
        *("index.html", "maps.npz"),
    }
    assert all(path.is_file() for path in paths)


def test_an_unknown_map_is_refused_by_name():
    visual = open_clip.create_model("ViT-T32-8-linear").visual
    with pytest.raises(UserError, match=r"no map 'gradcam'; known are class"):
        token_maps(visual, torch.randn(1, 3, 48, 48), ["gradcam"])


def test_images_that_the_patches_do_not_fill_are_refused():
    torch.manual_seed(0)
    visual = open_clip.create_model("ViT-B-32", force_image_size=70).visual
    visual.transformer.resblocks = visual.transformer.resblocks[:1]
    with pytest.raises(UserError, match="5 tokens for images of 70 x 70 pixels in patches of 32 x 32"):
        token_maps(visual, torch.randn(1, 3, 70, 70), ["class"])


def test_a_tile_shows_where_a_map_is_bright_and_how_far_it_reaches():
    colors, values = torch.full((3, 4, 4), 0.5), torch.ones(2, 2)
    values[0, 1] = 2
    tile = map_tile(colors, values)
    assert tile.pixels.shape == (4, 4, 3)
    brightness = tile.pixels.astype(int).sum(-1)
    assert (brightness[:2, 2:] == brightness.max()).all()
    assert (brightness[2:] == brightness.min()).all()
    assert tile.caption == "0.8 to 1.6 × mean"
    assert map_tile(colors, torch.zeros(2, 2)).caption == "no weight"
    assert (image_tile(colors, "x").pixels == 128).all()
