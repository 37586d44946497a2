"""The attention module inside OpenCLIP's towers: masks, precision, checkpointing, compiling, decay, training."""

import copy
import math

import open_clip
import pytest
import torch
from open_clip.transformer import Transformer

from openclip_linattn.attention import OperatorAttention
from openclip_linattn.errors import UserError
from openclip_linattn.ops import OPERATORS
from openclip_linattn.towers import swap_attention

KINDS = tuple(OPERATORS)
TEXT_KINDS = tuple(kind for kind in KINDS if kind not in ("softmax", "lininfsa"))
NAMES = [f"ViT-T32-8-{kind}" for kind in KINDS] + [f"ViT-T32-8-{kind}-text" for kind in TEXT_KINDS]


def batch(pairs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of noise images and texts of different words."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(pairs, 3, 48, 48, generator=generator)
    tokenizer = open_clip.get_tokenizer("ViT-T32-8-softmax")
    return images, tokenizer([f"number {i} of {seed}" for i in range(pairs)])


def loss_of(model: torch.nn.Module, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    out = model(images, texts)
    return open_clip.ClipLoss()(out["image_features"], out["text_features"], out["logit_scale"])


def create(name: str, seed: int = 0, **options: object) -> torch.nn.Module:
    torch.manual_seed(seed)
    return open_clip.create_model(name, output_dict=True, **options)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name):
    model = create(name)
    loss_of(model, *batch(4)).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        if key != "token_embedding.weight":
            assert torch.isfinite(parameter.grad).all(), key
    for key, parameter in model.named_parameters():
        if "rho" in key or "gamma" in key:
            assert parameter.grad.abs().min() > 0, key


@pytest.mark.parametrize("kind", KINDS)
def test_the_operator_sees_the_heads_of_the_packed_projection(kind):
    module = OperatorAttention(32, 2, kind=kind, train_tokens=37)
    x = torch.randn(3, 37, 32)
    q, k, v = (x @ module.in_proj_weight.T + module.in_proj_bias).chunk(3, -1)
    heads = [part.view(3, 37, 2, 16).transpose(1, 2) for part in (q, k, v)]
    factors = {name: torch.full((2,), 0.95) for name in module.factors}
    o = OPERATORS[kind](*heads, **factors).transpose(1, 2).reshape(3, 37, 32)
    expected = o @ module.out_proj.weight.T + module.out_proj.bias
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [10, 37, 145])
def test_normlinear_is_the_literal_form_at_its_training_length_and_bounded_elsewhere(tokens):
    module = OperatorAttention(32, 2, kind="normlinear", train_tokens=37)
    q, k, v = torch.randn(3, 1, 2, tokens, 16).unbind(0)
    literal = OPERATORS["normlinear"](q, k, v)
    torch.testing.assert_close(module.operator(q, k, v, **module.options), literal * 37 / tokens)
    ones = torch.ones(1, 2, tokens, 16)  # every score is 1, so the weights sum to c N = 37 at every length
    torch.testing.assert_close(module.operator(ones, ones, ones, **module.options), 37 * ones)
    mean = OperatorAttention(32, 2, kind="normlinearmean", train_tokens=37)
    assert mean.options == {}
    torch.testing.assert_close(mean.operator(ones, ones, ones), 2 * ones)


def test_both_calling_conventions_of_openclip():
    module = OperatorAttention(32, 2, kind="linear", train_tokens=37)
    x = torch.randn(2, 5, 32)
    assert torch.equal(module(x), module(x, x, x, need_weights=False, attn_mask=None)[0])
    assert torch.equal(module(x), module(x, k_x=None, v_x=None, attn_mask=None))


@pytest.mark.parametrize("kind", [*TEXT_KINDS, "softmax"])
def test_the_causal_mask_hides_the_future(kind):
    module = OperatorAttention(32, 2, kind=kind, train_tokens=37)
    mask = torch.full((9, 9), -math.inf).triu(1)
    x = torch.randn(2, 9, 32)
    changed = x.clone()
    changed[:, 6:] = torch.randn(2, 3, 32)
    torch.testing.assert_close(module(x, attn_mask=mask)[:, :6], module(changed, attn_mask=mask)[:, :6])
    assert not torch.allclose(module(x)[:, :6], module(changed)[:, :6])


@pytest.mark.parametrize("kind", KINDS)
def test_other_masks_and_cross_attention_are_refused(kind):
    module = OperatorAttention(32, 2, kind=kind, train_tokens=37)
    x = torch.randn(2, 5, 32)
    for mask in (torch.zeros(5, 5), torch.zeros(2, 5, 5), torch.ones(5, 5).tril().bool(), torch.zeros(5, 4)):
        with pytest.raises(UserError, match="mask"):
            module(x, attn_mask=mask)
    with pytest.raises(UserError, match="self-attention"):
        module(x, torch.randn(2, 5, 32), x)
    if kind != "lininfsa":
        module(x, attn_mask=torch.full((5, 5), -math.inf).triu(1))  # one good mask does not let others pass
        for shape in ((2, 5, 5), (7, 7)):
            with pytest.raises(UserError, match="mask"):
                module(x, attn_mask=torch.full(shape, -math.inf).triu(1))


