"""Builds a generated set in a folder, and finishes, extends or refuses one that is already there.

`dataset.json` records the parameters before the first shard is written, and tars appear whole, so every tar
that stands in a folder belongs to the recorded set and is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclip_linattn.data.layout import Part, write_index, write_shard
from openclip_linattn.errors import UserError
from openclip_linattn.files import read_json, write_json, write_text

RECORD = "dataset.json"
MIN_IMAGE_SIZE, MAX_IMAGE_SIZE = 16, 1024
MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class Recipe:
    """A set to write: kind and parameters (for dataset.json), parts, and small text and JSON files."""

    kind: str
    version: int
    parameters: Mapping[str, Any]
    parts: Callable[[Path, Mapping[str, Any]], Sequence[Part]]
    texts: Mapping[str, str]
    label_sets: Mapping[str, Any]

    def record(self, complete: bool) -> dict[str, Any]:
        """Content of dataset.json."""
        return {
            "kind": self.kind,
            "version": self.version,
            "parameters": dict(self.parameters),
            "complete": complete,
        }


@dataclass(frozen=True)
class BuildResult:
    """What `build` did: shards written and shards found; the samples of the set; was it complete already?"""

    folder: Path
    written: int
    found: int
    samples: int
    already_complete: bool


def no_progress(done: int) -> None:
    """Ignore the number of samples done."""


def check_image_size(image_size: int) -> None:
    """Raise UserError for a side of the images that is out of range."""
    if not MIN_IMAGE_SIZE <= image_size <= MAX_IMAGE_SIZE:
        raise UserError(
            f"The image size must lie between {MIN_IMAGE_SIZE} and {MAX_IMAGE_SIZE} pixels, not {image_size}."
        )


def check_seed(seed: int) -> None:
    """Raise UserError for a seed that is not an unsigned 32-bit number."""
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"The seed must lie between 0 and {MAX_SEED}, not {seed}.")


def build(
    out: Path, recipe: Recipe, *, overwrite: bool = False, progress: Callable[[int], None] = no_progress
) -> BuildResult:
    """Write the set of `recipe` into `out`; what is already there of the same set is kept.

    A set with the same parameters and fewer samples is extended. `progress` is called with the number of
    samples done. Raises UserError where `out` holds anything else; `overwrite` replaces another set of the
    same kind, and never another file.
    """
    try:
        return _build(out, recipe, overwrite, progress)
    except OSError as error:
        raise UserError(f"{error.filename or out} cannot be written: {error.strerror or error}.") from error


def _build(out: Path, recipe: Recipe, overwrite: bool, progress: Callable[[int], None]) -> BuildResult:
    parts = recipe.parts(out, recipe.parameters)
    complete = _prepare(out, recipe, overwrite)
    missing = [
        (part, shard) for part in parts for shard in range(part.shards) if not part.tar(shard).exists()
    ]
    shards = sum(part.shards for part in parts)
    samples = sum(part.count for part in parts)
    if complete and not missing:
        return BuildResult(out, 0, shards, samples, already_complete=True)
    progress(samples - sum(part.size(shard) for part, shard in missing))
    for part in parts:
        part.folder.mkdir(parents=True, exist_ok=True)
    write_json(out / RECORD, recipe.record(complete=False))
    for part, shard in missing:
        write_shard(part, shard, progress)
    for part in parts:
        write_index(part)
    for name, text in recipe.texts.items():
        write_text(out / name, text)
    write_json(out / "label_sets.json", recipe.label_sets)
    write_json(out / RECORD, recipe.record(complete=True))
    return BuildResult(out, len(missing), shards - len(missing), samples, already_complete=False)


def _prepare(out: Path, recipe: Recipe, overwrite: bool) -> bool:
    """Make `out` ready for the missing shards; return whether its record says that the set is complete."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: give a folder.")
    if not out.exists() or not any(out.iterdir()):
        return False
    if not (out / RECORD).exists():
        raise UserError(
            f"{out} is not empty and has no {RECORD}, so it was not written by this command: "
            "give a new or empty folder."
        )
    record = read_json(out / RECORD)
    old = record.get("parameters") if isinstance(record, dict) else None
    if not isinstance(old, dict) or record.get("kind") != recipe.kind or not _same_names(old, recipe):
        raise UserError(f"{out / RECORD} does not describe a {recipe.kind} set: give another folder.")
    if record.get("version") == recipe.version and _extends(old, recipe.parameters):
        if old != recipe.parameters:
            _drop_short_shards(out, recipe, old)
        return bool(record.get("complete")) and old == recipe.parameters
    if not overwrite:
        raise UserError(f"{out} holds another {recipe.kind} set ({_difference(record, recipe)}): {_REMEDY}")
    _remove(recipe.parts(out, old))
    return False


_REMEDY = "give another folder, the same parameters, or --overwrite to replace it."


def _same_names(old: Mapping[str, Any], recipe: Recipe) -> bool:
    return set(old) == set(recipe.parameters) and all(isinstance(value, int) for value in old.values())


def _extends(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    grow = {name for name in new if name.endswith("samples")}
    return all(old[name] <= new[name] if name in grow else old[name] == new[name] for name in new)


def _difference(record: Mapping[str, Any], recipe: Recipe) -> str:
    old = record["parameters"]
    changed = [
        f"{name} {old[name]} there, {value} asked for"
        for name, value in recipe.parameters.items()
        if old[name] != value
    ]
    return "; ".join(changed) or f"made by version {record.get('version')}, this is version {recipe.version}"


def _drop_short_shards(out: Path, recipe: Recipe, old: Mapping[str, Any]) -> None:
    """Delete each last tar that gets more samples, before the record of the larger set is written."""
    for before, after in zip(recipe.parts(out, old), recipe.parts(out, recipe.parameters), strict=False):
        last = before.shards - 1
        if last >= 0 and before.size(last) != after.size(last):
            before.tar(last).unlink(missing_ok=True)


def _remove(parts: Sequence[Part]) -> None:
    for part in parts:
        for shard in range(part.shards):
            tar = part.tar(shard)
            tar.unlink(missing_ok=True)
            tar.with_name(f"{tar.stem}_stats.json").unlink(missing_ok=True)
        for name in ("nshards.txt", "sizes.json"):
            (part.folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            part.folder.rmdir()  # only where nothing else is in it
