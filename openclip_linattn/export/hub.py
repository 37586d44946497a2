"""A model as the folder that OpenCLIP pushes to the Hugging Face hub, and loads from there or from a disk."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
from open_clip.constants import HF_SAFE_WEIGHTS_NAME
from open_clip.push_to_hf_hub import generate_readme, save_for_hf

from openclip_linattn.configs import ModelConfig, builtin_folder
from openclip_linattn.errors import UserError
from openclip_linattn.export.programs import first_line
from openclip_linattn.export.towers import TOWERS, find_tower, largest_difference
from openclip_linattn.registration import models
from openclip_linattn.zeroshot.checkpoints import Checkpoint
from openclip_linattn.zeroshot.encoders.models import LoadedModel

USAGE = """{needs}```python
import open_clip
{imports}
model, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER")
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")
```

FOLDER is this folder; once it is pushed to the hub, "hf-hub:USER/NAME" stands for it.
"""


def write_hub_folder(folder: Path, checkpoint: Checkpoint, loaded: LoadedModel) -> list[str]:
    """Write config, weights, tokenizer files where OpenCLIP takes those from transformers, and a README.

    The config is the registered one with the settings of the run. A model that does not come with this package or
    with OpenCLIP has its own config file beside it, to be registered where the folder is loaded. Returns what there
    is to know about that.
    """
    ours = models().get(checkpoint.model)
    own = ours if ours is not None and ours.path.parent != builtin_folder() else None
    save_for_hf(
        loaded.clip,
        loaded.tokenizer if hasattr(loaded.tokenizer, "save_pretrained") else _OpenClipTokenizer(),
        _model_config(checkpoint),
        str(folder),
        safe_serialization=True,
    )
    card: dict[str, Any] = {"license": "unknown", "usage": _usage(ours, own)}
    readme = folder / "README.md"
    readme.write_text(generate_readme(card, checkpoint.model), encoding="utf-8")
    # The writer of safetensors lets nobody else read them.
    (folder / HF_SAFE_WEIGHTS_NAME).chmod(readme.stat().st_mode & 0o777)
    if own is None:
        return []
    shutil.copyfile(own.path, folder / own.path.name)
    return [
        f"{own.name} does not come with openclip_linattn: where the folder is loaded, call "
        f'openclip_linattn.add_model_configs("FOLDER/{own.path.name}") first'
    ]


def hub_differences(folder: Path, loaded: LoadedModel) -> dict[str, float]:
    """The largest difference of each tower's features once the folder is loaded; see `largest_difference`.

    Raises UserError where OpenCLIP does not load it, or would prepare images otherwise.
    """
    try:
        again = open_clip.create_model(f"local-dir:{folder}").eval()
    except Exception as error:  # OpenCLIP raises many kinds
        raise UserError(f"OpenCLIP does not load what was to be written: {first_line(error)}") from error
    # As JSON, where a tuple is a list.
    if json.dumps(again.visual.preprocess_cfg) != json.dumps(loaded.clip.visual.preprocess_cfg):
        raise UserError("the images would be prepared otherwise than in training; nothing was written")
    encoders = {"image": again.encode_image, "text": again.encode_text}
    return {
        part: largest_difference(find_tower(loaded, part), partial(encoders[part], normalize=True))
        for part in TOWERS
    }


class _OpenClipTokenizer:
    """Stands for OpenCLIP's own tokenizer, which needs no files in the folder."""

    def save_pretrained(self, _folder: Path) -> None:
        """Writes nothing."""


def _model_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """OpenCLIP's config of the model with the settings of the run that change the model."""
    settings = checkpoint.settings
    config: dict[str, Any] = open_clip.get_model_config(checkpoint.model.replace("/", "-"))
    if "force_image_size" in settings:
        config["vision_cfg"]["image_size"] = settings["force_image_size"]
    if "force_context_length" in settings:
        config["text_cfg"]["context_length"] = settings["force_context_length"]
    if settings.get("force_custom_text"):
        config["custom_text"] = True
    if settings.get("force_quick_gelu"):
        config["quick_gelu"] = True
    return config


def _usage(ours: ModelConfig | None, own: ModelConfig | None) -> str:
    if ours is None:
        return USAGE.format(needs="", imports="")
    imports = "import openclip_linattn\n"
    if own is not None:
        imports += f'\nopenclip_linattn.add_model_configs("FOLDER/{own.path.name}")'
    return USAGE.format(needs="The attention comes from the package openclip_linattn.\n\n", imports=imports)
