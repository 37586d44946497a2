"""What is read from a tower's layers is what they compute with."""

import open_clip
import pytest
import torch
from open_clip.transformer import VisionTransformer
from torch import nn

import openclip_linattn
from openclip_linattn.analysis.layers import attention_kind, read_layers
from openclip_linattn.errors import UserError
from openclip_linattn.ops import OPERATORS

STOCK = {
    "image_size": 32,
    "patch_size": 16,
    "width": 32,
    "layers": 2,
    "heads": 4,
    "mlp_ratio": 4.0,
    "output_dim": 8,
}


def tower(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "stock":
        return VisionTransformer(**STOCK).eval()
    openclip_linattn.register()
    return open_clip.create_model(f"ViT-T32-8-{kind}").visual.eval()


@pytest.mark.parametrize("kind", [*OPERATORS, "stock"])
def test_every_layer_is_read_with_the_output_that_it_has(kind):
    visual = tower(kind)
    outputs = []
    for block in visual.transformer.resblocks:
        block.attn.register_forward_hook(
            lambda _module, _inputs, output: outputs.append(output if torch.is_tensor(output) else output[0])
        )
    layers = []
    images = torch.randn(2, 3, *visual.image_size)
    entering = read_layers(visual, images, layers.append)
    torch.testing.assert_close(entering, visual._embeds(images))
    assert [layer.number for layer in layers] == list(range(len(visual.transformer.resblocks)))
    for block, layer, output in zip(visual.transformer.resblocks, layers, outputs, strict=False):
        assert layer.kind == ("softmax" if kind == "stock" else kind)
        merged = layer.output().transpose(1, 2).flatten(2)
        torch.testing.assert_close(block.attn.out_proj(merged), output, rtol=1e-4, atol=1e-5)
        assert layer.double().q.dtype == layer.double().output().dtype == torch.float64
    assert attention_kind(visual) == layers[0].kind


def test_reading_leaves_no_hook_behind_even_where_it_fails():
    visual = tower("linear")

    def fail(_layer):
        raise RuntimeError("seen")

    with pytest.raises(RuntimeError, match="seen"):
        read_layers(visual, torch.randn(1, 3, 48, 48), fail)
    assert not any(module._forward_pre_hooks for module in visual.modules())


def test_attention_of_another_form_is_refused_in_words():
    with pytest.raises(UserError, match=r"the image tower is a ModifiedResNet"):
        attention_kind(open_clip.create_model("RN50").visual)
    scaled = VisionTransformer(**STOCK, block_type="custom", scaled_cosine_attn=True)
    with pytest.raises(UserError, match=r"block 0 has a Attention with options of its own"):
        attention_kind(scaled)
    assert attention_kind(VisionTransformer(**STOCK, block_type="custom")) == "softmax"
