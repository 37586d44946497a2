"""Finds, names and validates model configs: OpenCLIP's JSON files whose image tower is one of ours.

OpenCLIP drops an incomplete file in silence, replaces a built-in model of the same name in silence, and ignores keys
that its timm route does not know how to pass on. So every file is checked here before OpenCLIP sees it.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclip_linattn.errors import UserError
from openclip_linattn.ops import OPERATORS
from openclip_scaling.flops import TowerName, parse_tower_name

CONFIGS_VARIABLE = "OPENCLIP_LINATTN_MODEL_CONFIGS"
TOP_KEYS = {"embed_dim", "vision_cfg", "text_cfg"}
OPTIONAL_TOP_KEYS = {"custom_text", "init_logit_scale", "init_logit_bias", "nonscalar_logit_scale"}
VISION_FIXED = {"timm_model_pretrained": False, "timm_pool": "", "timm_proj": ""}
VISION_KEYS = {"image_size", "patch_dropout", "timm_model_name", *VISION_FIXED}
TEXT_SIZES = ("context_length", "vocab_size", "width", "heads", "layers")
TEXT_KEYS = {
    *TEXT_SIZES,
    *(
        "act_kwargs",
        "eos_id",
        "final_ln_after_pool",
        "hf_tokenizer_name",
        "ls_init_value",
        "mlp_ratio",
        "norm_kwargs",
        "output_tokens",
    ),
    *("pad_id", "pool_type", "proj_bias", "proj_type", "tokenizer_kwargs", "tokenizer_mode"),
}
# A text tower of transformers: OpenCLIP reads its sizes from the model's own config.
FOREIGN_TEXT = "hf_model_name"
FOREIGN_TEXT_NEEDS = {FOREIGN_TEXT, "hf_tokenizer_name", "context_length"}
FOREIGN_TEXT_KEYS = {
    *FOREIGN_TEXT_NEEDS,
    *(
        "hf_model_pretrained",
        "hf_pooler_type",
        "hf_proj_type",
        "output_tokens",
        "tokenizer_kwargs",
        "tokenizer_mode",
    ),
}
# OpenCLIP's training looks for these in the model's name and then takes another road.
FORBIDDEN_IN_NAME = ("coca", "siglip", "genlip", "genlap", "naflexclap", "/")
NOT_CAUSAL = frozenset({"lininfsa"})  # no causal form is published


@dataclass(frozen=True)
class ModelConfig:
    """One valid model: its name, its file, OpenCLIP's config as read, and the image tower that it describes."""

    name: str
    path: Path
    content: dict[str, Any]
    tower: TowerName

    @property
    def text_attention(self) -> str:
        """Attention kind of the text tower."""
        return self.tower.kind if self.tower.text_train_tokens else "softmax"


def builtin_folder() -> Path:
    """The folder of the configs that come with the package: inside it when installed, beside it in a checkout."""
    package = Path(__file__).parent
    for folder in (package / "model_configs", package.parent / "model_configs"):
        if folder.is_dir():
            return folder
    raise UserError(f"the folder model_configs is missing in and beside {package}; install the package again")


def config_folders() -> list[Path]:
    """The package's own folder, then those named by OPENCLIP_LINATTN_MODEL_CONFIGS (separated as in PATH)."""
    extra = os.environ.get(CONFIGS_VARIABLE, "")
    return [builtin_folder(), *(Path(part) for part in extra.split(os.pathsep) if part)]


def read_configs(path: str | Path) -> list[ModelConfig]:
    """Reads and checks one config file, or every *.json of a folder, in order of name.

    Raises UserError, naming the file, the key and the allowed values, at the first fault.
    """
    path = Path(path)
    if path.is_file():
        return [read_config(path)]
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; give a folder with model configs (*.json)")
    files = sorted(path.glob("*.json"))
    if not files:
        raise UserError(f"{path}: the folder has no model config (*.json)")
    return [read_config(file) for file in files]


