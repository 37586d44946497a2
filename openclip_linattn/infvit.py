"""InfViT as image classifiers in timm's registry: `timm.create_model("infvit4_16_lininfsa", num_classes=1000)`.

They are there once open_clip is imported beside this package, or after `openclip_linattn.register()`.

The architecture of arXiv 2603.00175: a ViT of 4 layers with width 1024, MLP 4096, 64 heads of 16 and patches of 16
pixels, here with any attention of this package. It is timm's own VisionTransformer, a ViT-L/16 cut to 4 layers with
four times the heads, so all of timm's options work (img_size, dynamic_img_size, drop_path_rate, features_only, ...).

Parameters with 1,000 classes: 52,402,152, and 64 per layer where the kind has a factor per head. The paper gives 53.5
M for the linear form and 57.7 M for the pure and the softmax form. One more matrix of 1024 x 1024 with its bias makes
53.45 M and five make 57.65 M, so the published numbers fit one such matrix outside the blocks (a hidden layer before
the head, say) and, in the pure and the softmax form, one more in each block (a fifth projection beside those of q, k,
v and the output). That is arithmetic, not a description of the authors' model; these models have none of those
matrices.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs
from timm.models.vision_transformer import VisionTransformer

from openclip_linattn.errors import UserError
from openclip_linattn.ops import OPERATORS

SIZES = {"patch_size": 16, "embed_dim": 1024, "depth": 4, "num_heads": 64}
TRAIN_TOKENS = 197
"""Tokens at 224 px, for the length scale of normalised linear attention at every size."""


class InfViT(VisionTransformer):  # type: ignore[misc]  # timm's types are not followed
    """timm's VisionTransformer with the attention of one kind, which its state dict records; `options` are timm's.

    Raises UserError for dropout of attention weights (attn_drop_rate).
    """

    def __init__(self, *, attention: str, **options: Any) -> None:
        # Here, because these modules may be what imports open_clip, after which this one is imported to register.
        from openclip_linattn.conversion.convert import convert_places
        from openclip_linattn.conversion.places import find_place

        super().__init__(**{**SIZES, **options})
        place = replace(find_place(self, "image"), train_tokens=TRAIN_TOKENS)
        convert_places([place], attention, blocks=None, rescale=False)


def entrypoints() -> list[Callable[..., InfViT]]:
    """timm's entry point of every kind, to be registered."""
    return [_entrypoint(f"infvit4_16_{kind}", kind) for kind in OPERATORS]


def _entrypoint(name: str, kind: str) -> Callable[..., InfViT]:
    def create(pretrained: bool = False, **options: Any) -> InfViT:
        if pretrained:
            raise UserError(
                f"{name} has no released weights; use timm's checkpoint_path for weights of your own"
            )
        feature_cfg = {"out_indices": options.pop("out_indices", 3), "feature_cls": "getter"}
        model: InfViT = build_model_with_cfg(
            partial(InfViT, attention=kind), name, pretrained, feature_cfg=feature_cfg, **options
        )
        return model

    create.__name__ = create.__qualname__ = name
    create.__module__ = __name__
    create.__doc__ = f"InfViT of 4 layers, patch 16, with {kind} attention."
    return create


default_cfgs = generate_default_cfgs(
    {
        f"infvit4_16_{kind}": {
            "num_classes": 1000,
            "input_size": (3, 224, 224),
            "fixed_input_size": True,
            "pool_size": None,
            "crop_pct": 0.9,
            "interpolation": "bicubic",
            "mean": IMAGENET_DEFAULT_MEAN,
            "std": IMAGENET_DEFAULT_STD,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        }
        for kind in OPERATORS
    }
)
"""What timm knows of a model beside its code; `timm.models.register_model` looks for this name."""
