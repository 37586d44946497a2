"""Gives a model another attention, in memory and in place."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from openclip_linattn.attention import HeadOperator
from openclip_linattn.configs import NOT_CAUSAL
from openclip_linattn.conversion.places import PARTS, TowerPlace, find_place
from openclip_linattn.conversion.scales import keep_branch_size
from openclip_linattn.errors import UserError
from openclip_linattn.ops import OPERATORS
from openclip_linattn.towers import record_kinds

Model = TypeVar("Model", bound=nn.Module)


def convert_attention(
    model: Model,
    kind: str,
    *,
    blocks: int | None = None,
    towers: Sequence[str] = ("image",),
    rescale: bool = True,
) -> Model:
    """Replaces the attention of a model's towers by that of another kind, in place, and returns the model.

    Takes OpenCLIP's CLIP models with ViT towers (stock and ours), timm's VisionTransformers, and the CLIP models of
    transformers (CLIPModel, CLIPVisionModel, CLIPTextModel, with projections too). All parameters stay the same
    objects under the same names; rho and gamma come or go with the kind. Causal masks and padding are honoured, and
    padded tokens give zero; every other mask is an error when it comes. The kind is recorded in the state dict, so that
    these weights do not load as another kind's.

    Args:
        model: changed in place; in training or evaluation, on any device, in any precision.
        kind: a key of `openclip_linattn.ops.OPERATORS`, softmax too.
        blocks: convert only the last so many blocks of each tower; None: all.
        towers: "image", "text", or both.
        rescale: fold the ratio of the typical sums of weights of the old and the new kind into the output projections,
            so that the attention branches keep their size (2 / N_train from softmax to normlinear).

    Raises UserError, and leaves the model as it is, where a tower cannot be converted: another kind of model,
    attention with dropout or whose result is not that of softmax over its projections, lininfsa for causal text.
    """
    parts = dict.fromkeys([towers] if isinstance(towers, str) else towers)
    if not parts:
        raise UserError(
            f"no tower was named, so nothing would be converted; the towers are {' and '.join(PARTS)}"
        )
    places = [find_place(model, part) for part in parts]
    convert_places(places, kind, blocks=blocks, rescale=rescale)
    return model


def convert_places(places: Sequence[TowerPlace], kind: str, *, blocks: int | None, rescale: bool) -> None:
    """`convert_attention` for towers that were found already."""
    check_kind(kind)
    for place in places:
        _check(place, kind, blocks)
    new = [_new_attentions(place, kind, blocks) for place in places]
    loaded: dict[str, bool] = {}
    for place, attentions in zip(places, new, strict=True):
        for block, (before, after) in zip(place.blocks[-len(attentions) :], attentions, strict=True):
            if rescale:
                keep_branch_size(before, after, causal=place.causal)
            setattr(block, place.attribute, after)
        record_kinds(place.container, place.kinds, part=place.part, loaded=loaded)


def check_kind(kind: str) -> None:
    """Raises UserError for an attention kind that there is not."""
    if kind not in OPERATORS:
        raise UserError(f"unknown attention kind {kind!r}; known are {', '.join(sorted(OPERATORS))}")


def _check(place: TowerPlace, kind: str, blocks: int | None) -> None:
    if blocks is not None and not 1 <= blocks <= len(place.blocks):
        raise UserError(
            f"the {place.part} tower has {len(place.blocks)} blocks, so the last {blocks} cannot be converted"
        )
    if place.causal and kind in NOT_CAUSAL:
        raise UserError(f"{kind} has no causal form, so it cannot be the text tower's attention")


def _new_attentions(
    place: TowerPlace, kind: str, blocks: int | None
) -> list[tuple[HeadOperator, HeadOperator]]:
    """For the last blocks, the attention as it is, in our form, and the one that takes its place."""
    pairs = []
    for module in place.attentions[-(blocks or 0) :]:
        before = module if isinstance(module, HeadOperator) else _softmax_twin(place, module)
        keep = isinstance(module, HeadOperator) and module.kind == kind
        pairs.append((before, before if keep else place.wrap(module, kind, place.train_tokens)))
    return pairs


def _softmax_twin(place: TowerPlace, module: nn.Module) -> HeadOperator:
    """Our form of a library's own attention; raises UserError where it gives something else."""
    twin = place.wrap(module, "softmax", place.train_tokens)
    weight = next(module.parameters())
    if weight.is_meta:
        return twin
    width = weight.shape[-1]
    x = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0)).to(weight)
    training = module.training
    module.eval()  # twin's submodules are the module's own
    try:
        with torch.no_grad():
            expected, result = (place.call(each, x).double() for each in (module, twin))
    finally:
        module.train(training)
    tolerance = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 3e-2
    difference, size = (result - expected).norm().item(), expected.norm().item()
    if not difference <= tolerance * size:
        raise UserError(
            f"{type(module).__name__} computes something else than softmax attention over its projections (a "
            f"difference of {difference:.1e} in outputs of {size:.1e}), so it cannot be converted"
        )
    return twin
