"""Image features, and the precision in which a model computes features of either kind."""

from contextlib import AbstractContextManager

import open_clip
import torch
import torch.nn.functional as F
from open_clip_train.precision import get_autocast
from torch import Tensor

from openclip_linattn.zeroshot.checkpoints import CheckpointError
from openclip_linattn.zeroshot.encoders.models import LoadedModel


def image_features(loaded: LoadedModel, images: Tensor) -> Tensor:
    """Return float32 features (B, embedding) of norm 1 of preprocessed images (B, 3, height, width)."""
    dtype = open_clip.get_input_dtype(loaded.precision)
    with torch.inference_mode(), autocast(loaded):
        features: Tensor = loaded.clip.encode_image(images.to(loaded.device, dtype), normalize=True)
        return as_float32(features, dim=-1)


def as_float32(features: Tensor, dim: int) -> Tensor:
    """Return `features` in float32; those of a lower precision get their norm 1 along `dim` anew."""
    return features if features.dtype == torch.float32 else F.normalize(features.float(), dim=dim)


def autocast(loaded: LoadedModel) -> AbstractContextManager[None]:
    """Return the context that OpenCLIP uses for the model's precision."""
    context: AbstractContextManager[None] = get_autocast(loaded.precision, device_type=loaded.device.type)()
    return context


def check_finite(features: Tensor, what: str) -> None:
    """Raise CheckpointError where `features` hold NaN or infinity."""
    if not bool(torch.isfinite(features).all()):
        raise CheckpointError(
            f"its {what} are not finite: the training diverged, or the precision is too low"
        )
