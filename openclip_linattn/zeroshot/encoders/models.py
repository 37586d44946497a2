"""Builds the model of a checkpoint through OpenCLIP's own factory and loader."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import open_clip
import torch
from torch import Tensor

from openclip_linattn.errors import UserError
from openclip_linattn.registration import model_name
from openclip_linattn.zeroshot.checkpoints import Checkpoint, CheckpointError
from openclip_linattn.zeroshot.encoders.unloadable import first_lines, why_unloadable
from openclip_linattn.zeroshot.sets.reading import Transform


@dataclass(frozen=True)
class LoadedModel:
    """A model of OpenCLIP in eval mode with its tokenizer, its preprocessing and where it runs."""

    clip: Any
    tokenizer: Callable[[list[str]], Tensor]
    transform: Transform
    device: torch.device
    precision: str

    @property
    def image_size(self) -> int | list[int]:
        """Pixels of a square input, else [height, width]."""
        return square_side(self.clip.visual.image_size)


def square_side(size: int | Sequence[int]) -> int | list[int]:
    """Return the side of a square image size, else [height, width]."""
    sides = [int(side) for side in size] if isinstance(size, Sequence) else [int(size)] * 2
    return sides[0] if sides[0] == sides[1] else sides


def check_model_name(name: str) -> str:
    """Return `name` as OpenCLIP lists it; raises CheckpointError with the closest names for an unknown one.

    OpenCLIP itself gives an unknown name the default tokenizer, and ignores the checkpoint for the
    hf-hub: and local-dir: schemes.
    """
    if ":" in name:
        raise CheckpointError(
            f"{name!r} names weights of its own, beside the checkpoint; give the model's plain name"
        )
    try:
        return model_name(name)
    except UserError as error:
        raise CheckpointError(str(error)) from error


def load_model(checkpoint: Checkpoint, *, device: torch.device, precision: str) -> LoadedModel:
    """Build the checkpoint's model and load its weights, with the settings of its run, in eval mode.

    Raises CheckpointError when the name is unknown, or the file is not a checkpoint of that model.
    """
    name = check_model_name(checkpoint.model)
    try:
        model, _, transform = open_clip.create_model_and_transforms(
            name, pretrained=str(checkpoint.path), precision=precision, device=device, **checkpoint.settings
        )
        tokenizer = open_clip.get_tokenizer(
            name, context_length=checkpoint.settings.get("force_context_length")
        )
    except Exception as error:  # reading a file that is no checkpoint raises many kinds
        resized = checkpoint.trained_image_size is not None
        size = f" at {checkpoint.settings['force_image_size']} px" if resized else ""
        raise CheckpointError(
            f"{checkpoint.path} does not load as {name}{size}: {why_unloadable(checkpoint.path, error)}"
        ) from error
    return LoadedModel(model.eval(), tokenizer, transform, device, precision)


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is cuda where there is one, else cpu."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r} cannot be used: {first_lines(error)}") from error
    return device
