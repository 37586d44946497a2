"""Operators of other packages join where they are installed; stand-ins with the packages' own signatures."""

import sys

import pytest
import torch

from openclip_linattn.bench.checks import check_short
from openclip_linattn.bench.contestants import contestants
from openclip_linattn.bench.inputs import Shape

LUCIDRAINS = """
def linear_attn(q, k, v, kv_mask=None):
    q, k = q.softmax(dim=-1) * q.shape[-1] ** -0.5, k.softmax(dim=-2)
    return q @ (k.transpose(-1, -2) @ v)
"""
FLA = """
import torch

def chunk_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True):
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k).tril() * scale
    o = torch.einsum("bhnm,bmhd->bnhd", scores, v)
    return (o / scores.sum(-1).transpose(1, 2)[..., None] if normalize else o), None
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    modules = {
        "linear_attention_transformer/linear_attention_transformer.py": LUCIDRAINS,
        "fla/ops/linear_attn.py": FLA,
    }
    for name, code in modules.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("linear_attention_transformer", "fla")
    ]:
        del sys.modules[name]


def peers(device_type):
    return [entrant for entrant in contestants(["linear"], "packed", device_type) if entrant.role == "peer"]


def test_installed_peers_agree_with_their_formulas(packages):
    assert [peer.name for peer in peers("cpu")] == ["lucidrains"]
    found = peers("cuda")
    assert [peer.name for peer in found] == ["lucidrains", "fla-causal"]
    for peer in found:
        findings = check_short(peer, Shape(2, 2, 8, torch.float32, torch.device("cpu")), (1, 19))
        assert all(finding.passed for finding in findings), findings


def test_a_peer_that_cannot_be_imported_is_left_out(packages, tmp_path):
    (tmp_path / "fla/ops/linear_attn.py").write_text("import a_module_that_is_nowhere")
    assert [peer.name for peer in peers("cuda")] == ["lucidrains"]
