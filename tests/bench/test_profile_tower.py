"""The profile of a tower at its smoke size."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "profile_tower.py"


def run(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *args])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def allocated(text):
    """The last numbers of the rows of the second table, in units of T."""
    rows = [line.split("│") for line in text.split("One attention module")[1].splitlines() if "│" in line]
    return {row[1].strip(): float(row[3]) for row in rows}


@pytest.mark.filterwarnings("ignore:.*Profiler")
def test_the_operator_adds_no_full_size_copy(monkeypatch, capsys):
    run(monkeypatch, "ViT-T96-8-normlinear", "--image-size", "96", "--batch", "64")
    out = capsys.readouterr().out
    assert "matrix products" in out
    sizes = allocated(out)
    assert not {"aten::cat", "aten::stack", "aten::clone", "aten::contiguous"} & sizes.keys()
    # The packed projection and the output (4 T), the gradients of their inputs (2 T), the operator's own output and
    # gradient buffer (4 T). Blocks in scratch memory make up the rest.
    assert 10 <= sum(sizes.values()) <= 12


def test_an_unknown_model_is_named(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "ViT-B-16-nothing")
    assert ended.value.code == 2
    assert "unknown model 'ViT-B-16-nothing'" in capsys.readouterr().err
