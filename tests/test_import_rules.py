"""Imports run downwards only, and light modules stay light; the checker itself is shown to fail."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "open_clip", "open_clip_train", "timm"}
OPENCLIP = {"open_clip", "open_clip_train", "timm"}
# Folder or file -> top-level packages that it must not import anywhere in its code.
RULES = {
    "scaling/openclip_scaling": HEAVY | {"openclip_linattn"},
    "openclip_linattn_autoload.py": HEAVY,
    "openclip_linattn/ops": OPENCLIP | {"openclip_scaling", "transformers", "webdataset"},
    "openclip_linattn/data": HEAVY,
    "openclip_linattn/configs.py": OPENCLIP,
    "openclip_linattn/manifest.py": HEAVY,
    "openclip_linattn/files.py": HEAVY,
    "openclip_linattn/epochs.py": OPENCLIP,
    "openclip_linattn/training_data.py": HEAVY,
    "openclip_linattn/cli": OPENCLIP,
    "openclip_linattn/ladder": OPENCLIP,
    "openclip_linattn/quickstart.py": OPENCLIP,
}


def imported(source: str) -> set[str]:
    """Top-level packages that a piece of source imports, at any depth of the code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def violations(place: Path, forbidden: set[str]) -> list[str]:
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    assert files, f"{place} has no Python file"
    return [
        f"{file.name}: {name}" for file in files for name in sorted(imported(file.read_text()) & forbidden)
    ]


@pytest.mark.parametrize("place", RULES)
def test_no_import_runs_upwards(place):
    assert violations(ROOT / place, RULES[place]) == []


def test_the_checker_can_fail(tmp_path):
    (tmp_path / "bad.py").write_text(
        "def f():\n    from torch.nn import Linear\n    import os, timm.models\n"
    )
    assert violations(tmp_path, HEAVY) == ["bad.py: timm", "bad.py: torch"]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("openclip_linattn", HEAVY),
        ("openclip_linattn.cli", HEAVY),
        ("openclip_linattn.data.drawn.shapes", HEAVY),
        ("openclip_scaling.cli", HEAVY | {"openclip_linattn"}),
        ("torch", {"openclip_linattn", "open_clip", "timm"}),
    ],
)
def test_import_stays_light(module, absent):
    code = f"import sys, {module}; print(sorted({absent!r} & sys.modules.keys()))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "[]"
