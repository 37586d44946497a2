"""CLIP models of transformers (CLIPModel, CLIPVisionModel, CLIPTextModel and those with projections)."""

from typing import Any

from torch import Tensor, nn

from openclip_linattn.conversion.foreign import ForeignAttention, refuse_dropout
from openclip_linattn.conversion.places import TowerPlace, no_such_tower
from openclip_linattn.errors import UserError

IMPLEMENTATIONS = ("sdpa", "eager")


class TransformersAttention(ForeignAttention):
    """The attention of transformers' CLIP with another operator; parameters keep their names (q_proj, out_proj, ...).

    There are no attention weights to return: with `output_attentions` a model returns none.
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear

    def __init__(self, module: nn.Module, kind: str, train_tokens: int) -> None:
        stock: Any = module
        refuse_dropout(stock.dropout)
        super().__init__(
            module, kind, num_heads=stock.num_heads, train_tokens=train_tokens, weight=stock.q_proj.weight
        )
        self.dropout = stock.dropout

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        causal_attention_mask: Tensor | None = None,
        is_causal: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attention of hidden_states (B, N, width) over themselves, and None for the weights.

        attention_mask: None, or what transformers builds for "sdpa" and "eager" from causal order and padding; then
        `is_causal` is in it. Before version 5 causal order came as a mask of its own. Raises UserError for other masks.
        """
        B, N, _width = hidden_states.shape
        q, k, v = (
            projection(hidden_states).view(B, N, self.num_heads, -1).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mask = attention_mask
        if causal_attention_mask is not None:
            mask = causal_attention_mask if mask is None else mask + causal_attention_mask
        o = self.attend(q, k, v, mask, causal=is_causal)
        output: Tensor = self.out_proj(o.transpose(1, 2).reshape(B, N, -1))
        return output, None


def transformers_place(model: nn.Module, part: str) -> TowerPlace | None:
    """The tower of a CLIP model of transformers; None for other models.

    Raises UserError for attention implementations other than "sdpa" and "eager", whose masks have other forms.
    """
    if not type(model).__module__.startswith("transformers."):
        return None
    from transformers import CLIPTextConfig
    from transformers.models.clip.modeling_clip import CLIPAttention, CLIPEncoder, CLIPPreTrainedModel

    if not isinstance(model, CLIPPreTrainedModel):
        return None
    for encoder in model.modules():
        if not isinstance(encoder, CLIPEncoder):
            continue
        config: Any = encoder.config
        is_text = isinstance(config, CLIPTextConfig)
        if is_text == (part == "text"):
            blocks = list(encoder.layers)
            for block in blocks:
                if not isinstance(block.self_attn, (CLIPAttention, TransformersAttention)):
                    raise UserError(
                        f"attention of the type {type(block.self_attn).__name__} cannot be converted"
                    )
            _check_implementation(config)
            return TowerPlace(
                part=part,
                container=encoder,
                blocks=blocks,
                attribute="self_attn",
                train_tokens=config.max_position_embeddings if is_text else _image_tokens(config),
                causal=is_text,
                wrap=TransformersAttention,
                call=_call,
            )
    raise no_such_tower(model, part)


def _image_tokens(config: Any) -> int:
    tokens: int = (config.image_size // config.patch_size) ** 2 + 1
    return tokens


def _check_implementation(config: Any) -> None:
    implementation = config._attn_implementation
    if implementation not in IMPLEMENTATIONS:
        raise UserError(
            f"the model has the attention implementation {implementation!r}, whose masks are not those of "
            f'{" and ".join(IMPLEMENTATIONS)}: call model.set_attn_implementation("sdpa") first'
        )


def _call(module: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = type(module).forward(module, hidden_states=x)[0]  # without the user's hooks
    return output
