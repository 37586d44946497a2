"""The 4-layer InfViT: in timm's registry as a classifier, with the published parameter counts explained."""

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import openclip_linattn
from openclip_linattn.errors import UserError
from openclip_linattn.ops import OPERATORS

openclip_linattn.register()
SMALL = {"img_size": 32, "embed_dim": 64, "num_heads": 4, "num_classes": 10}
MATRIX = 1024**2


def create(kind: str, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(f"infvit4_16_{kind}", **{**SMALL, **options})


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", OPERATORS)
def test_the_full_size_is_a_vit_large_of_four_layers(kind):
    with torch.device("meta"):
        model = timm.create_model(f"infvit4_16_{kind}", num_classes=1000)
        large = timm.create_model("vit_large_patch16_224", num_classes=1000, depth=4)
    assert count(large) == 52_402_152
    factors = 4 * 64 if kind in ("infsa", "lininfsa", "neumannlinear") else 0
    assert count(model) == count(large) + factors
    attention = model.blocks[0].attn
    assert (attention.kind, attention.num_heads, attention.train_tokens) == (kind, 64, 197)


@pytest.mark.parametrize(("published", "matrices"), [(53.5e6, 1), (57.7e6, 5)])
def test_the_published_counts_are_one_and_five_matrices_more(published, matrices):
    """Each with its bias; neither fewer nor more matrices round to the published number."""
    fitting = [n for n in range(10) if abs(52_402_152 + n * (MATRIX + 1024) - published) <= 0.05e6]
    assert fitting == [matrices]


@pytest.mark.parametrize("kind", OPERATORS)
def test_it_is_a_timm_model_that_learns(kind):
    model = create(kind)
    assert isinstance(model, VisionTransformer)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8)
    features = model.forward_features(images)
    assert features.shape == (8, 5, 64)
    assert model.forward_head(features, pre_logits=True).shape == (8, 64)
    torch.testing.assert_close(model.forward_head(features), model(images))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(12):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_heads_inputs_and_features_change_as_timm_users_expect():
    model = create("lininfsa")
    model.reset_classifier(3)
    assert model.get_classifier().out_features == 3
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 3)
    model.reset_classifier(0, "avg")
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 64)
    model.set_grad_checkpointing()
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    any_size = create("normlinear", dynamic_img_size=True, drop_path_rate=0.1)
    assert any_size(torch.randn(2, 3, 48, 64)).shape == (2, 10)
    maps = create("linear", features_only=True, out_indices=(1, 3))(torch.randn(2, 3, 32, 32))
    assert [tuple(each.shape) for each in maps] == [(2, 64, 2, 2)] * 2
    config = timm.data.resolve_model_data_config(
        timm.create_model("infvit4_16_infsa", embed_dim=64, num_heads=4)
    )
    assert config["input_size"] == (3, 224, 224)


@pytest.mark.parametrize("kind", ["softmax", "normlinear", "lininfsa"])
def test_a_seed_gives_timm_s_own_weights(kind):
    torch.manual_seed(0)
    stock = timm.create_model("vit_large_patch16_224", depth=4, **SMALL)
    ours = create(kind)
    weights = ours.state_dict()
    for key, value in stock.state_dict().items():
        assert torch.equal(weights[key], value), key
    extra = {key.rsplit(".", 1)[-1] for key in weights.keys() - stock.state_dict().keys()}
    assert (
        extra
        == {"softmax": set(), "normlinear": {"attention_kind"}, "lininfsa": {"attention_kind", "rho_logit"}}[
            kind
        ]
    )
    images = torch.randn(2, 3, 32, 32)
    same = torch.allclose(ours.eval()(images), stock.eval()(images), rtol=1e-4, atol=1e-5)
    assert same == (kind == "softmax")


def test_weights_know_their_attention(tmp_path):
    path = tmp_path / "linear.pth"
    torch.save(create("linear").state_dict(), path)
    images = torch.randn(1, 3, 32, 32)
    again = create("linear", checkpoint_path=str(path))
    torch.testing.assert_close(again(images), create("linear")(images))
    with pytest.raises(UserError, match="trained with linear attention and this model's has lininfsa"):
        create("lininfsa", checkpoint_path=str(path))
    with pytest.warns(UserWarning, match="taken for stock softmax weights and starts a lininfsa model"):
        create("lininfsa").load_state_dict(create("softmax").state_dict())


def test_what_it_has_not_is_refused():
    with pytest.raises(UserError, match="no released weights"):
        create("lininfsa", pretrained=True)
    with pytest.raises(UserError, match="dropout"):
        create("lininfsa", attn_drop_rate=0.1)
