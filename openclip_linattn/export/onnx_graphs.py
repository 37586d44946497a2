"""Programs as ONNX files, and what such a file computes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from openclip_linattn.errors import UserError
from openclip_linattn.export.programs import DESCRIPTION, Features
from openclip_linattn.export.towers import Tower, first_line

LARGEST_FILE = 1536 * 2**20
"""Bytes of weights above which PyTorch itself puts them beside the ONNX file, which can hold 2**31 in all."""


def check_installed() -> None:
    """Raise UserError unless PyTorch's exporter to ONNX finds its packages."""
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"--format onnx needs {' and '.join(missing)}: pip install 'openclip-linattn[export]'"
        )


def write_onnx(program: ExportedProgram, tower: Tower, path: Path, description: str) -> None:
    """Write the program as an ONNX file with the tower's input name, the output `features`, and the description.

    Weights that one file cannot hold are in another beside it, with `.data` added to its name.
    Raises UserError where an operation has no form in ONNX.
    """
    try:
        with _quiet_optimizer():
            exported: Any = torch.onnx.export(
                program,
                input_names=[tower.input_name],
                output_names=["features"],
                dynamic_shapes=({0: "batch"},),  # names the axis
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # an operation without translation, wrapped in the exporter's own classes
        reason = first_line(error.__cause__ or error)
        raise UserError(
            f"the {tower.part} tower has no form in ONNX ({reason}); use --format torch"
        ) from error
    exported.model.metadata_props[DESCRIPTION] = description
    size = sum(x.numel() * x.element_size() for x in program.state_dict.values())
    exported.save(path, external_data=size >= LARGEST_FILE)


@contextmanager
def _quiet_optimizer() -> Iterator[None]:
    """The optimizer warns of every operation that it leaves as it is."""
    logger = logging.getLogger("onnxscript")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def read_onnx(path: Path) -> Features:
    """The function in an ONNX file, computed by onnxruntime, or by the slow evaluator of onnx where that is absent."""
    if find_spec("onnxruntime"):
        import onnxruntime

        session: Any = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
    else:
        import onnx
        from onnx.reference import ReferenceEvaluator

        model = onnx.load(path)
        session, name = ReferenceEvaluator(model), model.graph.input[0].name

    def features(batch: Tensor) -> Tensor:
        (result,) = session.run(None, {name: batch.numpy()})
        return torch.from_numpy(np.array(result))

    return features
