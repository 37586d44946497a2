"""Checkpoints at other image sizes than they were trained at, and their tokens there."""

from collections.abc import Sequence
from dataclasses import replace

import open_clip

from openclip_linattn.zeroshot.checkpoints import Checkpoint
from openclip_linattn.zeroshot.encoders.models import check_model_name, square_side
from openclip_scaling.errors import UserError as NotCounted
from openclip_scaling.flops import clip_towers

_DEFAULT = 224  # OpenCLIP's, where a model's config names none


def at_sizes(checkpoint: Checkpoint, sizes: Sequence[int]) -> list[Checkpoint]:
    """Return the checkpoint at each size in pixels; at that of its training, or without sizes, it stays as it is.

    OpenCLIP resizes the positional embeddings when it loads one at another size, and attentions with a length scale
    keep that of their training tokens.
    """
    if not sizes:
        return [checkpoint]
    trained = trained_size(checkpoint)
    return [
        checkpoint
        if size == trained
        else replace(
            checkpoint,
            settings={**checkpoint.settings, "force_image_size": size},
            trained_image_size=trained,
        )
        for size in dict.fromkeys(sizes)
    ]


def trained_size(checkpoint: Checkpoint) -> int | list[int]:
    """Return the pixels of the run's square images, else [height, width]; raises CheckpointError for a wrong name."""
    forced = checkpoint.settings.get("force_image_size")
    if forced is None:
        config = open_clip.get_model_config(check_model_name(checkpoint.model)) or {}
        forced = config.get("vision_cfg", {}).get("image_size", _DEFAULT)
    return square_side(forced)


def image_tokens(model: str, size: int | list[int]) -> int | None:
    """Return the tokens of an image of `size` (see `trained_size`); None where the towers are no plain ViTs."""
    config = open_clip.get_model_config(model) or {}
    try:
        image, _ = clip_towers({**config, "vision_cfg": {**config["vision_cfg"], "image_size": size}})
    except (NotCounted, KeyError):
        return None
    return image.tokens
