"""Models with random weights, for what does not depend on training."""

import open_clip
import torch

from openclip_linattn.zeroshot.encoders.models import LoadedModel


def random_model(name: str) -> LoadedModel:
    """Build a model in fp32 on the CPU, with the weights of seed 0."""
    torch.manual_seed(0)
    model, _, transform = open_clip.create_model_and_transforms(name)
    return LoadedModel(model.eval(), open_clip.get_tokenizer(name), transform, torch.device("cpu"), "fp32")
