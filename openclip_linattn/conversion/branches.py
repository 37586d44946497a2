"""How large the attention branches of a model are: what each block's attention adds to the residual stream."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from openclip_linattn.conversion.places import TowerPlace

CAPTIONS = ("a photo of a dog", "two red circles on a table", "an old map of the city", "a diagram")


def branch_sizes(
    clip: Any, place: TowerPlace, tokenizer: Callable[[list[str]], Tensor], *, images: int = 4
) -> list[float]:
    """The root mean square of every block's attention output, in order of the blocks.

    The image tower is given noise of unit variance at its own size, the text tower a few captions: data that needs
    nothing to be there. The model must be an OpenCLIP CLIP model in evaluation, on the CPU.
    """
    sizes: list[float] = []
    with _hooked(place.attentions, sizes), torch.no_grad():
        if place.part == "text":
            clip.encode_text(tokenizer(list(CAPTIONS)))
        else:
            clip.encode_image(noise_images(clip, images))
    return sizes


def noise_images(clip: Any, count: int) -> Tensor:
    """Noise of unit variance (count, 3, height, width) at the size of a model's images; the same for every call."""
    size = clip.visual.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(0))


@contextmanager
def _hooked(modules: list[nn.Module], sizes: list[float]) -> Iterator[None]:
    def note(_module: nn.Module, _arguments: Any, output: Any) -> None:
        tensor: Tensor = output[0] if isinstance(output, tuple) else output
        sizes.append(tensor.float().square().mean().sqrt().item())

    handles = [module.register_forward_hook(note) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
