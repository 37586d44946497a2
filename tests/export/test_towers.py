"""Every tower of every kind as a program of torch.export and as an ONNX graph."""

import functools
import sys

import pytest
import torch

from openclip_linattn.export.onnx_graphs import read_onnx, write_onnx
from openclip_linattn.export.programs import export_program
from openclip_linattn.export.towers import find_tower, largest_difference
from openclip_linattn.ops import OPERATORS

CAUSAL = [kind for kind in OPERATORS if kind not in ("softmax", "lininfsa")]
CASES = [(f"ViT-T32-8-{kind}", "image") for kind in OPERATORS]
CASES += [("ViT-T32-8-softmax", "text"), *((f"ViT-T32-8-{kind}-text", "text") for kind in CAUSAL)]
QUADRATIC = ("softmax", "infsa")


@pytest.fixture(scope="module")
def program():
    return functools.cache(export_program_of)


def export_program_of(loaded, name, part):
    tower = find_tower(loaded(name), part)
    return tower, export_program(tower)


def nodes(program):
    """Every operation of the program and of the parts that it calls."""
    for module in program.graph_module.modules():
        yield from getattr(module, "graph", torch.fx.Graph()).nodes


@pytest.mark.parametrize(("name", "part"), CASES)
def test_a_program_gives_the_features_of_the_model_at_batch_1_and_3(name, part, loaded, program):
    tower, exported = program(loaded, name, part)
    assert [len(batch) for batch in tower.batches] == [1, 3]
    assert largest_difference(tower, exported.module()) <= 1e-5
    assert not any("openclip_linattn" in str(node.target) for node in nodes(exported))


@pytest.mark.parametrize(("name", "part"), CASES)
def test_an_onnx_graph_gives_the_features_of_the_model_at_batch_1_and_3(
    name, part, loaded, program, tmp_path
):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    tower, exported = program(loaded, name, part)
    path = tmp_path / "tower.onnx"
    write_onnx(exported, tower, path)
    assert largest_difference(tower, read_onnx(path)) <= 1e-5
    graph = onnx.load(path)
    assert {entry.domain for entry in graph.opset_import} == {""}
    assert [x.name for x in graph.graph.input] == [{"image": "images", "text": "tokens"}[part]]
    assert [x.name for x in graph.graph.output] == ["features"]


def test_without_onnxruntime_a_graph_is_computed_by_onnx_itself(loaded, program, tmp_path, monkeypatch):
    pytest.importorskip("onnx")
    tower, exported = program(loaded, "ViT-T32-8-normlinear", "image")
    write_onnx(exported, tower, tmp_path / "tower.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr("openclip_linattn.export.onnx_graphs.find_spec", lambda _: None)
    assert largest_difference(tower, read_onnx(tmp_path / "tower.onnx")) <= 1e-5


@pytest.mark.parametrize("kind", OPERATORS)
def test_only_quadratic_kinds_have_a_matrix_of_tokens_by_tokens(kind, loaded, program):
    _, exported = program(loaded, f"ViT-T32-8-{kind}", "image")
    made = [node.meta.get("val") for node in nodes(exported)]
    square = [x for x in made if isinstance(x, torch.Tensor) and list(x.shape).count(37) > 1]
    fused = any("scaled_dot_product" in str(node.target) for node in nodes(exported))
    assert (bool(square) or fused) == (kind in QUADRATIC)


def test_features_have_length_one(loaded, program):
    tower, exported = program(loaded, "ViT-T32-8-normlinear", "image")
    lengths = exported.module()(3 * tower.batches[-1]).norm(dim=-1)
    torch.testing.assert_close(lengths, torch.ones(3))


def test_a_program_of_texts_has_no_weights_of_the_image_tower(loaded, program):
    _, exported = program(loaded, "ViT-T32-8-normlinear-text", "text")
    assert exported.state_dict
    assert not any("visual" in name for name in exported.state_dict)
