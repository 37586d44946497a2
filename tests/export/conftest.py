"""What the tests of exports share."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import open_clip
import pytest
import torch

from openclip_linattn.zeroshot.encoders.models import LoadedModel


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def random_model(name: str) -> LoadedModel:
    """A model whose every weight differs from its initial value, those of single heads too."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        clip, _, transform = open_clip.create_model_and_transforms(name)
        with torch.no_grad():
            for parameter in clip.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    return LoadedModel(clip.eval(), open_clip.get_tokenizer(name), transform, torch.device("cpu"), "fp32")


@pytest.fixture
def loaded() -> Callable[[str], LoadedModel]:
    """The model of a name with random weights."""
    return random_model


@pytest.fixture
def saved(tmp_path) -> Callable[[str], Path]:
    """A run folder with a checkpoint of a random model of a name."""

    def save(name: str) -> Path:
        run = tmp_path / "run"
        (run / "checkpoints").mkdir(parents=True)
        (run / "params.txt").write_text(f"model: {name}\n")
        torch.save({"state_dict": random_model(name).clip.state_dict()}, run / "checkpoints" / "epoch_1.pt")
        return run

    return save
