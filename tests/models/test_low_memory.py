"""Low-memory inference gives the features of the plain forward pass, in the memory of one residual stream."""

import copy
from collections.abc import Iterator

import open_clip
import pytest
import torch
from open_clip.transformer import VisionTransformer
from torch import nn

from openclip_linattn import convert_attention
from openclip_linattn.bench.memory import with_peak
from openclip_linattn.errors import UserError
from openclip_linattn.image_tower import interpolate_positions
from openclip_linattn.low_memory.inference import low_memory_inference
from openclip_linattn.ops import OPERATORS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Every thread of a kernel takes memory of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(kind: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return open_clip.create_model(f"ViT-T32-8-{kind}", **options).eval()


def images_of(batch: int, height: int = 48, width: int = 48) -> torch.Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


def plain_features(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.encode_image(images)


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert got.dtype == expected.dtype
    assert ((got.double() - expected.double()).norm() / expected.double().norm()).item() < tolerance


@pytest.mark.parametrize("tokens_per_chunk", [1, 21, 8192])
@pytest.mark.parametrize("kind", OPERATORS)
def test_features_are_those_of_the_plain_pass(kind, tokens_per_chunk):
    model = model_of(kind, force_image_size=(40, 72))
    images = images_of(3, 40, 72)
    expected = plain_features(model, images)
    with low_memory_inference(model, tokens_per_chunk=tokens_per_chunk):
        got = model.encode_image(images)
    assert not got.requires_grad
    assert_near(got, expected)


def test_the_model_stays_as_it_was():
    model = model_of("neumannlinear")
    images = images_of(2)
    keys, expected = list(model.state_dict()), plain_features(model, images)
    with low_memory_inference(model):
        assert list(model.state_dict()) == keys
        texts = model.encode_text(open_clip.get_tokenizer("ViT-T32-8-softmax")(["a", "b"]))
        assert texts.requires_grad
    assert torch.equal(plain_features(model, images), expected)
    model.encode_image(images).sum().backward()
    assert model.visual.conv1.weight.grad is not None


def test_hooks_are_called_on_the_tower_once_and_not_on_blocks():
    model, images, calls = model_of("normlinear"), images_of(1), []
    tower = model.visual
    for module in (tower, tower.transformer.resblocks[0], tower.transformer.resblocks[0].mlp):
        module.register_forward_hook(lambda module, *_: calls.append(type(module).__name__))
    with low_memory_inference(model, tokens_per_chunk=10):
        model.encode_image(images)
    assert calls == 4 * ["Sequential"] + ["ImageTower"]  # 37 tokens


def test_an_error_in_the_forward_pass_leaves_nothing_behind():
    model, images = model_of("softmax"), images_of(1)
    expected = plain_features(model, images)
    handle = model.visual.transformer.resblocks[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), low_memory_inference(model):
        model.encode_image(images)
    handle.remove()
    assert "forward" not in vars(model.visual)
    assert torch.equal(plain_features(model, images), expected)


def test_it_ends_with_the_block_and_with_an_error_and_nests():
    model = model_of("linear")
    images = images_of(1)
    with pytest.raises(ZeroDivisionError), low_memory_inference(model):
        1 / 0  # noqa: B018
    assert model.encode_image(images).requires_grad
    with low_memory_inference(model):
        with low_memory_inference(model.visual, tokens_per_chunk=3):
            assert not model.encode_image(images).requires_grad
        assert not model.encode_image(images).requires_grad
    assert model.encode_image(images).requires_grad


@pytest.mark.filterwarnings("ignore:.*Profiler")
@pytest.mark.parametrize(
    "kind", ["normlinear", "lininfsa", "neumannlinear", "linear", "linearelu", "normlinearmean"]
)
def test_the_peak_is_one_residual_stream_and_chunks(kind):
    torch.manual_seed(0)
    visual = open_clip.create_model(f"ViT-T32-8-{kind}", force_image_size=768).visual.eval()
    images = images_of(1, 768, 768)
    stream = (96**2 + 1) * 32 * 4

    def run() -> torch.Tensor:
        with torch.no_grad():
            return visual(images)

    assert with_peak(run, CPU)[1] > 5 * stream
    with low_memory_inference(visual, tokens_per_chunk=512):
        assert with_peak(run, CPU)[1] < 1.7 * stream


@pytest.mark.filterwarnings("ignore:.*Profiler")
@pytest.mark.parametrize(("kind", "streams"), [("softmax", 4), ("infsa", 8.5)])
def test_quadratic_kinds_hold_keys_and_values_too_but_no_weights(kind, streams):
    visual = model_of(kind, force_image_size=384).visual
    images = images_of(1, 384, 384)
    stream = (48**2 + 1) * 32 * 4
    # The weights of all heads are 72 streams or more. Softmax takes 3.3: the stream, keys and values. infsa takes
    # 7.8: the stream, queries, keys, values and output, and blocks of weights, which are large beside a narrow tower.
    with low_memory_inference(visual, tokens_per_chunk=64):
        assert with_peak(lambda: visual(images), CPU)[1] < streams * stream


@pytest.mark.parametrize("kind", ["softmax", "normlinear", "lininfsa", "neumannlinear"])
def test_lower_precisions_stay_near_the_plain_pass(kind):
    model, images = model_of(kind), images_of(2)
    exact, half = plain_features(model, images), copy.deepcopy(model).bfloat16()
    with low_memory_inference(model, tokens_per_chunk=16), torch.autocast("cpu", dtype=torch.bfloat16):
        got = model.encode_image(images)
    with low_memory_inference(half, tokens_per_chunk=16):
        again = half.encode_image(images.bfloat16())
    assert got.dtype == again.dtype == torch.bfloat16
    assert_near(got.float(), exact, 1e-2)
    assert_near(again.float(), exact, 1e-2)


def test_positions_are_interpolated_a_band_at_a_time():
    model, images = model_of("normlinear"), images_of(2, 64, 120)
    interpolate_positions(model)
    expected = plain_features(model, images)
    with low_memory_inference(model, tokens_per_chunk=20):
        assert_near(model.encode_image(images), expected)


@pytest.mark.slow
def test_a_compiled_model_runs_uncompiled_inside_and_compiled_again_after():
    model, images = model_of("normlinear"), images_of(2)
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model.visual, backend=backend, fullgraph=True)
    with torch.no_grad():
        expected = compiled(images)
    assert len(graphs) == 1
    calls = []
    handle = model.visual.transformer.register_forward_hook(lambda *_: calls.append(1))
    with low_memory_inference(compiled):
        assert_near(compiled(images), expected)
    assert calls == []
    assert len(graphs) == 1
    handle.remove()
    with torch.no_grad():
        assert_near(compiled(images), expected)


def test_a_converted_stock_tower_works_and_says_which_size_it_takes():
    sizes = {"image_size": 16, "patch_size": 8, "width": 32, "layers": 2, "heads": 2, "mlp_ratio": 4.0}
    torch.manual_seed(0)
    tower = convert_attention(VisionTransformer(**sizes, ls_init_value=0.5, no_ln_pre=True), "neumannlinear")
    images = images_of(2, 16, 16)
    expected = tower(images)
    with low_memory_inference(tower, tokens_per_chunk=4):
        assert_near(tower(images), expected)
        with pytest.raises(UserError, match=r"16 x 24 pixels .* 16 x 16: .* --force-image-size 16 24$"):
            tower(images_of(2, 16, 24))


@pytest.mark.parametrize("count", [0, -1, 2.5])
def test_a_chunk_is_a_whole_number_of_tokens(count):
    with (
        pytest.raises(UserError, match=f"tokens_per_chunk .* got {count}"),
        low_memory_inference(nn.Linear(2, 2), tokens_per_chunk=count),
    ):
        pass


class OtherTower(VisionTransformer):
    def _embeds(self, x: torch.Tensor) -> torch.Tensor:
        return super()._embeds(x) + 1


def with_bias_k() -> VisionTransformer:
    tower = VisionTransformer(**STOCK)
    tower.transformer.resblocks[0].attn = nn.MultiheadAttention(32, 2, batch_first=True, add_bias_kv=True)
    return tower


STOCK = {"image_size": 16, "patch_size": 8, "width": 32, "layers": 1, "heads": 2, "mlp_ratio": 4.0}


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: nn.Linear(2, 2), "Linear has no image tower"),
        (lambda: VisionTransformer(**STOCK, qk_norm=True), "CustomResidualAttentionBlock"),
        (lambda: OtherTower(**STOCK), "OtherTower"),
        (with_bias_k, "attention of the type MultiheadAttention"),
    ],
)
def test_what_it_does_not_know_is_refused(build, reason):
    model = build()
    with pytest.raises(UserError, match=reason), low_memory_inference(model):
        pass
    assert "forward" not in vars(model)


def test_patch_dropout_in_training_is_refused():
    model = model_of("linear", force_patch_dropout=0.5)
    with low_memory_inference(model):
        model.encode_image(images_of(1))
        model.train()
        with pytest.raises(UserError, match=r"model\.eval"):
            model.encode_image(images_of(1))
