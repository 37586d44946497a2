"""The tables and pictures on the page of the analysis are the committed measurements."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "results" / "analysis"

spec = importlib.util.spec_from_file_location("measure_analysis", ROOT / "scripts" / "measure_analysis.py")
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
TABLES: dict[str, str] = module.tables(RESULTS)


@pytest.fixture(scope="module")
def section() -> str:
    return (RESULTS / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("about", TABLES)
def test_tables(about: str, section: str) -> None:
    assert TABLES[about] in section


@pytest.mark.parametrize("name", ["maps.png", "smoothing.png"])
def test_pictures(name: str, section: str) -> None:
    assert f"]({name})" in section
    assert (RESULTS / name).stat().st_size < 400_000


def test_controls_stand_beside_every_model() -> None:
    lines = TABLES["faithfulness"].splitlines()[2:]
    models = {line.split(" | ")[0] for line in lines}
    for model in models:
        maps = [line.split(" | ")[1] for line in lines if line.split(" | ")[0] == model]
        assert maps[-2:] == ["random", "centre"]
        assert len(maps) > 2