def read_config(path: Path) -> ModelConfig:
    """Reads and checks one config file; its model is named by the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON ({error})") from error
    return check_config(path, content)


def check_config(path: Path, content: Any) -> ModelConfig:
    """The model of a config that is, or would be, the content of `path`; raises UserError as `read_configs` does."""
    _check_name(path)
    _check_keys(path, "", content, required=TOP_KEYS, allowed=TOP_KEYS | OPTIONAL_TOP_KEYS)
    vision, text = content["vision_cfg"], content["text_cfg"]
    _check_keys(
        path,
        "vision_cfg.",
        vision,
        required={"image_size", "timm_model_name", *VISION_FIXED},
        allowed=VISION_KEYS,
    )
    foreign = isinstance(text, dict) and FOREIGN_TEXT in text
    _check_keys(
        path,
        "text_cfg.",
        text,
        required=FOREIGN_TEXT_NEEDS if foreign else set(TEXT_SIZES),
        allowed=FOREIGN_TEXT_KEYS if foreign else TEXT_KEYS,
    )
    for key, value in VISION_FIXED.items():
        if vision[key] != value:
            raise UserError(
                f"{path}: vision_cfg.{key} is {vision[key]!r}; our towers need {json.dumps(value)}"
            )
    _check_size(path, "embed_dim", content["embed_dim"])
    tower = _check_tower(path, vision)
    (_check_foreign_text if foreign else _check_text)(path, text, tower)
    return ModelConfig(path.stem, path, content, tower)


def _check_name(path: Path) -> None:
    name = path.stem.lower()
    if "vit" not in name:
        raise UserError(
            f"{path}: the name must contain 'ViT', else OpenCLIP trains with another optimiser's defaults"
        )
    for part in FORBIDDEN_IN_NAME:
        if part in name:
            raise UserError(
                f"{path}: the name must not contain {part!r}: OpenCLIP would take it for another model type"
            )


def _check_keys(path: Path, where: str, content: Any, *, required: set[str], allowed: Iterable[str]) -> None:
    if not isinstance(content, dict):
        raise UserError(f"{path}: {where.rstrip('.') or 'the file'} must be a JSON object")
    allowed = sorted(allowed)
    for key in sorted(content.keys() - set(allowed)):
        raise UserError(f"{path}: unknown key {where}{key}; allowed are {', '.join(allowed)}")
    for key in sorted(required - content.keys()):
        raise UserError(f"{path}: the key {where}{key} is missing; needed are {', '.join(sorted(required))}")


def _check_size(path: Path, key: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{path}: {key} is {value!r}; it must be a whole number of at least 1")


def _check_tower(path: Path, vision: dict[str, Any]) -> TowerName:
    name = vision["timm_model_name"]
    try:
        tower = parse_tower_name(name)
    except (UserError, ValueError, TypeError) as error:
        kinds = ", ".join(sorted(OPERATORS))
        raise UserError(
            f"{path}: vision_cfg.timm_model_name is {name!r}: {error} Attention kinds: {kinds}."
        ) from error
    if tower.kind not in OPERATORS:
        kinds = ", ".join(sorted(OPERATORS))
        raise UserError(
            f"{path}: unknown attention kind {tower.kind!r} in vision_cfg.timm_model_name; known: {kinds}"
        )
    if not tower.train_tokens:
        raise UserError(
            f"{path}: vision_cfg.timm_model_name {name!r} lacks the training tokens, as in ..._p16_n197_..."
        )
    if tower.width % tower.heads:
        raise UserError(f"{path}: width {tower.width} does not divide into {tower.heads} heads ({name})")
    if tower.last is not None and (tower.kind == "softmax" or tower.last >= tower.layers):
        raise UserError(
            f"{path}: _last{tower.last} in vision_cfg.timm_model_name must leave softmax in some of the "
            f"{tower.layers} blocks, and another kind in the last ({name})"
        )
    sides = vision["image_size"]
    for side in sides if isinstance(sides, list) else [sides]:
        _check_size(path, "vision_cfg.image_size", side)
        if side % tower.patch:
            raise UserError(
                f"{path}: vision_cfg.image_size {side} is no multiple of the patch size {tower.patch}"
            )
    return tower


def _check_foreign_text(path: Path, text: dict[str, Any], tower: TowerName) -> None:
    _check_size(path, "text_cfg.context_length", text["context_length"])
    if tower.text_train_tokens:
        raise UserError(
            f"{path}: a text tower of transformers ({text[FOREIGN_TEXT]}) keeps its own attention: leave "
            f"_text{tower.text_train_tokens} out of vision_cfg.timm_model_name"
        )


def _check_text(path: Path, text: dict[str, Any], tower: TowerName) -> None:
    for key in TEXT_SIZES:
        _check_size(path, f"text_cfg.{key}", text[key])
    if text["width"] % text["heads"]:
        raise UserError(f"{path}: text_cfg.width {text['width']} does not divide into {text['heads']} heads")
    if tower.text_train_tokens and tower.last and tower.last >= text["layers"]:
        raise UserError(
            f"{path}: the text tower has {text['layers']} blocks, and _last{tower.last} needs more"
        )
    if tower.text_train_tokens and tower.kind in NOT_CAUSAL:
        raise UserError(
            f"{path}: {tower.kind} has no causal form, so it cannot be the text tower's attention"
        )
