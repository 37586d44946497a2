"""Linear attention of other packages, measured beside ours where they are installed.

Each computes its own formula, which is written out here to check that it is called rightly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Peer:
    """A function of another package on (B, H, N, D), and its explicit N x N formula."""

    name: str
    function: Function
    reference: Function


def installed_peers(device_type: str) -> list[Peer]:
    """The peers that can be imported here and run on that type of device."""
    peers = []
    lucidrains = _module("linear_attention_transformer.linear_attention_transformer")
    if lucidrains is not None:
        peers.append(Peer("lucidrains", lucidrains.linear_attn, _feature_softmax_reference))
    fla = _module("fla.ops.linear_attn") if device_type == "cuda" else None
    if fla is not None:
        peers.append(Peer("fla-causal", _fla(fla.chunk_linear_attn), _causal_reference))
    return peers


def _module(name: str) -> Any:
    """The module, None where the package or something that it needs is missing."""
    try:
        return import_module(name)
    except ImportError:
        return None


def _feature_softmax_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries soft-maxed over features, keys over tokens (Shen et al. 2021), and scores divided by sqrt D."""
    return (q.softmax(-1) @ k.softmax(-2).mT / math.sqrt(q.shape[-1])) @ v


def _fla(chunk_linear_attn: Callable[..., tuple[Tensor, Tensor]]) -> Function:
    """flash-linear-attention has tokens before heads, and causal forms only."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        swapped = (x.transpose(1, 2) for x in (q, k, v))
        o: Tensor = chunk_linear_attn(*swapped, scale=1.0, normalize=False)[0].transpose(1, 2)
        return o

    return function


def _causal_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).tril() @ v
