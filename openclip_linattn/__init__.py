"""CLIP models with linear and infinite attention for OpenCLIP.

Importing this package is enough: the models are registered with OpenCLIP now if it is imported already, else at the
moment it gets imported. The import itself is light (neither torch nor open_clip), so that data tools start at once.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import openclip_linattn_autoload
from openclip_linattn.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from openclip_linattn.conversion.convert import convert_attention
    from openclip_linattn.image_tower import interpolate_positions
    from openclip_linattn.low_memory.inference import low_memory_inference

__all__ = [
    "UserError",
    "__version__",
    "add_model_configs",
    "convert_attention",
    "interpolate_positions",
    "low_memory_inference",
    "register",
]
__version__ = version("openclip-linattn")
_LAZY = {
    "convert_attention": "openclip_linattn.conversion.convert",
    "interpolate_positions": "openclip_linattn.image_tower",
    "low_memory_inference": "openclip_linattn.low_memory.inference",
}


def register() -> None:
    """Registers all models with OpenCLIP and timm; once is the same as twice."""
    from openclip_linattn.registration import register as register_models

    register_models()


def add_model_configs(path: "str | Path") -> list[str]:
    """Registers the model configs (*.json) of a folder of yours, or one file, and returns the models' names.

    Raises UserError, naming the file, the key and the allowed values, where a config is wrong; then none of the
    folder's models is registered.
    """
    from openclip_linattn.registration import add_model_configs as add

    return add(path)


def __getattr__(name: str) -> Any:
    """Imports what needs torch when it is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


openclip_linattn_autoload.register_when_imported(strict=True)
