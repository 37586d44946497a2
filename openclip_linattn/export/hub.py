"""A model as the folder that OpenCLIP pushes to the Hugging Face hub, and loads from there or from a disk."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
from open_clip.constants import HF_CONFIG_NAME, HF_SAFE_WEIGHTS_NAME
from open_clip.push_to_hf_hub import generate_readme, save_for_hf
from safetensors import SafetensorError

from openclip_linattn.configs import FOREIGN_TEXT, ModelConfig, builtin_folder
from openclip_linattn.conversion.branches import CAPTIONS
from openclip_linattn.errors import UserError
from openclip_linattn.export.towers import Tower, first_line, largest_difference
from openclip_linattn.infvit import entrypoints
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
    with OpenCLIP has its own config file beside it, to be registered where the folder is loaded; a text tower of
    transformers that was made from a folder has that one's config.json. Returns what there is to know about that.
    Raises UserError where the disk does not take the weights.
    """
    ours = models().get(checkpoint.model)
    own = ours if ours is not None and ours.path.parent != builtin_folder() else None
    config = _model_config(checkpoint)
    try:
        save_for_hf(loaded.clip, _Tokenizer(loaded.tokenizer), config, str(folder), safe_serialization=True)
    except (SafetensorError, RuntimeError, ValueError) as error:  # a full disk, or weights that share memory
        raise UserError(f"{HF_SAFE_WEIGHTS_NAME} cannot be written: {first_line(error)}") from error
    notes = []
    if own is not None:
        shutil.copyfile(own.path, folder / own.path.name)
        notes.append(
            f"{own.name} does not come with openclip_linattn: where the folder is loaded, call "
            f'openclip_linattn.add_model_configs("FOLDER/{own.path.name}") first'
        )
    moving = _save_local_text_config(folder, loaded.clip, config["text_cfg"])
    notes += moving
    card: dict[str, Any] = {"license": "unknown", "usage": _usage(_needs_package(config), own, moving)}
    readme = folder / "README.md"
    readme.write_text(generate_readme(card, checkpoint.model), encoding="utf-8")
    # The writer of safetensors lets nobody else read them.
    (folder / HF_SAFE_WEIGHTS_NAME).chmod(readme.stat().st_mode & 0o777)
    return notes


def hub_differences(folder: Path, loaded: LoadedModel, towers: list[Tower]) -> dict[str, float]:
    """The largest difference of each tower's features once the folder is loaded; see `largest_difference`.

    Raises UserError where OpenCLIP does not load it, or would prepare images or captions otherwise.
    """
    try:
        again = open_clip.create_model(f"local-dir:{folder}").eval()
        tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    except Exception as error:  # OpenCLIP raises many kinds
        raise UserError(f"OpenCLIP does not load what was to be written: {first_line(error)}") from error
    # As JSON, where a tuple is a list.
    if json.dumps(again.visual.preprocess_cfg) != json.dumps(loaded.clip.visual.preprocess_cfg):
        raise UserError("the images would be prepared otherwise than in training; nothing was written")
    captions = list(CAPTIONS)
    if not tokenizer(captions).equal(loaded.tokenizer(captions)):
        raise UserError("the captions would have other tokens than in training; nothing was written")
    encoders = {"image": again.encode_image, "text": again.encode_text}
    return {
        tower.part: largest_difference(tower, partial(encoders[tower.part], normalize=True))
        for tower in towers
    }


def save_tokenizer(tokenizer: Any, folder: Path) -> list[str]:
    """Write the files of a tokenizer of transformers, and return their names; OpenCLIP's own needs none."""
    if not hasattr(tokenizer, "save_pretrained"):
        return []
    before = set(folder.iterdir())
    tokenizer.save_pretrained(str(folder))
    return sorted(path.name for path in set(folder.iterdir()) - before)


class _Tokenizer:
    """Any tokenizer of OpenCLIP with the one method that its writer of folders calls."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def save_pretrained(self, folder: Path) -> None:
        """Writes what there is to write."""
        save_tokenizer(self.tokenizer, folder)


def _save_local_text_config(folder: Path, clip: Any, text: dict[str, Any]) -> list[str]:
    """Writes the config of a text tower that transformers made from a folder, which other machines do not have."""
    name = text.get(FOREIGN_TEXT)
    if name is None or not Path(name).is_dir():
        return []
    clip.text.config.save_pretrained(folder)
    return [
        f"{HF_CONFIG_NAME} names a folder of the machine of training for the text tower: elsewhere set {FOREIGN_TEXT} "
        'and hf_tokenizer_name in it to "FOLDER", or to "USER/NAME" before the folder is pushed'
    ]


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


def _needs_package(config: dict[str, Any]) -> bool:
    tower = config["vision_cfg"].get("timm_model_name")
    ours = {model.content["vision_cfg"]["timm_model_name"] for model in models().values()}
    return tower in ours | {entrypoint.__name__ for entrypoint in entrypoints()}


def _usage(needs_package: bool, own: ModelConfig | None, sentences: list[str]) -> str:
    needs = "The attention comes from the package openclip_linattn.\n\n" if needs_package else ""
    needs += "".join(f"{sentence}.\n\n" for sentence in sentences)
    imports = "import openclip_linattn\n" if needs_package else ""
    if own is not None:
        imports += f'\nopenclip_linattn.add_model_configs("FOLDER/{own.path.name}")'
    return USAGE.format(needs=needs, imports=imports)
