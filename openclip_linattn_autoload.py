"""Lets every process that imports torch find our models, an unmodified OpenCLIP included.

PyTorch calls `autoload` at `import torch` (entry-point group `torch.backends`). It only leaves a note to register
the models once open_clip has been imported: it imports nothing heavy, costs milliseconds and never raises. It
stands outside the package because an entry point inside it would import the package at every `import torch`.

Off switches: OPENCLIP_LINATTN_AUTOLOAD=0 (this function), TORCH_DEVICE_BACKEND_AUTOLOAD=0 (PyTorch's own, all of them).
"""

import os
import warnings
from types import ModuleType

# The last submodule that open_clip/__init__.py imports: when it is there, the package's functions are bound. The
# package's own name would be too early, because torch may first be imported in the middle of `import open_clip`.
LAST_SUBMODULE = "open_clip.zero_shot_metadata"


def autoload() -> None:
    """Arranges registration for when open_clip gets imported, unless it is switched off; never raises."""
    if os.environ.get("OPENCLIP_LINATTN_AUTOLOAD", "1").strip() == "0":
        return
    try:
        register_when_imported(strict=False)
    except Exception as error:
        _warn(error)


def register_when_imported(*, strict: bool) -> None:
    """Registers the models as soon as open_clip is imported (now, if it is); a fault raises if strict, else warns."""
    import wrapt

    def register(_: ModuleType) -> None:
        try:
            from openclip_linattn.registration import register

            register()
        except Exception as error:
            if strict:
                raise
            _warn(error)

    wrapt.register_post_import_hook(register, LAST_SUBMODULE)


def _warn(error: Exception) -> None:
    warnings.warn(f"the models of openclip_linattn could not be registered: {error}", stacklevel=2)