@pytest.mark.parametrize("kind", ["infsa", "neumannlinear"])
def test_factors_have_the_precision_of_a_float64_model(kind):
    module = OperatorAttention(32, 2, kind=kind, train_tokens=37).double()
    for name in module.factors:
        assert module.factor(name).dtype == torch.float64
        assert module.bfloat16().factor(name).dtype == torch.float32


def test_unknown_kind_and_foreign_blocks_are_refused():
    with pytest.raises(UserError, match=r"unknown attention kind 'flash'.*neumannlinear"):
        OperatorAttention(32, 2, kind="flash", train_tokens=37)
    with pytest.raises(TypeError, match="default attention blocks"):
        swap_attention(Transformer(32, 1, 2, block_type="custom"), "linear", train_tokens=37, part="image")


@pytest.mark.parametrize("name", NAMES)
def test_gradient_checkpointing_changes_nothing_and_runs_once_per_block(name, monkeypatch):
    plain, saved = create(name), create(name)
    saved.set_grad_checkpointing()
    calls = []
    checkpoint = open_clip.transformer.checkpoint
    monkeypatch.setattr(
        open_clip.transformer, "checkpoint", lambda *a, **k: calls.append(1) or checkpoint(*a, **k)
    )
    losses = [loss_of(model, *batch(4)) for model in (plain, saved)]
    assert len(calls) == len(saved.visual.transformer.resblocks) + len(saved.transformer.resblocks)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=0, atol=1e-6)
    for (key, a), b in zip(plain.named_parameters(), saved.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.parametrize("precision", ["amp", "amp_bf16", "bf16", "pure_bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_lower_precisions_stay_near_fp32(name, precision):
    from open_clip_train.precision import get_autocast

    images, texts = batch(4)
    exact = create(name)(images, texts)
    model = create(name, precision=precision)
    dtype = open_clip.get_input_dtype(precision)
    with get_autocast(precision, device_type="cpu")():
        out = model(images.to(dtype) if dtype else images, texts)
        loss = open_clip.ClipLoss()(out["image_features"], out["text_features"], out["logit_scale"])
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    for key in ("image_features", "text_features"):
        cosine = torch.nn.functional.cosine_similarity(out[key].float(), exact[key], dim=-1)
        assert cosine.min() > 0.99, (key, cosine)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ViT-T32-8-softmax", "ViT-T32-8-normlinear-text", "ViT-T32-8-neumannlinear"]
)
def test_compiling_changes_nothing(name):
    model = create(name)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    for pairs in (8, 5):
        out, expected = compiled(*batch(pairs)), model(*batch(pairs))
        for key in ("image_features", "text_features"):
            torch.testing.assert_close(out[key], expected[key], rtol=1e-3, atol=1e-4)
    assert compiled._orig_mod.state_dict().keys() == model.state_dict().keys()


def test_weight_decay_falls_on_the_same_tensors_for_every_kind():
    def decayed(name: str) -> set[str]:  # OpenCLIP's own rule
        return {
            key for key, p in create(name).named_parameters()
            if not (p.ndim < 2 or "bn" in key or "ln" in key or "bias" in key or "logit_scale" in key)
        }  # fmt: skip

    expected = decayed("ViT-T32-8-softmax")
    assert "visual.transformer.resblocks.0.attn.in_proj_weight" in expected
    for name in NAMES:
        assert decayed(name) == expected, name


@pytest.mark.parametrize("name", ["ViT-T32-8-softmax", "ViT-T32-8-normlinear", "ViT-T32-8-infsa-text"])
def test_accumulation_equals_the_whole_batch(name):
    """What --accum-freq computes: features cached without gradient, then one backward per part."""
    whole, parts = create(name), create(name)
    images, texts = batch(16)
    loss_of(whole, images, texts).backward()
    with torch.no_grad():
        cached = [parts(i, t) for i, t in zip(images.split(4), texts.split(4), strict=True)]
    for index, (i, t) in enumerate(zip(images.split(4), texts.split(4), strict=True)):
        out = parts(i, t)
        features = {
            key: torch.cat(
                [*(c[key] for c in cached[:index]), out[key], *(c[key] for c in cached[index + 1 :])]
            )
            for key in ("image_features", "text_features")
        }
        open_clip.ClipLoss()(**features, logit_scale=out["logit_scale"]).backward()
    for (key, a), b in zip(whole.named_parameters(), parts.named_parameters(), strict=True):
        if key != "logit_scale":  # its gradient is summed once per part, in stock OpenCLIP as well
            torch.testing.assert_close(a.grad, b[1].grad, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_64_pairs_are_learnt_by_heart(name):
    """The softmax recipe: AdamW with OpenCLIP's ViT defaults, one learning rate for all kinds."""
    model = create(name)
    images, texts = batch(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
    losses, norms = [], []
    while len(losses) < 300 and (not losses or losses[-1] >= 0.1):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (len(losses) + 1) / 20)
        optimizer.zero_grad()
        loss = loss_of(model, images, texts)
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > math.log(64)
    assert losses[-1] < 0.1, losses
    # The causal Neumann series multiplies the first tokens by up to 1 / (1 - gamma) = 20 per block, and OpenCLIP's
    # text tower starts without a norm: its gradient has spikes of about 100 x the median (the same in float64).
    largest = 1000 if name.endswith("neumannlinear-text") else 100
    assert max(norms) <= largest * torch.stack(norms).median()
