"""What the tests of exports share."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import open_clip
import pytest
import torch

from openclip_linattn import registration
from openclip_linattn.zeroshot.encoders.models import LoadedModel


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def random_model(name: str, **settings) -> LoadedModel:
    """A model whose every weight differs from its initial value, those of single heads too."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        clip, _, transform = open_clip.create_model_and_transforms(name, pretrained_text=False, **settings)
        with torch.no_grad():
            for parameter in clip.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    tokenizer = open_clip.get_tokenizer(name, context_length=settings.get("force_context_length"))
    return LoadedModel(clip.eval(), tokenizer, transform, torch.device("cpu"), "fp32")


@pytest.fixture(scope="session")
def loaded() -> Callable[..., LoadedModel]:
    """The model of a name with random weights."""
    return random_model


@pytest.fixture
def registry(monkeypatch) -> None:
    """What is registered in the test is forgotten after it."""
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIG_PATHS", list(open_clip.factory._MODEL_CONFIG_PATHS))
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIGS", dict(open_clip.factory._MODEL_CONFIGS))
    monkeypatch.setattr(registration, "_models", dict(registration._models))


@pytest.fixture
def saved(tmp_path) -> Callable[..., Path]:
    """A run folder with a checkpoint of a random model of a name, or of other weights for it."""

    def save(name: str, weights: dict[str, torch.Tensor] | None = None) -> Path:
        run = tmp_path / "run"
        (run / "checkpoints").mkdir(parents=True)
        (run / "params.txt").write_text(f"model: {name}\n")
        weights = random_model(name).clip.state_dict() if weights is None else weights
        torch.save({"state_dict": weights}, run / "checkpoints" / "epoch_1.pt")
        return run

    return save
