"""Exports a checkpoint, and looks at every file once more as its reader will."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch.export import ExportedProgram

from openclip_linattn.conversion.sources import load_source
from openclip_linattn.errors import UserError
from openclip_linattn.export.folders import check_new, staged
from openclip_linattn.export.hub import hub_differences, write_hub_folder
from openclip_linattn.export.onnx_graphs import check_installed, read_onnx, write_onnx
from openclip_linattn.export.programs import Features, export_program, read_torch, write_torch
from openclip_linattn.export.towers import TOWERS, Tower, find_tower, largest_difference
from openclip_linattn.files import write_json
from openclip_linattn.zeroshot.checkpoints import Checkpoint
from openclip_linattn.zeroshot.encoders.models import LoadedModel

LARGEST_DIFFERENCE = 1e-4
"""Features are of length one; those of an export may differ from the model's by so much."""


class _Format(NamedTuple):
    suffix: str
    write: Callable[[ExportedProgram, Tower, Path], None]
    read: Callable[[Path], Features]


_FORMATS = {
    "onnx": _Format(".onnx", write_onnx, read_onnx),
    "torch": _Format(".pt2", write_torch, read_torch),
}
FORMATS = (*_FORMATS, "hub")


@dataclass(frozen=True)
class Export:
    """What became of a checkpoint: the files with their bytes, and how far features differ from the model's."""

    checkpoint: Path
    model: str
    format: str
    output: Path
    files: dict[str, int]
    differences: dict[str, float]
    notes: list[str] = field(default_factory=list)


def export_checkpoint(
    source: str, form: str, output: Path, *, towers: Iterable[str] = TOWERS, model: str | None = None
) -> Export:
    """Write the folder `output` with an exported checkpoint, once its features are seen to be those of the model.

    "onnx" and "torch" give one file per tower, image.onnx say, which takes any batch and gives features of length one
    without this package, and export.json, which says how images are prepared and what the features are scaled by.
    "hub" gives the folder that OpenCLIP's own push to the Hugging Face hub makes: see `write_hub_folder`.

    Args:
        source, model: see `load_source`.
        form: one of `FORMATS`.
        towers: of "image" and "text"; "hub" takes both.

    Raises UserError where the source cannot be found, loaded or exported, where the output exists, and where features
    differ by more than 1e-4. Then nothing is written.
    """
    towers = tuple(towers)
    _check(form, towers, output)
    checkpoint, loaded = load_source(source, model)
    with staged(output) as folder:
        if form == "hub":
            notes = write_hub_folder(folder, checkpoint, loaded)
            differences = hub_differences(folder, loaded)
        else:
            notes = []
            differences = {part: _write_tower(folder, loaded, part, _FORMATS[form]) for part in towers}
            write_json(folder / "export.json", _description(checkpoint, loaded, form, towers))
        _check_differences(differences, form)
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    return Export(checkpoint.path, checkpoint.model, form, output, files, differences, notes)


def _check(form: str, towers: tuple[str, ...], output: Path) -> None:
    if form not in FORMATS:
        raise UserError(f"unknown format {form!r}; give one of {', '.join(FORMATS)}")
    if not towers or not set(towers) <= set(TOWERS):
        raise UserError(f"the towers are {' and '.join(TOWERS)}, got {', '.join(towers) or 'none'}")
    if form == "hub" and set(towers) != set(TOWERS):
        raise UserError("--format hub writes the whole model; leave --tower out")
    if form == "onnx":
        check_installed()
    check_new(output)


def _write_tower(folder: Path, loaded: LoadedModel, part: str, form: _Format) -> float:
    tower = find_tower(loaded, part)
    path = folder / f"{part}{form.suffix}"
    form.write(export_program(tower), tower, path)
    return largest_difference(tower, form.read(path))


def _check_differences(differences: dict[str, float], form: str) -> None:
    for part, difference in differences.items():
        if not difference <= LARGEST_DIFFERENCE:  # NaN too
            raise UserError(
                f"the {part} features of the {form} export differ from the model's by {difference:.2g}, more than "
                f"{LARGEST_DIFFERENCE:g}; nothing was written"
            )


def _description(
    checkpoint: Checkpoint, loaded: LoadedModel, form: str, towers: tuple[str, ...]
) -> dict[str, Any]:
    """What a program needs to know that has the files and nothing else."""
    clip = loaded.clip
    height, width = _sides(clip.visual.image_size)
    inputs = {
        "image": {"input": "images", "shape": ["batch", 3, height, width], "dtype": "float32"},
        "text": {"input": "tokens", "shape": ["batch", clip.context_length], "dtype": "int64"},
    }
    bias = getattr(clip, "logit_bias", None)
    return {
        "model": checkpoint.model,
        "checkpoint": str(checkpoint.path),
        "normalized": True,
        "towers": {part: {"file": f"{part}{_FORMATS[form].suffix}", **inputs[part]} for part in towers},
        "preprocess": clip.visual.preprocess_cfg,
        "logit_scale": clip.logit_scale.exp().flatten().tolist(),
        "logit_bias": None if bias is None else bias.flatten().tolist(),
    }


def _sides(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
