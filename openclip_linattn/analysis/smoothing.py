"""How even a layer's attention weights are, and how they answer to their query, measured on sampled rows."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openclip_linattn.analysis.layers import Layer, read_layers
from openclip_linattn.analysis.weights.rows import Head, Row, heads_of, jacobian, row_maker

Fields = dict[str, Any]
MEASURES = ("entropy", "evenness", "contrast", "gradient", "relative_gradient")


@dataclass(frozen=True)
class RowMeasures:
    """One row w of weights over N keys, p = w / sum w; without any weight all but `gradient` are NaN.

    entropy: -sum p log p in nats; evenness: entropy / log N, 1 for equal weights; contrast: the largest weight over
    the mean weight, from 1 to N; gradient: the Frobenius norm of dw/dq, q the row's own query; relative_gradient:
    gradient |q| / |w|, which knows no scale.
    """

    entropy: float
    evenness: float
    contrast: float
    gradient: float
    relative_gradient: float


def measure_row(row: Row, query: Tensor) -> RowMeasures:
    """Measure the weights that a row's function makes of its query, with their exact derivative."""
    weights = row(query)
    gradient = float(torch.linalg.matrix_norm(jacobian(row, query)))
    total, tokens = weights.sum(), len(weights)
    if not total > 0:
        return RowMeasures(math.nan, math.nan, math.nan, gradient, math.nan)
    p = weights / total
    entropy = float(torch.special.entr(p).sum())
    scale = torch.linalg.vector_norm(query) / torch.linalg.vector_norm(weights)
    return RowMeasures(
        entropy,
        entropy / math.log(tokens) if tokens > 1 else math.nan,
        float(p.max() * tokens),
        gradient,
        float(gradient * scale),
    )


def smoothing_rows(visual: nn.Module, images: Tensor, *, rows: int, seed: int = 0) -> list[Fields]:
    """One dict per layer of an image tower: the mean of every measure over images, heads and `rows` sampled queries.

    The queries are drawn anew for each layer and head, with the seed; `empty` is the share of rows without weights.
    Time and memory grow with N per row (infsa needs the N^2 scores once for its norm, in blocks).
    """
    measured: list[Fields] = []
    draw = torch.Generator().manual_seed(seed)

    def look(layer: Layer) -> None:
        found = [each for head in heads_of(layer.double()) for each in _sampled(head, rows, draw)]
        measured.append({"layer": layer.number, "tokens": layer.tokens, **_means(found)})

    read_layers(visual, images, look)
    return measured


def _sampled(head: Head, rows: int, draw: torch.Generator) -> Iterator[RowMeasures]:
    of_token = row_maker(head)
    for token in torch.randperm(len(head.q), generator=draw)[:rows].tolist():
        yield measure_row(of_token(token), head.q[token])


def _means(found: Sequence[RowMeasures]) -> Fields:
    weighted = [each for each in found if not math.isnan(each.contrast)]
    means: Fields = {}
    for name in MEASURES:
        values = [getattr(each, name) for each in (found if name == "gradient" else weighted)]
        means[name] = sum(values) / len(values) if values else None
    return {**means, "rows": len(found), "empty": 1 - len(weighted) / len(found)}


def over_layers(rows: Sequence[Fields]) -> Fields:
    """The means over a tower's layers; None where no layer has a value."""
    means: Fields = {"tokens": rows[0]["tokens"]}
    for name in (*MEASURES, "empty"):
        values = [row[name] for row in rows if row[name] is not None]
        means[name] = sum(values) / len(values) if values else None
    return means
