"""The attention module of our towers: OpenCLIP's projections around one operator of `openclip_linattn.ops`.

It holds no mathematics. What an operator needs from a module is read off its keyword arguments: `rho` and `gamma`
become one learnable logit per head, `length_scale` and `train_tokens` carry the training length.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.transformer import Attention
from torch import Tensor, nn

from openclip_linattn.errors import UserError
from openclip_linattn.ops import OPERATORS
from openclip_linattn.ops.packed import unpack

# Learnable factor -> (largest value, initial logit). gamma stays below 0.99: a plain sigmoid rounds to exactly 1,
# where the Neumann series no longer converges. Both start at 0.95.
FACTORS = {"rho": (1.0, math.log(0.95 / 0.05)), "gamma": (0.99, math.log(0.95 / 0.04))}


def _keywords(operator: Callable[..., Tensor]) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(operator).parameters.items()}


class OperatorAttention(Attention):  # type: ignore[misc]  # open_clip ships no types
    """Self-attention with packed q, k, v projections and an operator chosen by kind.

    Parameters have the names, shapes and meaning of `torch.nn.MultiheadAttention` (in_proj_weight, in_proj_bias,
    out_proj), so stock checkpoints fit. infsa, lininfsa (`rho_logit`) and neumannlinear (`gamma_logit`) add one
    vector of H logits.

    Args:
        dim: width of the tower.
        num_heads: number of heads H; the head width is dim / H.
        kind: a key of `openclip_linattn.ops.OPERATORS`.
        train_tokens: tokens per sequence at the training resolution, the N_train of the length scale c = N_train / N
            of normalised linear attention.

    Raises UserError for an unknown kind.
    """

    def __init__(self, dim: int, num_heads: int, *, kind: str, train_tokens: int) -> None:
        if kind not in OPERATORS:
            raise UserError(f"unknown attention kind {kind!r}; known are {', '.join(sorted(OPERATORS))}")
        super().__init__(dim, num_heads=num_heads, qkv_bias=True)
        self.kind = kind
        self.train_tokens = train_tokens
        self.operator = OPERATORS[kind]
        keywords = _keywords(self.operator)
        self.options: dict[str, Any] = {}
        if keywords.get("length_scale") == "none":
            # The registered normlinear equals the literal form (c = 1) at the training length and stays bounded
            # at every other one; normlinearmean brings its own length scale.
            self.options = {"length_scale": "train", "train_tokens": train_tokens}
        self.factors = tuple(name for name in FACTORS if name in keywords)
        for name in self.factors:
            logits = self.initial_logits(name).to(self.in_proj_weight.device)
            self.register_parameter(f"{name}_logit", nn.Parameter(logits))
        self._mask_checked = False

    @classmethod
    def from_existing(cls, module: nn.Module, *, kind: str, train_tokens: int) -> "OperatorAttention":
        """The same attention with another operator; the projections are the given module's own Parameters.

        `module` is OpenCLIP's attention of either version (nn.MultiheadAttention or open_clip's Attention). No random
        number is drawn, so a seed gives the same weights as in the stock model.
        """
        stock: Any = module
        weight, bias, out_proj = stock.in_proj_weight, stock.in_proj_bias, stock.out_proj
        with torch.device("meta"):
            new = cls(weight.shape[1], stock.num_heads, kind=kind, train_tokens=train_tokens)
        new.in_proj_weight, new.in_proj_bias, new.out_proj = weight, bias, out_proj
        for name in new.factors:
            setattr(new, f"{name}_logit", nn.Parameter(new.initial_logits(name).to(weight.device)))
        new.train(module.training)
        return new

    def initial_logits(self, name: str) -> Tensor:
        """The (H,) logits that a new module gives to a factor, rho or gamma."""
        return torch.full((self.num_heads,), FACTORS[name][1], device="cpu")

    def factor(self, name: str) -> Tensor:
        """The (H,) values of a factor, in fp32 at least: near 1 a lower precision rounds to 1."""
        logit: Tensor = getattr(self, f"{name}_logit")
        return FACTORS[name][0] * torch.sigmoid(logit if logit.dtype == torch.float64 else logit.float())

    def extra_repr(self) -> str:
        """What the printed model shows; `openclip-scaling` reads it from OpenCLIP's out.log."""
        return f"kind={self.kind}, heads={self.num_heads}, train_tokens={self.train_tokens}"

    def forward(
        self,
        x: Tensor,
        k_x: Tensor | None = None,
        v_x: Tensor | None = None,
        attn_mask: Tensor | None = None,
        need_weights: bool | None = None,
        **_: Any,
    ) -> Tensor | tuple[Tensor, None]:
        """Attention of x over itself.

        Args:
            x: (B, N, dim).
            k_x, v_x: None or x itself; OpenCLIP 3 hands x three times.
            attn_mask: None (every token sees every token) or OpenCLIP's (N, N) causal mask.
            need_weights: OpenCLIP 3 passes False and takes the first of a pair; OpenCLIP 4 passes nothing.

        Returns (B, N, dim); a pair with None when `need_weights` was given.

        Raises UserError for cross-attention and for masks that are not causal: linear forms have no N x N weights to
        add a mask to, and ignoring one would be silent.
        """
        if (k_x is not None and k_x is not x) or (v_x is not None and v_x is not x):
            raise UserError(f"{self.kind} attention is self-attention: k_x and v_x must be x itself")
        B, N, C = x.shape
        if attn_mask is not None:
            self._check_causal(attn_mask, N)
        packed = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = unpack(packed.view(B, N, 3, self.num_heads, self.head_dim))
        factors = {name: self.factor(name) for name in self.factors}
        o = self.operator(q, k, v, causal=attn_mask is not None, **self.options, **factors)
        o = self.out_proj(o.transpose(1, 2).reshape(B, N, C))
        return o if need_weights is None else (o, None)

    def _check_causal(self, attn_mask: Tensor, N: int) -> None:
        """OpenCLIP's text towers have one fixed mask; its values are looked at once, and never while compiling."""
        if tuple(attn_mask.shape) != (N, N):
            raise UserError(
                f"{self.kind} attention takes no mask but the causal (N, N) one, got {tuple(attn_mask.shape)}"
            )
        if self._mask_checked or torch.compiler.is_compiling():
            return
        hidden = attn_mask if attn_mask.dtype == torch.bool else attn_mask < -1e4
        if not torch.equal(hidden, torch.ones_like(hidden).triu(1)):
            raise UserError(
                f"{self.kind} attention takes no mask but the causal one, and this (N, N) mask is another"
            )
        self._mask_checked = True
