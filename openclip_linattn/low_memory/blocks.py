"""A residual block of an image tower that changes its stream in place, a chunk of tokens at a time.

A chunk of the stream is changed after it was read for the last time. Blocks of OpenCLIP, timm and transformers differ
in names only; attention of every kind goes through `openclip_linattn.ops.streaming`, a library's own attention as
softmax.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention as StockTimmAttention
from torch import Tensor, nn

from openclip_linattn.attention import HeadOperator, OperatorAttention
from openclip_linattn.conversion.timm_models import TimmAttention
from openclip_linattn.conversion.transformers_models import TransformersAttention
from openclip_linattn.errors import UserError
from openclip_linattn.ops.streaming import STREAMS, Chunks


class BlockNames(NamedTuple):
    """The submodules of a block x + after(attention(before(x))), then the same with its MLP; "" where there is none."""

    before_attention: str
    attention: str
    after_attention: str
    before_mlp: str
    mlp: str
    after_mlp: str


OPENCLIP = BlockNames("ln_1", "attn", "ls_1", "ln_2", "mlp", "ls_2")
TIMM = BlockNames("norm1", "attn", "ls1", "norm2", "mlp", "ls2")
TIMM_POST_NORM = BlockNames("", "attn", "norm1", "", "mlp", "norm2")
TRANSFORMERS = BlockNames("layer_norm1", "self_attn", "", "layer_norm2", "mlp", "")
TRANSFORMERS_MODULE = "transformers.models.clip.modeling_clip"


@dataclass(frozen=True)
class Heads:
    """An attention module in parts.

    Args:
        attention: the operator and its factors.
        project: (tokens (B, L, width), names "q", "kv" or "qkv") to the heads (B, H, L, D) of each.
        merge: heads side by side (B, L, H D), and what makes the tokens (B, L, width) once more, to the output.
    """

    attention: HeadOperator
    project: Callable[[Tensor, str], tuple[Tensor, ...]]
    merge: Callable[[Tensor, Callable[[], Tensor]], Tensor]


def add_block(x: Tensor, block: nn.Module, names: BlockNames, size: int) -> Tensor:
    """The tokens x (B, N, width) after a block, in place unless it gives them a wider dtype.

    Works on `size` tokens of every image at a time. Stochastic depth and dropout are left out: for evaluation.
    """
    parts = [attrgetter(name)(block) if name else nn.Identity() for name in names]
    before, attention, after, before_mlp, mlp, after_mlp = parts
    x = _add(x, map(after, _attention(x, before, heads_of(attention), size)))
    return _add(x, (after_mlp(mlp(before_mlp(chunk))) for chunk in torch.split(x, size, 1)))


def apply(module: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
    """module(x) for one that treats every token by itself, in place unless it changes the dtype."""
    return _write(x, (module(chunk) for chunk in torch.split(x, size, 1)), add=False)


def heads_of(attention: nn.Module) -> Heads:
    """The parts of an attention module, ours or a library's own; raises UserError for others."""
    stock: Any = attention
    if type(attention) is nn.MultiheadAttention and _is_plain(attention):
        attention = OperatorAttention.from_existing(attention, kind="softmax", train_tokens=1)
    if isinstance(attention, OperatorAttention):
        return Heads(attention, attention.project, _projected(attention.out_proj))
    if isinstance(attention, TimmAttention) or type(attention) is StockTimmAttention:
        return _timm_heads(stock)
    if isinstance(attention, TransformersAttention) or type(attention).__module__ == TRANSFORMERS_MODULE:
        return _transformers_heads(stock)
    raise UserError(f"low-memory inference does not know attention of the type {type(attention).__name__}")


def _is_plain(attention: nn.MultiheadAttention) -> bool:
    """Whether it is what OpenCLIP makes: one packed projection with a bias, and no other keys than the tokens."""
    packed: list[Any] = [attention.in_proj_weight, attention.in_proj_bias]  # one is None, says no type
    return all(x is not None for x in packed) and attention.bias_k is None and not attention.add_zero_attn


