"""The spectrum of a layer's one-hop operator, and how near Linear-InfSA's weights come to a Perron vector."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from openclip_linattn.analysis.cross_layer import LayerSum, layer_sum
from openclip_linattn.analysis.layers import Layer, read_layers
from openclip_linattn.analysis.walks import absorption, katz, perron
from openclip_linattn.analysis.weights.features import energy_weights
from openclip_linattn.analysis.weights.implied import Hop, hop_of, pure_hop
from openclip_linattn.ops.inputs import TINY

Fields = dict[str, Any]


def spectra(visual: nn.Module, images: Tensor, *, gamma: float = 0.95) -> tuple[list[Fields], LayerSum]:
    """One dict per layer and head of an image tower, and the sum across its layers.

    Values are means over the images, but extremes over all of them where the name ends in "_min" or "_max". `gamma`
    is the discount of kinds that have none of their own, and that of the sum across layers. Raises UserError for a
    tower that cannot be read and a gamma outside [0, 1).
    """
    rows: list[Fields] = []
    hops: list[Hop] = []

    def look(layer: Layer) -> None:
        layer = layer.double()
        hop = hop_of(layer, gamma)
        hops.append(hop)
        rows.extend(_layer_rows(layer, hop))

    entering = read_layers(visual, images, look)
    return rows, layer_sum([hop.weights for hop in hops], entering.double(), gamma)


def _layer_rows(layer: Layer, hop: Hop) -> list[Fields]:
    measured = {**_hop_measures(hop), **perron_measures(layer), "token_share": token_share(layer.output())}
    over_images = {name: _over_images(name, value).tolist() for name, value in measured.items()}
    return [
        {
            "layer": layer.number,
            "head": head,
            "attention": layer.kind,
            "tokens": layer.tokens,
            **{name: _number(values[head]) for name, values in over_images.items()},
        }
        for head in range(layer.q.shape[1])
    ]


def _over_images(name: str, values: Tensor) -> Tensor:
    """(H,) of values (B, H): the least, the largest or the mean, as the name says."""
    if name.endswith("_min"):
        return values.amin(0)
    return values.amax(0) if name.endswith("_max") else values.nanmean(0)


def _number(x: float) -> float | None:
    """JSON has no NaN: what exists on none of the images is None."""
    return None if math.isnan(x) else x


def _hop_measures(hop: Hop) -> dict[str, Tensor]:
    """Measures (B, H) of the kind's own one-hop operator A^ and of the walks along it."""
    sums = hop.weights.row_sums().squeeze(-1)
    ends = absorption(hop)
    left = perron(hop.weights, side="left")
    centrality = katz(hop)
    return {
        "gamma": hop.gamma.reshape(1, -1).expand(sums.shape[:2]),
        "radius": left.radius,
        "converged": left.converged.to(sums.dtype),
        "row_sum_min": sums.amin(-1),
        "row_sum_mean": sums.mean(-1),
        "row_sum_max": sums.amax(-1),
        "rows_above_one": (ends < 0).to(sums.dtype).mean(-1),
        "absorption_min": ends.amin(-1),
        "absorption_mean": ends.mean(-1),
        "katz_mean": centrality.mean(-1),
        "perron_uniformity": cosine(left.vector, torch.ones_like(left.vector)),
    }


def perron_measures(layer: Layer) -> dict[str, Tensor]:
    """Linear-InfSA's weights against the Perron vectors of ReLU(Q K^T), both from the layer's own queries and keys.

    `constant_*` is the cosine that a constant vector reaches, and `correlation_*` the cosine after both vectors have
    lost their means. `compared_*` is 1 where there is a comparison; it is 0 and the others NaN where no score is
    positive, or where there is no Perron vector (see `perron`).
    """
    weights = energy_weights(layer.q, layer.k).squeeze(-1)
    full = pure_hop(layer)
    measured = {}
    for side in ("left", "right"):
        vector = perron(full, side=side).vector
        found = cosine(weights, vector)
        measured[f"cosine_{side}"] = found
        measured[f"constant_{side}"] = cosine(torch.ones_like(vector), vector).masked_fill(
            found.isnan(), torch.nan
        )
        measured[f"correlation_{side}"] = cosine(centred(weights), centred(vector))
        measured[f"compared_{side}"] = (~found.isnan()).to(found.dtype)
    return measured


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """The cosine of vectors along the last dimension; NaN where one of them is zero up to rounding."""
    norms = torch.linalg.vector_norm(x, dim=-1) * torch.linalg.vector_norm(y, dim=-1)
    product: Tensor = (x * y).sum(-1)
    return torch.where(norms > TINY, product / norms.clamp_min(TINY), torch.nan)


def centred(x: Tensor) -> Tensor:
    """Vectors without their mean along the last dimension."""
    return x - x.mean(-1, keepdim=True)


def token_share(output: Tensor) -> Tensor:
    """The part of an output's norm that is not common to all tokens, (B, H): |O - mean| / |O| for O (B, H, N, D)."""
    own = torch.linalg.matrix_norm(output - output.mean(-2, keepdim=True))
    share: Tensor = own / torch.linalg.matrix_norm(output).clamp_min(TINY)
    return share


def by_layer(rows: Sequence[Fields]) -> list[Fields]:
    """The rows of `spectra` averaged over the heads of each layer; extremes stay extremes."""
    layers: dict[int, list[Fields]] = {}
    for row in rows:
        layers.setdefault(row["layer"], []).append(row)
    return [_mean_row(group) for group in layers.values()]


def _mean_row(group: Sequence[Fields]) -> Fields:
    kept = {name: group[0][name] for name in ("layer", "attention", "tokens")}
    found: Fields = {}
    for name in group[0].keys() - kept.keys() - {"head"}:
        values = [row[name] for row in group if row[name] is not None]
        if name.endswith(("_min", "_max")):
            found[name] = min(values) if name.endswith("_min") else max(values)
        else:
            found[name] = sum(values) / len(values) if values else None
    return {**kept, **found}
