"""The tokens that enter the first block of an image tower, made a few rows of patches at a time."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from open_clip.transformer import VisionTransformer
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import Tensor

from openclip_linattn.errors import UserError
from openclip_linattn.image_tower import Grid, Positions, positions_for


def openclip_tokens(tower: VisionTransformer, images: Tensor, size: int) -> Tensor:
    """The tokens (B, N, width) that enter the first block of OpenCLIP's tower.

    `size` tokens of every image are made at a time. Raises UserError where the tower does not take the images' size.
    """
    positions = positions_for(tower, images)
    height = tower.patch_size[0]

    def patches(first: int, last: int) -> Tensor:
        x = tower.conv1(images[:, :, first * height : last * height]).flatten(2).mT
        normed: Tensor = tower.ln_pre(x + positions.rows(first, last).to(x.dtype))
        return normed

    def prefix(dtype: torch.dtype) -> Tensor:
        token = (tower.class_embedding + positions.prefix[0]).to(dtype)
        normed: Tensor = tower.ln_pre(token.expand(images.shape[0], 1, -1))
        return normed

    return _joined(patches, prefix, positions.grid, size)


def timm_tokens(tower: TimmVisionTransformer, images: Tensor, size: int) -> Tensor:
    """The same of timm's tower; positions are interpolated as timm does it."""
    embed = tower.patch_embed
    positions, grid = _timm_positions(tower, images)
    height = embed.patch_size[0]
    parts = [part for part in (tower.cls_token, tower.reg_token) if part is not None]

    def patches(first: int, last: int) -> Tensor:
        band = images[:, :, first * height : last * height]
        if embed.dynamic_img_pad:
            band = F.pad(band, [0, -band.shape[3] % embed.patch_size[1], 0, -band.shape[2] % height])
        x = embed.norm(embed.proj(band).flatten(2).mT)
        normed: Tensor = tower.norm_pre(
            x if positions is None else x + positions.rows(first, last).to(tower.pos_embed.dtype)
        )
        return normed

    def prefix(dtype: torch.dtype) -> Tensor:
        if not parts:
            return images.new_empty(images.shape[0], 0, tower.embed_dim, dtype=dtype)
        x = torch.cat(parts, 1)
        if positions is not None and len(positions.prefix):
            x = x + positions.prefix
        normed: Tensor = tower.norm_pre(x.expand(images.shape[0], -1, -1))
        return normed

    return _joined(patches, prefix, grid, size)


def _timm_positions(tower: TimmVisionTransformer, images: Tensor) -> tuple[Positions | None, Grid]:
    """A tower's positions on these images, if it has any, and their grid.

    Raises UserError where timm does not take their size.
    """
    embed, (height, width) = tower.patch_embed, images.shape[-2:]
    if embed.strict_img_size and (height, width) != tuple(embed.img_size):
        raise UserError(
            f"the images are {height} x {width} pixels and the tower takes {embed.img_size[0]} x "
            f"{embed.img_size[1]}: create the model with img_size=({height}, {width}), or with dynamic_img_size=True"
        )
    whole = height % embed.patch_size[0] == 0 == width % embed.patch_size[1]
    if not (embed.strict_img_size or embed.dynamic_img_pad or whole):
        raise UserError(
            f"the images are {height} x {width} pixels, and the tower takes whole patches of {embed.patch_size[0]} x "
            f"{embed.patch_size[1]}: create the model with dynamic_img_pad=True too"
        )
    own, grid = tuple(embed.grid_size), tuple(embed.dynamic_feat_size((height, width)))
    if tower.pos_embed is None:
        return None, grid
    if grid != own and not tower.dynamic_img_size:
        raise UserError(
            f"the tower has positions for {own[0]} x {own[1]} patches, and these images have {grid[0]} x {grid[1]}: "
            "create the model with an img_size of whole patches"
        )
    count = 0 if tower.no_embed_class else tower.num_prefix_tokens
    return Positions(tower.pos_embed[0], own, grid, count), grid


def _joined(
    patches: Callable[[int, int], Tensor], prefix: Callable[[torch.dtype], Tensor], grid: Grid, size: int
) -> Tensor:
    """The tokens (B, N, width) that enter the first block, made a few rows of patches at a time.

    Args:
        patches: (first, last) to the tokens (B, L, width) of the rows of patches first to last - 1.
        prefix: the dtype of those to the tokens (B, P, width) before them.
        grid: rows and columns of patches.
        size: tokens of one image that are made at a time.
    """
    rows, columns = grid
    band = max(1, size // columns)
    x: Tensor | None = None
    count = 0
    for first in range(0, rows, band):
        last = min(rows, first + band)
        part = patches(first, last)
        if x is None:
            before = prefix(part.dtype)
            count = before.shape[1]
            dtype = torch.promote_types(part.dtype, before.dtype)
            x = part.new_empty(part.shape[0], count + rows * columns, part.shape[2], dtype=dtype)
            x[:, :count] = before
        x[:, count + first * columns : count + last * columns] = part
    assert x is not None
    return x
