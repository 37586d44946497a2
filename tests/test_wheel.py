"""The wheel holds everything, and a model is created from it with the checkout out of reach."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_wheel_is_complete_and_works_elsewhere(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    names = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    for name in (
        "openclip_linattn_autoload.py", "openclip_linattn/py.typed", "openclip_scaling/py.typed",
        "openclip_linattn/model_configs/ViT-S-16-normlinear.json",
    ):  # fmt: skip
        assert name in names
    assert not [name for name in names if name.startswith(("tests", "scripts", "model_configs"))]
    code = (
        "import openclip_linattn, open_clip, openclip_scaling, openclip_linattn_autoload, pathlib\n"
        f"site = pathlib.Path({str(site)!r})\n"
        "for module in (openclip_linattn, openclip_scaling, openclip_linattn_autoload):\n"
        "    assert site in pathlib.Path(module.__file__).parents, module.__file__\n"
        "from openclip_linattn.configs import builtin_folder\n"
        "assert site in builtin_folder().parents\n"
        "print(sum(p.numel() for p in open_clip.create_model('ViT-T32-8-normlinear').parameters()))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 1_000_000
