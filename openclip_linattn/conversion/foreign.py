"""What the attention modules of other libraries have in common once an operator computes them."""

from torch import Tensor, nn

from openclip_linattn.attention import HeadOperator
from openclip_linattn.conversion.masks import read_mask
from openclip_linattn.errors import UserError


class ForeignAttention(HeadOperator):
    """An operator inside another library's attention module, whose submodules and their names it takes over.

    Args:
        module: the library's attention module.
        kind: a key of `openclip_linattn.ops.OPERATORS`.
        num_heads: number of heads H.
        train_tokens: see `OperatorAttention`.
        weight: a parameter of the module, on whose device the factors are put.
    """

    def __init__(
        self, module: nn.Module, kind: str, *, num_heads: int, train_tokens: int, weight: Tensor
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        for name, child in module.named_children():
            setattr(self, name, child)
        self.choose_operator(kind, train_tokens=train_tokens, device=weight.device)
        self.train(module.training)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
        """The operator's output (B, H, N, D), with the mask's causal order and padding; see `read_mask`.

        `causal` is read where there is no mask. Padded queries give zero. Raises UserError for masks that cannot be
        honoured.
        """
        padding = None
        if mask is not None:
            causal, padding = read_mask(mask, q.shape[0])
        o: Tensor = self.operator(
            q, k, v, causal=causal, key_padding_mask=padding, **self.operator_arguments()
        )
        return o


def refuse_dropout(rate: float) -> None:
    """Raises UserError where attention weights are dropped in training."""
    if rate:
        raise UserError(
            f"the attention drops weights at a rate of {rate}, and linear forms have no N x N weights to drop: build "
            "the model with an attention dropout of 0"
        )
