"""The models that an analysis looks at: checkpoints as `eval` finds them, and towers with random weights."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import open_clip
import torch

from openclip_linattn.analysis.layers import attention_kind
from openclip_linattn.errors import UserError
from openclip_linattn.registration import model_name, models
from openclip_linattn.zeroshot.checkpoints import Checkpoint, check_one_model, find_checkpoints
from openclip_linattn.zeroshot.encoders.models import LoadedModel, load_model
from openclip_linattn.zeroshot.resolutions import at_sizes


@dataclass(frozen=True)
class Subject:
    """A model to look at: a checkpoint, or the registered model `random` with weights drawn from a fixed seed."""

    checkpoint: Checkpoint | None = None
    random: str = ""

    @property
    def source(self) -> str:
        """The checkpoint's path, or the model's name."""
        return self.random if self.checkpoint is None else str(self.checkpoint.path)

    @property
    def trained(self) -> bool:
        """Whether the weights come from a checkpoint."""
        return self.checkpoint is not None

    def load(self, device: torch.device, image_size: int | None = None) -> LoadedModel:
        """The model in fp32 and eval mode, at another image size where one is given.

        Raises UserError where it cannot be built or its attention cannot be read.
        """
        if self.checkpoint is None:
            loaded = _random_model(self.random, device, image_size)
        else:
            sizes = () if image_size is None else (image_size,)
            (checkpoint,) = at_sizes(self.checkpoint, sizes)
            loaded = load_model(checkpoint, device=device, precision="fp32")
        attention_kind(loaded.clip.visual)
        return loaded


def trained_subjects(sources: Sequence[Path], model: str | None) -> list[Subject]:
    """The checkpoints that the sources name, as `eval` takes them, but of a folder the newest numbered epoch only.

    Raises UserError for a source without checkpoints or without a model, and where `model` is not that of one of
    several runs.
    """
    found = [find_checkpoints([source], model)[-1] for source in sources]
    check_one_model(found, model)
    return [Subject(checkpoint) for checkpoint in {each.path: each for each in found}.values()]


def random_subjects(names: Sequence[str]) -> list[Subject]:
    """Registered models by name, or all of ours whose name begins with NAME where NAME* is given.

    Of several models with one image tower, which is what is looked at, NAME* takes the one with a softmax text tower.
    Raises UserError for a name that fits none.
    """
    chosen: list[str] = []
    for name in names:
        if name.endswith("*"):
            fitting = [
                each
                for each, config in models().items()
                if each.startswith(name[:-1]) and config.text_attention == "softmax"
            ]
            if not fitting:
                raise UserError(f"no model name begins with {name[:-1]!r}; see `openclip-linattn models`")
            chosen += fitting
        else:
            chosen.append(model_name(name))
    return [Subject(random=name) for name in dict.fromkeys(chosen)]


def _random_model(name: str, device: torch.device, image_size: int | None) -> LoadedModel:
    with torch.random.fork_rng(devices=[]), _without_warning():
        torch.manual_seed(0)
        model, _, transform = open_clip.create_model_and_transforms(
            name, precision="fp32", device=device, force_image_size=image_size
        )
    return LoadedModel(model.eval(), open_clip.get_tokenizer(name), transform, device, "fp32")


@contextmanager
def _without_warning() -> Iterator[None]:
    """Random weights are what was asked for; OpenCLIP warns of them."""

    def others(record: logging.LogRecord) -> bool:
        return "initialized randomly" not in record.getMessage()

    root = logging.getLogger()
    root.addFilter(others)
    try:
        yield
    finally:
        root.removeFilter(others)
