"""A model with a length scale at another image size than that of training."""

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from torch import Tensor

from openclip_linattn.attention import OperatorAttention
from openclip_linattn.zeroshot.checkpoints import find_checkpoints
from openclip_linattn.zeroshot.encoders.features import image_features
from openclip_linattn.zeroshot.encoders.models import load_model
from openclip_linattn.zeroshot.resolutions import at_sizes

NAME = "ViT-T32-8-normlinear"
TRAINED, OTHER = 48, 64  # pixels
TOKENS = {TRAINED: 37, OTHER: 65}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in a run, of weights large enough that the length scale shows."""
    torch.manual_seed(3)
    model = open_clip.create_model(NAME)
    with torch.no_grad():
        for parameter in model.visual.transformer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    run = tmp_path_factory.mktemp("logs") / "normlinear"
    (run / "checkpoints").mkdir(parents=True)
    (run / "params.txt").write_text(f"force_image_size: None\nmodel: {NAME}\n")
    path = run / "checkpoints" / "epoch_1.pt"
    torch.save({"epoch": 1, "name": run.name, "state_dict": model.state_dict()}, path)
    return path


def attentions(clip: Any) -> list[OperatorAttention]:
    return [each for each in clip.visual.modules() if isinstance(each, OperatorAttention)]


def features_at(path: Path, size: int, images: Tensor) -> tuple[Tensor, Any]:
    """The features that an evaluation at `size` uses, and its model."""
    (checkpoint,) = at_sizes(find_checkpoints([path])[0], [size])
    loaded = load_model(checkpoint, device=torch.device("cpu"), precision="fp32")
    assert loaded.image_size == size
    return image_features(loaded, images), loaded


def test_normlinear_at_another_size_is_the_plain_model_of_that_size_with_the_same_weights(
    trained: Path,
) -> None:
    images = torch.randn(4, 3, OTHER, OTHER, generator=torch.Generator().manual_seed(0))
    found, loaded = features_at(trained, OTHER, images)
    plain = open_clip.create_model(NAME, force_image_size=OTHER).eval()
    state = torch.load(trained, weights_only=True)["state_dict"]
    open_clip.model.resize_pos_embed(state, plain)
    plain.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(found, plain.encode_image(images, normalize=True))
    layers = attentions(loaded.clip)
    assert layers
    assert [each.options for each in layers] == [each.options for each in attentions(plain)]
    for each in layers:
        assert each.options == {"length_scale": "train", "train_tokens": TOKENS[TRAINED]}
        each.options["train_tokens"] = TOKENS[OTHER]  # the scale of the size of evaluation
    assert not torch.allclose(image_features(loaded, images), found, atol=1e-3)


def test_at_the_size_of_training_the_length_scale_is_one(trained: Path) -> None:
    images = torch.randn(4, 3, TRAINED, TRAINED, generator=torch.Generator().manual_seed(0))
    found, loaded = features_at(trained, TRAINED, images)
    for each in attentions(loaded.clip):
        each.options = {"length_scale": "none"}
    assert torch.equal(image_features(loaded, images), found)
