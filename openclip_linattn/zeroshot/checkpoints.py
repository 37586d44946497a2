"""Finds checkpoints and the model name and settings that they were trained with."""

import ast
import json
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openclip_linattn.epochs import numbered_epoch
from openclip_linattn.errors import UserError

RUN_FILE = "run.json"
PARAMS_FILE = "params.txt"
CHECKPOINT_FOLDER = "checkpoints"
CONVERTED_FROM = "converted_from"
"""Key of converted checkpoints; their key "name" is that of the model, where OpenCLIP's is that of the run."""

# Flags of OpenCLIP that change the model or its preprocessing, and the value that leaves both alone.
MODEL_SETTINGS: Mapping[str, object] = {
    "force_image_size": None,
    "force_quick_gelu": False,
    "force_custom_text": False,
    "force_context_length": None,
    "image_mean": None,
    "image_std": None,
    "image_interpolation": None,
    "image_resize_mode": None,
}


class CheckpointError(UserError):
    """A checkpoint that cannot be evaluated, while others may."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file, the model that it belongs to, and the settings that differ from the model's config.

    `path` is absolute with its folders resolved; `run` is the run's folder, None outside one. `trained_image_size`
    is that of training where the settings force another one. `recorded` are the models that the run's files name.
    """

    path: Path
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    run: Path | None = None
    trained_image_size: int | list[int] | None = None
    recorded: frozenset[str] = frozenset()

    @property
    def results_folder(self) -> Path | None:
        """Where rows of this checkpoint are kept: its own folder, when that is a run's checkpoints folder."""
        inside = self.run is not None and self.path.parent == self.run / CHECKPOINT_FOLDER
        return self.path.parent if inside else None


def find_checkpoints(sources: Sequence[str | Path], model: str | None = None) -> list[Checkpoint]:
    """Return the checkpoints that `sources` name, each once, in order, with their models.

    A source is a checkpoint file, a run folder or its checkpoints folder; of a folder every epoch_N.pt is
    taken in order of N (epoch_latest.pt only when it is named itself). The model is `model`, else that of
    the run's run.json, else that of its params.txt, else the one that `convert` wrote into the file, whose
    config beside the file is registered. Raises UserError for a source without checkpoints, for a checkpoint
    whose model is nowhere written, and for `model` beside checkpoints of runs of another one (see
    `check_one_model`).
    """
    paths = dict.fromkeys(path for source in sources for path in _files(Path(source)))
    if not paths:
        raise UserError(
            "no checkpoint was named; give a checkpoint file, a run folder or its checkpoints folder"
        )
    found = [_describe(path, model) for path in paths]
    check_one_model(found, model)
    return found


def check_one_model(found: Sequence[Checkpoint], model: str | None) -> None:
    """Raises UserError where `model` was meant for some of the checkpoints, and others record another one.

    Stock weights would load as another kind of attention, and stand in a table beside the right ones. Where all
    record another model, it is taken for a wish.
    """
    if model is None:
        return
    others = [each for each in found if each.recorded and model.replace("/", "-") not in each.recorded]
    if others and len(others) < len(found):
        raise UserError(
            f"--model {model} is for all checkpoints, and {others[0].run} records "
            f"{' and '.join(sorted(others[0].recorded))}: look at them in two commands"
        )


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source.parent.resolve() / source.name]
    if not source.is_dir():
        raise UserError(
            f"{source} does not exist; give a checkpoint file, a run folder or its checkpoints folder"
        )
    folder = source / CHECKPOINT_FOLDER if (source / CHECKPOINT_FOLDER).is_dir() else source
    folder = folder.resolve()
    epochs = {
        path: epoch
        for path in folder.glob("epoch_*.pt")
        if (epoch := numbered_epoch(path)) is not None and path.is_file()
    }
    if not epochs:
        latest = folder / "epoch_latest.pt"
        hint = f"; name {latest} itself to evaluate it" if latest.is_file() else ""
        raise UserError(f"{folder} holds no epoch_N.pt{hint}")
    return sorted(epochs, key=lambda path: (epochs[path], path.name))


def _describe(path: Path, model: str | None) -> Checkpoint:
    converted = None if path.name.startswith("epoch_") else converted_model(path)
    # A converted file may lie in the folder of the run that it comes from.
    run = _run_folder(path) if converted is None else None
    recorded = _read_run_json(run / RUN_FILE) if run else {}
    params = read_params(run / PARAMS_FILE) if run else {}
    name = model or _agreed_model(recorded, params, path) or converted
    if name is None:
        raise UserError(
            f"{path}: no {RUN_FILE} or {PARAMS_FILE} beside it names its model; give --model NAME"
        )
    if run is None:
        _register_own_config(path, name)
    settings = {}
    for key, neutral in MODEL_SETTINGS.items():
        value = recorded.get(key, params.get(key, neutral))
        if value != neutral:
            settings[key] = value
    names = {str(source["model"]).replace("/", "-") for source in (recorded, params) if source.get("model")}
    return Checkpoint(path, name, settings, run, recorded=frozenset(names))


def _run_folder(path: Path) -> Path | None:
    above = [path.parent.parent] if path.parent.name == CHECKPOINT_FOLDER else []
    for folder in [*above, path.parent]:
        if (folder / RUN_FILE).is_file() or (folder / PARAMS_FILE).is_file():
            return folder
    return None


def converted_model(path: Path) -> str | None:
    """The model that `openclip-linattn convert` wrote into a checkpoint file; None for any other file."""
    import torch  # slow to import, and seldom needed here

    if not zipfile.is_zipfile(path):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of TorchScript archives
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # no checkpoint, or one with more than weights: whoever loads it says so
        return None
    if not isinstance(content, Mapping) or CONVERTED_FROM not in content:
        return None
    return str(content.get("name")) if content.get("name") else None


def _register_own_config(path: Path, model: str) -> None:
    """`convert` leaves a config beside its file where no registered model has the shape."""
    config = path.with_name(f"{model.replace('/', '-')}.json")
    if not config.is_file():
        return
    import open_clip  # slow to import, and seldom needed here

    from openclip_linattn.registration import add_model_configs

    if config.stem not in open_clip.list_models():
        add_model_configs(config)


def _agreed_model(recorded: Mapping[str, Any], params: Mapping[str, Any], path: Path) -> str | None:
    names = [str(source["model"]) for source in (recorded, params) if source.get("model")]
    if not names:
        return None
    if len(set(names)) > 1:
        raise UserError(
            f"{path}: {RUN_FILE} says model {names[0]!r} and {PARAMS_FILE} says {names[1]!r}; "
            "say which with --model NAME"
        )
    return names[0]


def _read_run_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}); mend it or move it away") from error
    if not isinstance(recorded, dict):
        raise UserError(f"{path} must hold a JSON object; mend it or move it away")
    return recorded


def read_params(path: Path) -> dict[str, Any]:
    """Return what OpenCLIP's params.txt ("key: value" lines) says; {} where there is none.

    Values are Python literals where they look like one (None, False, 224, [224, 224]), else text.
    """
    if not path.is_file():
        return {}
    params: dict[str, Any] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        key, separator, value = line.partition(":")
        if separator:
            params[key.strip()] = _literal(value.strip())
    return params


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
