"""Lets every process that imports torch find our models, an unmodified OpenCLIP included.

PyTorch calls `autoload` at `import torch` (entry-point group `torch.backends`). It only leaves a note to register
the models once open_clip has been imported: it imports nothing heavy, costs milliseconds and never raises. It
stands outside the package because an entry point inside it would import the package at every `import torch`.

Off switches: OPENCLIP_LINATTN_AUTOLOAD=0 (this function), TORCH_DEVICE_BACKEND_AUTOLOAD=0 (PyTorch's own, all of them).
"""

import os
import sys
import warnings
from types import ModuleType

# The last submodule that open_clip/__init__.py imports: when it is there, the package's functions are bound. The
# package's own name would be too early, because torch may first be imported in the middle of `import open_clip`.
LAST_SUBMODULE = "open_clip.zero_shot_metadata"
# The modules of registration that import open_clip themselves, so that any of them may be what imports it first.
OUR_USERS = (
    "openclip_linattn.attention",
    "openclip_linattn.image_tower",
    "openclip_linattn.towers",
    "openclip_linattn.registration",
)


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

    def register(module: ModuleType) -> None:
        if any(_in_the_middle(name) for name in OUR_USERS if name != module.__name__):
            return  # one of ours is what imports open_clip: its own hook follows when it is complete
        try:
            from openclip_linattn.registration import register

            register()
        except Exception as error:
            if strict:
                raise
            _warn(error)

    # What is in the middle of its import counts as imported for wrapt, and ours were then prepared by the package.
    for name in (LAST_SUBMODULE, *(user for user in OUR_USERS if user not in sys.modules)):
        wrapt.register_post_import_hook(register, name)


def _in_the_middle(name: str) -> bool:
    """Whether the import of a module has begun and not ended."""
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def _warn(error: Exception) -> None:
    warnings.warn(f"the models of openclip_linattn could not be registered: {error}", stacklevel=2)
