"""Makes our models known to OpenCLIP, by public hooks only; the one module with global side effects.

1. timm gets one entrypoint per tower name, which returns a placeholder without parameters.
2. OpenCLIP gets the model configs, whose `vision_cfg.timm_model_name` names such an entrypoint.
3. When a CLIP model registers a `TimmModel` that holds our placeholder as its `visual`, a module registration hook
   puts OpenCLIP's own VisionTransformer with swapped attention in its place. The text tower is reached the same way.

So everything that OpenCLIP does with its native towers (positional-embedding resize, locking, checkpointing, FSDP,
compiling, resuming) works unchanged, and a process without the plugin fails with "unknown model".
"""

import difflib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import timm
from open_clip.timm_model import TimmModel
from open_clip.transformer import TextTransformer, Transformer
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from openclip_linattn.configs import ModelConfig, config_folders, read_configs
from openclip_linattn.errors import UserError
from openclip_linattn.infvit import entrypoints
from openclip_linattn.towers import build_image_tower, expect_kind, swap_attention
from openclip_scaling.flops import TowerName

_lock = threading.RLock()
_models: dict[str, ModelConfig] = {}
_ready = False


class TowerPlaceholder(nn.Module):
    """Carries a tower's description from timm's registry to the registration hook; it has no parameters."""

    def __init__(self, tower: TowerName, output_dim: int, patch_dropout: float) -> None:
        super().__init__()
        self.tower = tower
        self.output_dim = output_dim
        self.patch_dropout = patch_dropout

    def forward(self, *_: Any) -> None:
        """Raises: the placeholder is no tower."""
        raise RuntimeError("towers of openclip_linattn work inside OpenCLIP models only, not as timm models")


def models() -> dict[str, ModelConfig]:
    """Name -> config of every model that is registered, in the order of registration."""
    register()
    return dict(_models)


def model_name(name: str) -> str:
    """The name as OpenCLIP lists it; raises UserError with the closest names for an unknown one.

    OpenCLIP itself would give an unknown name the default tokenizer, without a word.
    """
    register()
    known = open_clip.list_models()
    plain = name.replace("/", "-")  # OpenCLIP's factory takes ViT-B/16 for ViT-B-16
    if plain in known:
        return plain
    close = difflib.get_close_matches(plain, known, n=4, cutoff=0.5)
    hint = f"; the closest are {', '.join(close)}" if close else ""
    raise UserError(f"unknown model {name!r}{hint} (`openclip-linattn models` lists ours)")


def register() -> None:
    """Registers the package's models and those of OPENCLIP_LINATTN_MODEL_CONFIGS; once is the same as twice.

    Raises UserError, naming the file, the key and the allowed values, where a config is wrong.
    """
    global _ready  # noqa: PLW0603 - a process has one OpenCLIP registry, and this is its state
    with _lock:
        if _ready:
            return
        _add([config for folder in config_folders() for config in read_configs(folder)])
        for entrypoint in entrypoints():
            timm.models.register_model(entrypoint)
        register_module_module_registration_hook(_replace_towers)  # type: ignore[arg-type]  # it may return a module
        _ready = True


def add_model_configs(path: str | Path) -> list[str]:
    """Registers the configs of a folder, or one file, and returns the models' names; see the package's docstring."""
    with _lock:
        register()
        return _add(read_configs(path))


def _add(configs: list[ModelConfig]) -> list[str]:
    new: dict[str, ModelConfig] = {}
    for config in configs:
        if not _is_known(config, new):
            new[config.name] = config
    for config in new.values():
        timm_name = config.content["vision_cfg"]["timm_model_name"]
        if not timm.is_model(timm_name):
            timm.models.register_model(_entrypoint(timm_name, config.tower))
    _models.update(new)
    for location in _locations(list(new.values())):
        open_clip.add_model_config(location)
    return [config.name for config in configs]


def _is_known(config: ModelConfig, coming: dict[str, ModelConfig]) -> bool:
    """True for a model that is registered, or about to be, from the same content; raises for a name of another."""
    known = _models.get(config.name) or coming.get(config.name)
    if known is not None and known.content == config.content:
        return True
    if known is not None or config.name in open_clip.list_models():
        owner = f"{known.path}" if known is not None else "OpenCLIP itself"
        raise UserError(f"{config.path}: the model name {config.name} is taken by {owner}; rename the file")
    return False


def _locations(configs: list[ModelConfig]) -> list[Path]:
    """Whole folders where all their files are ours to add, so that OpenCLIP scans one path instead of one per model."""
    folders = {config.path.parent for config in configs}
    whole = {folder for folder in folders if {path.stem for path in folder.glob("*.json")} <= _models.keys()}
    locations = (config.path.parent if config.path.parent in whole else config.path for config in configs)
    return list(dict.fromkeys(locations))


def _entrypoint(timm_name: str, tower: TowerName) -> Callable[..., TowerPlaceholder]:
    def create(
        pretrained: bool = False,
        num_classes: int = 0,
        global_pool: str = "",
        patch_drop_rate: float = 0.0,
        **options: Any,
    ) -> TowerPlaceholder:
        if pretrained:
            raise UserError(
                "our towers have no image-only weights (--pretrained-image); use --pretrained PATH"
            )
        ignored = {"pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}
        unknown = sorted(key for key, value in options.items() if key not in ignored and value is not None)
        if unknown or global_pool:
            raise UserError(
                f"{timm_name} does not take {', '.join(unknown) or 'a pooling type'} from a model config"
            )
        return TowerPlaceholder(tower, num_classes, patch_drop_rate)

    create.__name__ = create.__qualname__ = timm_name
    create.__module__ = __name__
    return create


def _replace_towers(module: nn.Module, name: str, submodule: nn.Module | None) -> nn.Module | None:
    """The hook: runs whenever any module registers a submodule, so it decides cheaply; None leaves it as it is."""
    if isinstance(submodule, TimmModel) and name == "visual":
        placeholder = submodule._modules.get("trunk")
        if isinstance(placeholder, TowerPlaceholder):
            module.__dict__["linattn_tower"] = placeholder.tower
            loaded: dict[str, bool] = {}
            module.__dict__["linattn_loaded"] = loaded
            visual: nn.Module = build_image_tower(
                placeholder.tower,
                image_size=submodule.image_size,
                output_dim=placeholder.output_dim,
                patch_dropout=placeholder.patch_dropout,
                loaded=loaded,
            )
            return visual
    elif name in ("transformer", "text") and isinstance(submodule, (Transformer, TextTransformer)):
        tower = module.__dict__.get("linattn_tower")
        if isinstance(tower, TowerName):
            transformer = submodule.transformer if isinstance(submodule, TextTransformer) else submodule
            noted = module.__dict__["linattn_loaded"]
            if tower.text_train_tokens:
                swap_attention(
                    transformer,
                    tower.kind,
                    train_tokens=tower.text_train_tokens,
                    part="text",
                    last=tower.last,
                    loaded=noted,
                )
            else:
                expect_kind(transformer, "softmax", part="text", loaded=noted)
    return None
