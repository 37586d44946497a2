"""Layers of every kind on random numbers, tiny checkpoints with random weights, and a small set of drawn shapes."""

from collections.abc import Callable
from pathlib import Path

import open_clip
import pytest
import torch

import openclip_linattn
from openclip_linattn.analysis.layers import Layer
from openclip_linattn.data.drawn.shapes import write_shapes
from openclip_linattn.ops.reference import REFERENCES

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 23, 8
FACTORS = {"infsa": "rho", "lininfsa": "rho", "neumannlinear": "gamma"}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def random_layer(kind: str, seed: int = 0, tokens: int = TOKENS) -> Layer:
    """A float64 layer with the options that a registered model's layer has."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, BATCH, HEADS, tokens, WIDTH, generator=draw, dtype=torch.float64)
    options = {"length_scale": "train", "train_tokens": 17} if kind == "normlinear" else {}
    if kind in FACTORS:
        options = {FACTORS[kind]: torch.tensor([0.9, 0.7, 0.95], dtype=torch.float64)}
    return Layer(0, kind, q, k, v, options)


def dense_weights(layer: Layer) -> torch.Tensor:
    """The N x N weights of a layer, from the explicit formula with the identity for values."""
    identity = torch.eye(layer.tokens, dtype=layer.q.dtype).expand(*layer.q.shape[:2], -1, -1)
    return REFERENCES[layer.kind](layer.q, layer.k, identity, **layer.options)


@pytest.fixture
def layer_of() -> Callable[..., Layer]:
    return random_layer


@pytest.fixture
def dense() -> Callable[[Layer], torch.Tensor]:
    return dense_weights


def save_run(folder: Path, model: str, seed: int = 0) -> Path:
    """A run folder with one checkpoint of random weights."""
    openclip_linattn.register()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        state = open_clip.create_model(model).state_dict()
    run = folder / model
    (run / "checkpoints").mkdir(parents=True)
    torch.save({"epoch": 1, "name": model, "state_dict": state}, run / "checkpoints" / "epoch_1.pt")
    (run / "params.txt").write_text(f"model: {model}\n")
    return run


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of the smallest models by kind."""
    folder = tmp_path_factory.mktemp("logs")
    return {kind: save_run(folder, f"ViT-T32-8-{kind}") for kind in ("softmax", "neumannlinear")}


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 test images of 48 pixels in two shards, with boxes."""
    folder = tmp_path_factory.mktemp("data") / "shapes"
    write_shapes(folder, 1, test_samples=24, image_size=48, samples_per_shard=16)
    return folder
