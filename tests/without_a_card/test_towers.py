"""Models on a card: training steps, images of other sizes, little memory, other attention, weights of the CPU."""

import logging

import open_clip
import pytest
import torch
from pretended import OnCard

from openclip_linattn import convert_attention, interpolate_positions, low_memory_inference
from openclip_linattn.ops import OPERATORS

IN_BOTH_TOWERS = ("linear", "normlinear", "infsa", "neumannlinear")
MODELS = [f"ViT-T32-8-{kind}-text" for kind in IN_BOTH_TOWERS] + ["ViT-T32-8-softmax", "ViT-T32-8-lininfsa"]


@pytest.fixture(autouse=True)
def _quiet(caplog, monkeypatch):
    monkeypatch.setenv("OPENCLIP_LINATTN_KERNEL", "torch")  # Triton's interpreter takes long
    caplog.set_level(logging.ERROR)  # OpenCLIP says that random weights are random


def model_of(name, device, **options):
    model = open_clip.create_model(name, device=device, output_dict=True, **options)
    on_one_device(model)
    return model


def on_one_device(model):
    """What NCCL needs: DistributedDataParallel sends parameters and buffers to all processes."""
    elsewhere = [
        name for name, x in (*model.named_parameters(), *model.named_buffers()) if x.device.type != "cuda"
    ]
    assert not elsewhere


def inputs(device, height=48, width=48):
    texts = open_clip.get_tokenizer("ViT-T32-8-softmax")(["a red dog", "two cats"])
    return torch.randn(2, 3, height, width).to(device), texts.to(device)


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step(name, card):
    model = model_of(name, card).train()
    output = model(*inputs(card))
    loss = open_clip.ClipLoss()(output["image_features"], output["text_features"], output["logit_scale"])
    loss.backward()
    assert isinstance(loss, OnCard)
    assert all(parameter.grad.device == card for parameter in model.parameters())


@pytest.mark.parametrize("kind", OPERATORS)
def test_images_of_other_sizes_in_little_memory(kind, card):
    model = model_of(f"ViT-T32-8-{kind}", card, force_image_size=(40, 72)).eval()
    interpolate_positions(model)
    for size in ((40, 72), (56, 48)):
        images, _ = inputs(card, *size)
        with torch.no_grad():
            expected = model.encode_image(images)
        with low_memory_inference(model, tokens_per_chunk=40):
            got = model.encode_image(images)
        assert isinstance(got, OnCard)
        assert (got - expected).norm() <= 1e-5 * expected.norm()  # rounding alone, as on the CPU


@pytest.mark.parametrize("kind", ["normlinear", "lininfsa", "neumannlinear"])
def test_another_attention(kind, card):
    model = model_of("ViT-T32-8-softmax", card)
    towers = ("image",) if kind == "lininfsa" else ("image", "text")
    convert_attention(model, kind, towers=towers)
    on_one_device(model)
    model(*inputs(card))["image_features"].sum().backward()


@pytest.mark.parametrize("kind", ["normlinear", "neumannlinear"])
def test_weights_of_the_cpu(kind, card, recwarn):
    model = model_of(f"ViT-T32-8-{kind}", card)
    for other in (f"ViT-T32-8-{kind}", "ViT-T32-8-softmax"):
        weights = open_clip.create_model(other).state_dict()
        model.load_state_dict(weights)
        key = "visual.transformer.resblocks.0.attn.in_proj_weight"
        assert torch.equal(model.state_dict()[key].cpu(), weights[key])
        on_one_device(model)
    assert all("names no attention kind" in str(each.message) for each in recwarn)
