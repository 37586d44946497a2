"""The tables on the page of the evaluation are those of the committed measurements."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "results" / "evaluation"
PAGE = (RESULTS / "README.md").read_text(encoding="utf-8")

spec = importlib.util.spec_from_file_location(
    "evaluation_tables", ROOT / "scripts" / "evaluation" / "tables.py"
)
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
TABLES: dict[str, str] = module.tables(RESULTS)


@pytest.mark.parametrize("about", TABLES)
def test_tables(about: str) -> None:
    assert TABLES[about] in PAGE
