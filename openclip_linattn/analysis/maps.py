"""Token weights of an image tower as maps over its patches, per layer and head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from openclip_linattn.analysis.layers import Layer, read_layers
from openclip_linattn.analysis.walks import arrivals, katz
from openclip_linattn.analysis.weights.implied import hop_of, implied_weights
from openclip_linattn.analysis.weights.matrices import Weights
from openclip_linattn.errors import UserError
from openclip_linattn.ops.inputs import TINY

METHODS = ("class", "received", "arrivals", "katz", "rollout")
"""What can be mapped; see `TokenMaps`."""


@dataclass(frozen=True)
class TokenMaps:
    """Maps (B, L, H, grid height, grid width) of one method for B images, L layers and H heads, not negative.

    "class": the weights of the class token's query; "received": the mean over all queries of the weights on a token;
    "arrivals": the discounted weight of the walks along the kind's one-hop operator that arrive at a token, the mean
    over all starts; "katz": that of the walks that start at it (constant where rows sum to one); "rollout": the class
    token's row of the product over the layers so far of (I + A) / 2, A the mean over heads of weights divided by their
    row sums (Abnar and Zuidema 2020), with H = 1. The class token's own weight is left out of all.
    """

    method: str
    attention: str
    values: Tensor

    @property
    def layers(self) -> int:
        """L."""
        return self.values.shape[1]

    @property
    def heads(self) -> int:
        """H, which is 1 for rollout."""
        return self.values.shape[2]

    def choose(self, layer: int | None, head: int | None) -> Tensor:
        """The maps (B, grid height, grid width) of a layer (None: the last) and a head (None: their mean).

        Raises UserError for a layer or head that is not there; rollout's one map stands for every head.
        """
        layer = self.layers - 1 if layer is None else layer
        if not 0 <= layer < self.layers:
            raise UserError(
                f"there is no layer {layer}; the tower has {self.layers}, from 0 to {self.layers - 1}"
            )
        if head is None or self.method == "rollout":
            return self.values[:, layer].mean(1)
        if not 0 <= head < self.heads:
            raise UserError(f"there is no head {head}; a layer has {self.heads}, from 0 to {self.heads - 1}")
        return self.values[:, layer, head]


def token_maps(
    visual: nn.Module, images: Tensor, methods: Sequence[str], *, gamma: float = 0.95
) -> list[TokenMaps]:
    """The maps of the methods, in order, for preprocessed images (B, 3, height, width), in one pass of the tower.

    `gamma` discounts the walks of kinds without a discount of their own. Raises UserError for an unknown method, and
    for towers whose patches do not fill the image, one token each beside the class token.
    """
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise UserError(f"there is no map {unknown[0]!r}; known are {', '.join(METHODS)}")
    kinds: list[str] = []
    found: dict[str, list[Tensor]] = {name: [] for name in methods}
    layers: list[Weights] = []

    def look(layer: Layer) -> None:
        layer = layer.double()
        kinds.append(layer.kind)
        weights = implied_weights(layer)
        layers.append(_rows_to_one(weights))
        for name in methods:
            if name == "rollout":
                found[name].append(rollout(layers).unsqueeze(1))
            else:
                found[name].append(_of_layer(name, layer, weights, gamma))

    read_layers(visual, images, look)
    grid = _grid(visual, images, found[methods[0]][0].shape[-1])
    kind = "+".join(dict.fromkeys(kinds))
    maps = []
    for name in methods:
        values = torch.stack(found[name], 1)[..., 1:]
        maps.append(TokenMaps(name, kind, values.reshape(*values.shape[:-1], *grid)))
    return maps


def _of_layer(name: str, layer: Layer, weights: Weights, gamma: float) -> Tensor:
    """(B, H, N) of one layer."""
    measures: dict[str, Callable[[], Tensor]] = {
        "class": lambda: weights.row(0),
        "received": lambda: weights.column_sums().squeeze(-1) / weights.tokens,
        "arrivals": lambda: arrivals(hop_of(layer, gamma)),
        "katz": lambda: katz(hop_of(layer, gamma)),
    }
    return measures[name]()


def rollout(layers: Sequence[Weights]) -> Tensor:
    """The class token's row (B, N) of the product of (I + A) / 2 from the last of the layers to the first.

    A is the mean over a layer's heads; only vectors are multiplied, never two matrices.
    """
    row = torch.zeros_like(layers[0].ones()[:, :1])
    row[:, :, 0] = 1
    for weights in reversed(layers):
        heads = weights.shape[1]
        row = (row + weights.transposed_times(row.expand(-1, heads, -1, -1)).mean(1, keepdim=True)) / 2
    return row[:, 0, :, 0]


def _rows_to_one(weights: Weights) -> Weights:
    return weights.scaled(weights.row_sums().clamp_min(TINY).reciprocal())


def _grid(visual: nn.Module, images: Tensor, tokens: int) -> tuple[int, int]:
    rows, columns = (int(side) for side in visual.grid_size)  # type: ignore[union-attr]
    down, across = (int(side) for side in visual.patch_size)  # type: ignore[union-attr]
    if rows * columns + 1 != tokens or tuple(images.shape[-2:]) != (rows * down, columns * across):
        raise UserError(
            f"the tower has {tokens} tokens for images of {images.shape[-2]} x {images.shape[-1]} pixels in patches of "
            f"{down} x {across}; maps need a class token and patches that fill the image"
        )
    return rows, columns
