"""Every tower of every kind as a program of torch.export and as an ONNX graph."""

import copy
import functools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from openclip_linattn.export.onnx_graphs import read_onnx, write_onnx
from openclip_linattn.export.programs import export_program
from openclip_linattn.export.towers import find_tower, largest_difference
from openclip_linattn.ops import OPERATORS
from openclip_linattn.ops.sums import CHUNK

CAUSAL = [kind for kind in OPERATORS if kind not in ("softmax", "lininfsa")]
CASES = [(f"ViT-T32-8-{kind}", "image") for kind in OPERATORS]
CASES += [("ViT-T32-8-softmax", "text"), *((f"ViT-T32-8-{kind}-text", "text") for kind in CAUSAL)]
QUADRATIC = ("softmax", "infsa")
ROOT = str(Path(__file__).parents[2]).encode()


@pytest.fixture(scope="module")
def program(loaded):
    """The tower of a name and a part with its first block alone, and its program; each made once."""

    @functools.cache
    def exported(name, part, **settings):
        whole = loaded(name, **settings)
        short = replace(whole, clip=copy.deepcopy(whole.clip))
        transformer = (short.clip.visual if part == "image" else short.clip).transformer
        transformer.resblocks = transformer.resblocks[:1]
        tower = find_tower(short, part)
        return tower, export_program(tower)

    return exported


@pytest.fixture(scope="module")
def graph(program, tmp_path_factory):
    """The same tower and its ONNX file; each made once."""
    pytest.importorskip("onnx")

    @functools.cache
    def written(name, part):
        tower, exported = program(name, part)
        path = tmp_path_factory.mktemp("graph") / "tower.onnx"
        write_onnx(exported, tower, path, "{}")
        return tower, path

    return written


def nodes(program):
    """Every operation of the program and of the parts that it calls."""
    for module in program.graph_module.modules():
        yield from getattr(module, "graph", torch.fx.Graph()).nodes


@pytest.mark.parametrize(("name", "part"), CASES)
def test_a_program_gives_the_features_of_the_model_at_batch_1_and_3(name, part, program):
    tower, exported = program(name, part)
    assert [len(batch) for batch in tower.batches] == [1, 3]
    assert largest_difference(tower, exported.module()) <= 1e-5
    assert not any("openclip_linattn" in str(node.target) for node in nodes(exported))


@pytest.mark.parametrize("kind", ["neumannlinear", "infsa"])
def test_a_program_of_texts_longer_than_a_chunk_gives_the_features_of_the_model(kind, program):
    """There the causal operators go through the states that one chunk hands to the next."""
    tower, exported = program(f"ViT-T32-8-{kind}-text", "text", force_context_length=CHUNK + 2)
    assert largest_difference(tower, exported.module()) <= 1e-5


@pytest.mark.parametrize(("name", "part"), CASES)
def test_an_onnx_graph_gives_the_features_of_the_model_at_batch_1_and_3(name, part, graph):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    tower, path = graph(name, part)
    assert largest_difference(tower, read_onnx(path)) <= 1e-5
    model = onnx.load(path)
    assert {entry.domain for entry in model.opset_import} == {""}
    (given,), (features,) = model.graph.input, model.graph.output
    assert (given.name, features.name) == ({"image": "images", "text": "tokens"}[part], "features")
    assert [x.type.tensor_type.shape.dim[0].dim_param for x in (given, features)] == ["batch", "batch"]
    assert ROOT not in path.read_bytes()


def test_without_onnxruntime_a_graph_is_computed_by_onnx_itself(graph, monkeypatch):
    tower, path = graph("ViT-T32-8-normlinear", "image")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr("openclip_linattn.export.onnx_graphs.find_spec", lambda _: None)
    assert largest_difference(tower, read_onnx(path)) <= 1e-5


@pytest.mark.parametrize("kind", OPERATORS)
def test_only_quadratic_kinds_have_a_matrix_of_tokens_by_tokens(kind, program):
    _, exported = program(f"ViT-T32-8-{kind}", "image")
    made = [node.meta.get("val") for node in nodes(exported)]
    square = [x for x in made if isinstance(x, torch.Tensor) and list(x.shape).count(37) > 1]
    fused = any("scaled_dot_product" in str(node.target) for node in nodes(exported))
    assert (bool(square) or fused) == (kind in QUADRATIC)


def test_features_have_length_one(program):
    tower, exported = program("ViT-T32-8-normlinear", "image")
    lengths = exported.module()(3 * tower.batches[-1]).norm(dim=-1)
    torch.testing.assert_close(lengths, torch.ones(3))


def test_a_program_of_texts_has_no_weights_of_the_image_tower(program):
    _, exported = program("ViT-T32-8-normlinear-text", "text")
    assert exported.state_dict
    assert not any("visual" in name for name in exported.state_dict)
