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


class HeadOperator(nn.Module):
    """What every attention module around an operator has: the operator of its kind and its learnable factors.

    A module with `num_heads` calls `choose_operator` once, and `operator` with `operator_arguments` on its heads.
    """

    num_heads: int

    def choose_operator(self, kind: str, *, train_tokens: int, device: torch.device) -> None:
        """Sets the operator and adds the parameters of its factors; raises UserError for an unknown kind."""
        if kind not in OPERATORS:
            raise UserError(f"unknown attention kind {kind!r}; known are {', '.join(sorted(OPERATORS))}")
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
            self.register_parameter(f"{name}_logit", nn.Parameter(self.initial_logits(name).to(device)))

    def initial_logits(self, name: str) -> Tensor:
        """The (H,) logits that a new module gives to a factor, rho or gamma."""
        return torch.full((self.num_heads,), FACTORS[name][1], device="cpu")

    def factor(self, name: str) -> Tensor:
        """The (H,) values of a factor, in fp32 at least: near 1 a lower precision rounds to 1."""
        logit: Tensor = getattr(self, f"{name}_logit")
        return FACTORS[name][0] * torch.sigmoid(logit if logit.dtype == torch.float64 else logit.float())

    def operator_arguments(self) -> dict[str, Any]:
        """The keyword arguments that the operator of this module is called with, beside masks."""
        return {**self.options, **{name: self.factor(name) for name in self.factors}}

    def extra_repr(self) -> str:
        """What the printed model shows; `openclip-scaling` reads it from OpenCLIP's out.log."""
        return f"kind={self.kind}, heads={self.num_heads}, train_tokens={self.train_tokens}"


class OperatorAttention(HeadOperator, Attention):  # type: ignore[misc]  # open_clip ships no types
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

    in_proj_weight: Tensor
    in_proj_bias: Tensor
    out_proj: nn.Linear
    head_dim: int

    def __init__(self, dim: int, num_heads: int, *, kind: str, train_tokens: int) -> None:
        super().__init__(dim, num_heads=num_heads, qkv_bias=True)
        self.choose_operator(kind, train_tokens=train_tokens, device=self.in_proj_weight.device)
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

    def project(self, x: Tensor, parts: str) -> tuple[Tensor, ...]:
        """The heads (B, H, N, D) of the named parts of the packed projection: "q", "kv" or "qkv"."""
        first = "qkv".index(parts) * x.shape[-1]
        rows = slice(first, first + len(parts) * x.shape[-1])
        packed = F.linear(x, self.in_proj_weight[rows], self.in_proj_bias[rows])
        heads = packed.view(*x.shape[:2], len(parts), self.num_heads, self.head_dim)
        return heads.permute(2, 0, 3, 1, 4).unbind(0)

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
        o = self.operator(q, k, v, causal=attn_mask is not None, **self.operator_arguments())
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