def _operator_of(attention: nn.Module) -> HeadOperator:
    """The attention's own operator, or softmax where it is a library's."""
    if isinstance(attention, HeadOperator):
        return attention
    stock: Any = attention
    operator = HeadOperator()
    operator.num_heads = stock.num_heads
    operator.choose_operator("softmax", train_tokens=1, device=torch.device("cpu"))
    return operator


def _timm_heads(attention: Any) -> Heads:
    norm = getattr(attention, "norm", None) or nn.Identity()
    gate = getattr(attention, "gate", None)

    def project(x: Tensor, parts: str) -> tuple[Tensor, ...]:
        first, qkv = "qkv".index(parts), attention.qkv
        if type(qkv) is nn.Linear:
            third = qkv.out_features // 3
            rows = slice(first * third, (first + len(parts)) * third)
            bias: Tensor | None = qkv.bias
            packed = F.linear(x, qkv.weight[rows], None if bias is None else bias[rows])
        else:  # an adapter, or quantised
            packed = qkv(x).view(*x.shape[:2], 3, -1)[:, :, first : first + len(parts)]
        heads = packed.reshape(*x.shape[:2], len(parts), attention.num_heads, -1).permute(2, 0, 3, 1, 4)
        norms = {"q": attention.q_norm, "k": attention.k_norm}
        return tuple(
            norms[part](x) if part in norms else x for part, x in zip(parts, heads.unbind(0), strict=True)
        )

    def merge(o: Tensor, tokens: Callable[[], Tensor]) -> Tensor:
        o = norm(o)
        if gate is not None:
            o = o * gate(tokens()).sigmoid()
        output: Tensor = attention.proj_drop(attention.proj(o))
        return output

    return Heads(_operator_of(attention), project, merge)


def _transformers_heads(attention: Any) -> Heads:
    projections = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj}

    def project(x: Tensor, parts: str) -> tuple[Tensor, ...]:
        return tuple(
            projections[part](x).view(*x.shape[:2], attention.num_heads, -1).transpose(1, 2) for part in parts
        )

    return Heads(_operator_of(attention), project, _projected(attention.out_proj))


def _projected(out_proj: nn.Module) -> Callable[[Tensor, Callable[[], Tensor]], Tensor]:
    return lambda o, _: out_proj(o)


def _attention(x: Tensor, before: Callable[[Tensor], Tensor], heads: Heads, size: int) -> Iterator[Tensor]:
    """attention(before(x)) of one chunk after the other."""

    def chunks(parts: str) -> Iterator[tuple[Tensor, ...]]:
        for chunk in torch.split(x, size, 1):
            yield heads.project(before(chunk), parts)

    outputs = _outputs(heads.attention, chunks, x, size)
    for chunk in torch.split(x, size, 1):
        yield heads.merge(next(outputs).to(x.dtype).transpose(1, 2).flatten(2), partial(before, chunk))


def _outputs(attention: HeadOperator, chunks: Chunks, x: Tensor, size: int) -> Iterator[Tensor]:
    """The output (B, H, L, D) of one chunk after the other."""
    output = STREAMS[attention.kind](chunks, x.shape[1], **attention.operator_arguments())
    if isinstance(output, Tensor):
        yield from torch.split(output.expand(-1, -1, x.shape[1], -1), size, 2)
    else:
        for parts in chunks("q"):
            yield output(*parts)
            del parts  # before the next ones are made


def _add(x: Tensor, parts: Iterable[Tensor]) -> Tensor:
    return _write(x, parts, add=True)


def _write(x: Tensor, parts: Iterable[Tensor], *, add: bool) -> Tensor:
    """x with one range of tokens after the other replaced, or added to, by parts that may be made of x meanwhile."""
    written, first = x, 0
    for part in parts:
        dtype = torch.promote_types(written.dtype, part.dtype) if add else part.dtype
        written = written.to(dtype)
        last = first + part.shape[1]
        chunk = written[:, first:last]
        if add:
            chunk += part
        else:
            chunk.copy_(part)
        first = last
        del part  # before the next one is made
    return written
