"""Deletion curves: how the probability of a class falls while the tokens are deleted in a map's order."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur

from openclip_linattn.errors import UserError

UNITS = ("patch", "pixel")
FILLS = ("mean", "image", "blur")
AGGREGATIONS = ("ratio", "drop", "plain")

Probability = Callable[[Tensor], Tensor]
"""Makes of preprocessed images (B, 3, height, width) the probability (B,) of each one's class."""


def deletion_ranks(maps: Tensor, size: tuple[int, int], unit: str, draw: torch.Generator) -> Tensor:
    """The place (B, height, width) of every pixel in the order of deletion, from 0 for the largest value of a map.

    maps: (B, grid height, grid width). Unit "patch" deletes the patches of that grid whole, in as many places;
    "pixel" deletes single pixels by the map enlarged bilinearly. Equal values are put in an order drawn from `draw`,
    for any fixed one would be a map of its own.
    """
    values = maps if unit == "patch" else enlarge(maps, size)
    flat = values.flatten(1)
    shuffled = torch.stack([torch.randperm(flat.shape[1], generator=draw) for _ in flat])
    values_shuffled = flat.cpu().gather(1, shuffled)
    order = shuffled.gather(1, values_shuffled.argsort(stable=True, dim=1, descending=True))
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(flat.shape[1]).expand_as(order))
    ranks = ranks.view(values.shape)
    if unit == "patch":
        ranks = ranks.repeat_interleave(size[0] // maps.shape[1], 1)
        ranks = ranks.repeat_interleave(size[1] // maps.shape[2], 2)
    return ranks


def enlarge(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Maps (B, grid height, grid width) at the size of their images, by bilinear interpolation."""
    return F.interpolate(maps.unsqueeze(1), size, mode="bilinear", align_corners=False).squeeze(1)


def filling(images: Tensor, fill: str, patch: int) -> Tensor:
    """What stands where something was deleted, in the shape of the preprocessed images.

    "mean": the mean colour that the preprocessing subtracts; "image": each image's own mean colour; "blur": the image
    blurred by a Gaussian of one patch.
    """
    if fill == "mean":
        return torch.zeros_like(images)
    if fill == "image":
        return images.mean((-2, -1), keepdim=True).expand_as(images)
    # A kernel wider than the image cannot be padded by reflection.
    reach = min(2 * patch, min(images.shape[-2:]) - 1)
    blurred: Tensor = gaussian_blur(images, [2 * reach + 1] * 2, [float(patch)] * 2)
    return blurred


def deletion_curve(
    probability: Probability, images: Tensor, ranks: Tensor, fill: Tensor, steps: int
) -> Tensor:
    """The probability after each of `steps` equal deletions, (B, steps + 1), from the whole image to the empty one."""
    places = int(ranks.max()) + 1
    ranks = ranks.to(images.device).unsqueeze(1)
    curve = [
        probability(torch.where(ranks < round(step * places / steps), fill, images))
        for step in range(steps + 1)
    ]
    return torch.stack(curve, 1)


def area_over(curves: Tensor, aggregation: str) -> Tensor:
    """The area over each curve p (B, steps + 1), by trapezoids over the share deleted, (B,).

    "ratio": the mean of 1 - p / p(0); "drop": that of p(0) - p; "plain": that of 1 - p.
    """
    area, first = torch.trapezoid(curves, dim=1) / (curves.shape[1] - 1), curves[:, 0]
    return {"ratio": 1 - area / first, "drop": first - area, "plain": 1 - area}[aggregation]


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise UserError where the value of an option is none of those known."""
    if value not in known:
        raise UserError(f"{name} is {value!r}; it can be {', '.join(known)}")
