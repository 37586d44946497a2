"""What the tests of conversions share."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def script() -> ModuleType:
    """scripts/measure_distillation.py as a module."""
    path = Path(__file__).parents[2] / "scripts" / "measure_distillation.py"
    spec = importlib.util.spec_from_file_location("measure_distillation", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["measure_distillation"] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module
