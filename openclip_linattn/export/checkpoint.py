"""Exports a checkpoint, and looks at every file once more as its reader will."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch.export import ExportedProgram

from openclip_linattn.conversion.sources import load_source
from openclip_linattn.errors import UserError
from openclip_linattn.export.description import describe
from openclip_linattn.export.folders import check_new, staged
from openclip_linattn.export.hub import hub_differences, save_tokenizer, write_hub_folder
from openclip_linattn.export.onnx_graphs import check_installed, read_onnx, write_onnx
from openclip_linattn.export.programs import (
    DESCRIPTION,
    Features,
    export_program,
    read_torch,
    write_torch,
)
from openclip_linattn.export.towers import TOWERS, Tower, find_tower, largest_difference
from openclip_linattn.files import write_text
from openclip_linattn.zeroshot.checkpoints import Checkpoint
from openclip_linattn.zeroshot.encoders.models import LoadedModel

LARGEST_DIFFERENCE = 1e-4
"""Features are of length one; those of an export may differ from the model's by so much."""
Progress = Callable[[str], None]


class _Format(NamedTuple):
    suffix: str
    write: Callable[[ExportedProgram, Tower, Path, str], None]
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
    source: str,
    form: str,
    output: Path,
    *,
    towers: Iterable[str] = TOWERS,
    model: str | None = None,
    progress: Progress = lambda _: None,
) -> Export:
    """Write the folder `output` with an exported checkpoint, once its features are seen to be those of the model.

    "onnx" and "torch" give one file per tower, image.onnx say, which takes any batch and gives features of length one
    without this package, and export.json, which says how images and texts are prepared and what the features are
    scaled by; every file carries the same text. Weights of an ONNX file above 1.6 GB are beside it, in image.onnx.data.
    A tokenizer of transformers leaves its files too. "hub" gives the folder that OpenCLIP's own push to the Hugging
    Face hub makes: see `write_hub_folder`.

    Args:
        source, model: see `load_source`.
        form: one of `FORMATS`.
        towers: of "image" and "text"; "hub" takes both.
        progress: is told what is being done.

    Raises UserError where the source cannot be found, loaded or exported, where the output exists, and where features
    differ by more than 1e-4. Then nothing is written.
    """
    towers = tuple(towers)
    _check(form, towers, output)
    progress("loading the model")
    checkpoint, loaded = load_source(source, model)
    found = [find_tower(loaded, part) for part in TOWERS if part in towers]
    with staged(output) as folder:
        if form == "hub":
            progress("writing the folder and loading it")
            notes = write_hub_folder(folder, checkpoint, loaded)
            _check_differences(differences := hub_differences(folder, loaded, found), form)
        else:
            notes = []
            differences = _write_towers(folder, checkpoint, loaded, found, form, progress)
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


def _write_towers(
    folder: Path,
    checkpoint: Checkpoint,
    loaded: LoadedModel,
    towers: list[Tower],
    form: str,
    progress: Progress,
) -> dict[str, float]:
    suffix, write, read = _FORMATS[form]
    texts = any(tower.part == "text" for tower in towers)
    tokenizer_files = save_tokenizer(loaded.tokenizer, folder) if texts else []
    described = describe(checkpoint, loaded, towers, suffix, tokenizer_files)
    description = json.dumps(described, indent=2, allow_nan=False) + "\n"
    write_text(folder / DESCRIPTION, description)
    differences = {}
    for tower in towers:
        progress(f"exporting the {tower.part} tower")
        path = folder / f"{tower.part}{suffix}"
        write(export_program(tower), tower, path, description)
        progress(f"comparing the {tower.part} tower with the model")
        differences[tower.part] = largest_difference(tower, read(path))
        _check_differences(differences, form)
    return differences


def _check_differences(differences: dict[str, float], form: str) -> None:
    for part, difference in differences.items():
        if not difference <= LARGEST_DIFFERENCE:  # NaN too
            raise UserError(
                f"the {part} features of the {form} export differ from the model's by {difference:.2g}, more than "
                f"{LARGEST_DIFFERENCE:g}; nothing was written"
            )
