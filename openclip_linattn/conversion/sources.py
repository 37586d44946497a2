"""Finds and loads the checkpoint that is to be converted: a file, a run's newest, or a tag of OpenCLIP."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.transform import PreprocessCfg

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.checkpoints import Checkpoint, find_checkpoints
from openclip_linattn.zeroshot.encoders.models import LoadedModel, check_model_name, load_model

TAG_SETTINGS = {
    "image_mean": "mean",
    "image_std": "std",
    "image_interpolation": "interpolation",
    "image_resize_mode": "resize_mode",
}
"""Settings of a checkpoint, and what OpenCLIP's table of tags calls them."""


def load_source(source: str, model: str | None) -> tuple[Checkpoint, LoadedModel]:
    """The checkpoint that `source` names, and its model with its weights, on the CPU in fp32, in evaluation.

    `source` is a file, a run folder (its newest epoch_N.pt), or one of OpenCLIP's pretrained tags, which is downloaded
    by OpenCLIP. `model` is the model's name where no run records it; a tag needs it.
    Raises UserError where there is no such checkpoint, or where it does not load as the model.
    """
    checkpoint = find_checkpoints([source], model)[-1] if Path(source).exists() else _download(source, model)
    return checkpoint, load_model(checkpoint, device=torch.device("cpu"), precision="fp32")


def _download(tag: str, model: str | None) -> Checkpoint:
    if model is None:
        raise UserError(
            f"{tag} is no file or folder; where it is one of OpenCLIP's pretrained tags, name its model with --model"
        )
    name = check_model_name(model)
    config = open_clip.get_pretrained_cfg(name, tag)
    if not config:
        tags = open_clip.list_pretrained_tags_by_model(name)
        known = f"its tags are {', '.join(tags)}" if tags else "it has none"
        raise UserError(f"{tag} is no file or folder, and no pretrained tag of {name}: {known}")
    _check_activation(name, tag, config)
    try:
        path = open_clip.download_pretrained(config)
    except Exception as error:  # the network's many ways to fail
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"the weights {tag} of {name} could not be downloaded: {reason[0]}") from error
    settings = {
        key: config[part]
        for key, part in TAG_SETTINGS.items()
        if part in config and config[part] != getattr(PreprocessCfg, part)
    }
    return Checkpoint(Path(path), name, settings)


def _check_activation(name: str, tag: str, config: Mapping[str, Any]) -> None:
    """Raises UserError for weights trained with QuickGELU in a model without; the downloaded file does not say it."""
    if config.get("quick_gelu") and not open_clip.get_model_config(name).get("quick_gelu"):
        raise UserError(
            f"the weights {tag} were trained with QuickGELU, and {name} has GELU: give --model {name}-quickgelu"
        )
