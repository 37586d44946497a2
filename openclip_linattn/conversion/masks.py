"""Reads an N x N attention mask as what an operator can honour: causal order and padded keys."""

import torch
from torch import Tensor

from openclip_linattn.errors import UserError

HIDDEN = -1e4
"""A bias below this hides a key, as -inf and the lowest number of a dtype do."""


def read_mask(mask: Tensor, batch: int) -> tuple[bool, Tensor | None]:
    """Whether a mask is causal, and which keys are padding: bool (B, N), True = padding, or None where none is.

    Shapes: mask (N, N) or (B or 1, any heads, N, N), bool with True = visible, or floating point with 0 = visible and
    at most -1e4 = hidden. Padding hides keys from every query, the padded ones too.
    Raises UserError for a mask that is no combination of the two, for instance one with a bias per distance: a linear
    form has no N x N weights to apply it to.
    """
    visible = _visible(mask)
    heads_agree = visible[:, :1] == visible
    visible = visible[:, 0]
    present = visible.any(-2)
    every = present.unsqueeze(-2).expand_as(visible)
    if heads_agree.all():
        for causal, expected in ((False, every), (True, every.tril())):
            if torch.equal(visible, expected):
                padding = None if present.all() else (~present).expand(batch, -1)
                return causal, padding
    raise UserError(
        "an attention mask is neither causal, nor of padded keys, nor both: linear forms have no N x N weights that it "
        "could be applied to"
    )


def _visible(mask: object) -> Tensor:
    """The mask as bool (B or 1, heads, N, N), True = visible."""
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or mask.shape[-1] != mask.shape[-2]:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UserError(f"an attention mask must have shape (N, N) or (B, heads, N, N), got {shape}")
    mask = mask.view(1, 1, *mask.shape) if mask.dim() == 2 else mask
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point() or not ((mask == 0) | (mask <= HIDDEN)).all():
        raise UserError(
            "an attention mask must be bool, or hold 0 for visible and -inf for hidden keys: linear forms have no N x "
            "N weights that another bias could be added to"
        )
    return mask == 0
