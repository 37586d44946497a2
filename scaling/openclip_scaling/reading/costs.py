"""Size and forward cost of a run's model: from run.json where it says so, else counted from the printed model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openclip_scaling.errors import UserError
from openclip_scaling.flops import ClipCost, clip_cost
from openclip_scaling.reading.architecture import read_architecture
from openclip_scaling.reading.epochs import whole_number
from openclip_scaling.reading.run_folder import Run


@dataclass(frozen=True)
class Cost:
    """Size and forward cost of a run's model, each None where it is not known."""

    attention: str | None = None
    text_attention: str | None = None
    image_parameters: int | None = None
    text_parameters: int | None = None
    parameters: int | None = None
    gmac: float | None = None
    train_gmac: float | None = None


def cost_of(run: Run) -> Cost:
    """From run.json where it says so, and otherwise by arithmetic from the printed model."""
    manifest = run.manifest
    counts = manifest.get("parameters")
    counts = counts if isinstance(counts, Mapping) else {"total": counts}
    gmac = manifest.get("gmac_per_pair")
    gmac = positive(gmac.get("total") if isinstance(gmac, Mapping) else gmac)
    counted = None if gmac is not None and manifest.get("attention") else _counted(run)
    if counted is None:
        if positive(run.params.get("force_patch_dropout")):
            run.notices.append("patch dropout was forced; its training compute is counted without it")
        return Cost(
            attention=text_or_none(manifest.get("attention")),
            text_attention=text_or_none(manifest.get("text_attention")),
            image_parameters=whole_number(counts.get("image")),
            text_parameters=whole_number(counts.get("text")),
            parameters=whole_number(counts.get("total")),
            gmac=gmac,
            train_gmac=gmac,
        )
    return Cost(
        attention=text_or_none(manifest.get("attention")) or counted.image_attention,
        text_attention=text_or_none(manifest.get("text_attention")) or counted.text_attention,
        image_parameters=whole_number(counts.get("image")) or counted.image_parameters,
        text_parameters=whole_number(counts.get("text")) or counted.text_parameters,
        parameters=whole_number(counts.get("total")) or counted.parameters,
        gmac=gmac or counted.gmac,
        train_gmac=gmac or counted.train_gmac,
    )


def _counted(run: Run) -> ClipCost | None:
    segment = next((s for s in reversed(run.log.segments) if s.model_repr), None)
    context = whole_number(run.params.get("force_context_length"))
    try:
        found = read_architecture(
            segment.model_repr if segment else "", segment.image_size if segment else None, context
        )
        dropout = positive(run.params.get("force_patch_dropout"))
        found.config["vision_cfg"]["patch_dropout"] = dropout or 0.0
        cost = clip_cost(found.config, found.image_attention, found.text_attention)
    except UserError as error:
        run.notices.append(f"its compute is not known: {str(error).rstrip('.')}")
        return None
    run.notices.extend(found.notices)
    return cost


def text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def positive(value: Any) -> float | None:
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None
