"""Says in a sentence why a file does not load as a model's weights; OpenCLIP's own errors speak of its internals."""

import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

_OTHER_READERS = (".safetensors", ".npz", ".npy")
_COMPILED = "_orig_mod."


def why_unloadable(path: Path, error: BaseException) -> str:
    """The reason, from what the file holds where that tells more than the error that loading it ended with."""
    if path.suffix in _OTHER_READERS or not path.is_file():
        return first_lines(error)
    try:
        content = _read(path)
    except OSError:
        return first_lines(error)
    except Exception as reading:  # whatever a pickle of anything may raise
        return _no_checkpoint(path, reading)
    return _no_weights(content) or _other_weights(error)


def first_lines(error: BaseException, most: int = 3) -> str:
    """The first lines of an error's message, cut to a readable length; its type where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(line[:300] for line in lines[:most]) + (" ..." if len(lines) > most else "")


def _read(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TorchScript archives, which are told of below
        # Mapped where it can be: the names are looked at, not the numbers.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


def _no_checkpoint(path: Path, error: Exception) -> str:
    if "TorchScript" in str(error):
        return "it is a TorchScript archive, and OpenCLIP loads state dicts: save that of the model with torch.save"
    whole = zipfile.is_zipfile(path)
    if isinstance(error, UnpicklingError) and (whole or "Unsupported global" in str(error)):
        return (
            "it holds Python objects besides tensors, which OpenCLIP does not load: save the state dict alone"
        )
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            what = "no file of torch.save, or damaged" if whole else "cut off or damaged"
            return f"it is {what}; fetch or write it again"
    return "it is no file of torch.save (and a safetensors file must be named .safetensors)"


def _no_weights(content: Any) -> str | None:
    """What is wrong with the place or the names of the weights; None where they are where they should be."""
    if not isinstance(content, Mapping):
        return f"it holds a {type(content).__name__} and no state dict"
    weights = content.get("state_dict", content)
    if not _is_state_dict(weights):
        nested = [name for name, value in content.items() if _is_state_dict(value)]
        if not nested:
            return "it holds no weights"
        return (
            f"its weights are under {nested[0]!r}, and OpenCLIP looks for them under 'state_dict' or at the top: save "
            "them so"
        )
    if any(_COMPILED in str(name) for name in weights):
        return (
            f"the names of its weights contain {_COMPILED!r}, which torch.compile adds: save the state dict of the "
            "model before it is compiled, or take this out of the names"
        )
    return None


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(each, Tensor) for each in value.values())


def _other_weights(error: BaseException) -> str:
    """OpenCLIP resizes positions before it loads, and asserts that their width is the model's."""
    if isinstance(error, AssertionError):
        return f"its weights are those of a model of another size ({first_lines(error)})"
    return first_lines(error)
