"""What the operators' benchmark compares: operators of this package, baselines, and other packages' operators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from openclip_linattn.bench.inputs import CONTIGUOUS, PACKED
from openclip_linattn.bench.peers import installed_peers
from openclip_linattn.errors import UserError
from openclip_linattn.ops import OPERATORS
from openclip_linattn.ops.reference import REFERENCES

Function = Callable[[Tensor, Tensor, Tensor], Tensor]

SOFTMAX = "softmax"
BARE = "bare"
QUADRATIC = frozenset({SOFTMAX, "infsa"})


@dataclass(frozen=True)
class Contestant:
    """A function of q, k, v (B, H, N, D) with the explicit N x N formula that it must agree with.

    role: "operator" (ours), "baseline" or "peer" (another package's). kind: the key of
    `openclip_scaling.flops.ATTENTION_MACS` with as many products. layout: the inputs that it is given.
    """

    name: str
    role: str
    function: Function
    reference: Function
    kind: str
    layout: str

    @property
    def quadratic(self) -> bool:
        """True where time grows with the square of the tokens, by definition."""
        return self.kind in QUADRATIC


def contestants(operators: Sequence[str], layout: str, device_type: str) -> list[Contestant]:
    """The baselines, the operators named, and the peers that are installed, in this order.

    Raises UserError for an operator that is unknown or has no reference to be checked against.
    """
    chosen = [_operator(name, layout) for name in dict.fromkeys(operators) if name != SOFTMAX]
    bare = [Contestant(BARE, "baseline", _bare, _bare_reference, "linear", layout)]
    if layout == PACKED:
        # Heads that lie one after the other merge into the batch of one product: the bare form at its best.
        bare.append(
            Contestant(f"{BARE}-{CONTIGUOUS}", "baseline", _bare, _bare_reference, "linear", CONTIGUOUS)
        )
    peers = [
        Contestant(peer.name, "peer", peer.function, peer.reference, "linear", layout)
        for peer in installed_peers(device_type)
    ]
    softmax = Contestant(
        SOFTMAX, "baseline", F.scaled_dot_product_attention, REFERENCES[SOFTMAX], SOFTMAX, layout
    )
    return [softmax, *bare, *chosen, *peers]


def _operator(name: str, layout: str) -> Contestant:
    if name not in OPERATORS:
        raise UserError(f"unknown operator {name!r}; known are {', '.join(sorted(OPERATORS))}")
    if name not in REFERENCES:
        raise UserError(
            f"operator {name!r} has no N x N formula in openclip_linattn.ops.reference.REFERENCES to check it against"
        )
    return Contestant(name, "operator", OPERATORS[name], REFERENCES[name], name, layout)


def _bare(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Q (K^T V): the two products of every linear attention and nothing else."""
    return q @ (k.mT @ v)


def _bare_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT) @ v
