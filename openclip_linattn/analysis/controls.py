"""Maps that know nothing of the image: what any attention must be better than."""

import torch
from torch import Tensor

CONTROLS = ("random", "centre")


def control_maps(name: str, like: Tensor, draw: torch.Generator) -> Tensor:
    """Maps of the shape of `like` (B, grid height, grid width): noise, or nearness to the image's centre."""
    if name == "random":
        return torch.rand(like.shape, generator=draw, dtype=like.dtype).to(like.device)
    _, rows, columns = like.shape
    y = torch.linspace(-1, 1, rows, dtype=like.dtype) if rows > 1 else torch.zeros(1, dtype=like.dtype)
    x = torch.linspace(-1, 1, columns, dtype=like.dtype) if columns > 1 else torch.zeros(1, dtype=like.dtype)
    nearness = 2 - y[:, None].square() - x[None, :].square()
    return nearness.to(like.device).expand_as(like)
