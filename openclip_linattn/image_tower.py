"""OpenCLIP's image tower that says which images it takes, and takes any size once its positions are interpolated."""

import torch
import torch.nn.functional as F
from open_clip.transformer import VisionTransformer
from torch import Tensor, nn

from openclip_linattn.errors import UserError
from openclip_linattn.ops.graphs import is_traced
from openclip_linattn.ops.inputs import full_precision
from openclip_linattn.ops.layout import compute_dtype

Grid = tuple[int, int]


class ImageTower(VisionTransformer):  # type: ignore[misc]  # open_clip ships no types
    """A VisionTransformer whose positional embedding may be interpolated to the size of every image that comes.

    `interpolates` is False until `interpolate_positions` sets it: then images of another size raise UserError, those
    with the same number of patches in another shape too, which OpenCLIP would give wrong positions in silence.
    """

    interpolates = False

    def _embeds(self, x: Tensor) -> Tensor:
        if is_traced() or grid_of(self, x) == self.grid_size:
            embedded: Tensor = super()._embeds(x)
            return embedded
        positions = positions_for(self, x)
        patches = self.conv1(x).flatten(2).mT
        patches = patches + positions.rows(0, positions.grid[0]).to(patches.dtype)
        token = (self.class_embedding + positions.prefix[0]).to(patches.dtype)
        tokens = torch.cat([token.expand(patches.shape[0], 1, -1), patches], 1)
        normed: Tensor = self.ln_pre(self.patch_dropout(tokens))
        return normed


def interpolate_positions(model: nn.Module, enabled: bool = True) -> None:
    """Lets the image tower of a model take images of any size whose sides are at least one patch.

    The positional embedding stays as it is and is interpolated in every forward pass as OpenCLIP resizes it at
    loading (bicubic, with antialiasing), with gradients; the rest of a side that fills no patch is not looked at.
    Non-square sizes work. Works on the CLIP models of this package or on their image towers; raises UserError for
    others.
    """
    towers = [module for module in model.modules() if isinstance(module, ImageTower)]
    if not towers:
        raise UserError(
            f"{type(model).__name__} has no image tower of this package, whose positions could be interpolated"
        )
    for tower in towers:
        tower.interpolates = enabled


def grid_of(tower: VisionTransformer, images: Tensor) -> Grid:
    """Rows and columns of whole patches of images (B, 3, height, width)."""
    height, width = images.shape[-2:]
    return height // tower.patch_size[0], width // tower.patch_size[1]


class Positions:
    """A tower's positional embedding on a grid of patches, its own or another to which it is interpolated.

    Interpolation is separable, so that any range of rows can be had without the others.

    Args:
        embedding: (N, width), with `count` rows of class token and registers before those of the patches.
        own: rows and columns of patches that the embedding is for.
        grid: rows and columns of patches to which it is interpolated.
        count: how many rows are not for patches; they are `prefix` (count, width), and stay as they are.
    """

    def __init__(self, embedding: Tensor, own: Grid, grid: Grid, count: int = 1) -> None:
        self.prefix = embedding[:count]
        self.grid = grid
        self._patches = embedding[count:].view(*own, -1)
        self._weights: tuple[Tensor, Tensor] | None = None
        if own != grid:
            self._patches = self._patches.to(compute_dtype(embedding))
            self._weights = (
                _resizing(own[0], grid[0], self._patches),
                _resizing(own[1], grid[1], self._patches),
            )

    def rows(self, first: int, last: int) -> Tensor:
        """The embeddings of the patches in rows first to last - 1, ((last - first) * columns, width)."""
        if self._weights is None:
            return self._patches[first:last].flatten(0, 1)
        down, across = self._weights
        with full_precision(down):
            rows = (down[first:last] @ self._patches.flatten(1)).view(last - first, *self._patches.shape[1:])
            resized: Tensor = (across @ rows).flatten(0, 1)
        return resized


def positions_for(tower: VisionTransformer, images: Tensor) -> Positions:
    """The positions of a tower's patches on these images; raises UserError where it does not take their size."""
    grid, own = grid_of(tower, images), tuple(tower.grid_size)
    if grid != own and not getattr(tower, "interpolates", False):
        (height, width), (own_height, own_width) = images.shape[-2:], tower.image_size
        other = (
            ", or call openclip_linattn.interpolate_positions(model)" if isinstance(tower, ImageTower) else ""
        )
        raise UserError(
            f"the images are {height} x {width} pixels and the tower takes {own_height} x {own_width}: build the "
            f"model with --force-image-size {height} {width}{other}"
        )
    if 0 in grid:
        raise UserError(
            f"images of {tuple(images.shape[-2:])} pixels are smaller than one patch {tower.patch_size}"
        )
    return Positions(tower.positional_embedding, own, grid)


def _resizing(old: int, new: int, like: Tensor) -> Tensor:
    """The matrix (new, old) by which OpenCLIP's bicubic resize takes a line of `old` values to `new`."""
    lines = torch.eye(old, dtype=like.dtype, device=like.device)[None, None]
    resized = F.interpolate(lines, size=(new, old), mode="bicubic", antialias=True, align_corners=False)
    return resized[0, 0]
