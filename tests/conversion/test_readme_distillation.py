"""The README's table of distillation is that of the committed results."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "results" / "distill" / "distillation.json"


def section() -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return readme.split("<!-- distillation -->")[1].split("<!-- end of distillation -->")[0]


def test_the_table(script):
    assert script.table(RESULTS) in section()


def test_what_was_measured():
    content = json.loads(RESULTS.read_text(encoding="utf-8"))
    recipe, images = content["recipe"], content["images"]
    text = " ".join(section().split())
    assert f"the quickstart's {content['teacher']} taught" in text
    assert f"{recipe['samples']:,} samples of one pass each at batch {recipe['batch_size']}" in text
    assert f"{images['color x shape']:,} held-out shapes and {images['digit']:,} digits" in text
