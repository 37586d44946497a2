"""The model that a converted checkpoint belongs to: a registered one of that shape, or a config of its own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from open_clip import CLIPTextCfg
from open_clip.tokenizer import DEFAULT_CONTEXT_LENGTH

from openclip_linattn.configs import FOREIGN_TEXT, NOT_CAUSAL, OPTIONAL_TOP_KEYS, VISION_FIXED, check_config
from openclip_linattn.errors import UserError
from openclip_linattn.registration import models
from openclip_scaling.flops import TowerName, parse_tower_name

# vision_cfg of OpenCLIP's plain ViTs: what our towers can be told, and the only value of what they cannot.
VISION_SIZES = {"image_size": 224, "patch_size": 16, "width": 768, "layers": 12, "head_width": 64}
VISION_PLAIN: Mapping[str, Any] = {"mlp_ratio": 4.0, "pool_type": "tok", "pos_embed_type": "learnable"}
CARRIED = "patch_dropout"


@dataclass(frozen=True)
class Target:
    """Name and OpenCLIP config of a converted model, and whether it is registered."""

    name: str
    content: dict[str, Any]
    registered: bool

    @property
    def tower(self) -> TowerName:
        """The description of its image tower."""
        return parse_tower_name(self.content["vision_cfg"]["timm_model_name"])


def describe(name: str, config: Mapping[str, Any]) -> TowerName:
    """The towers of one of OpenCLIP's ViT models, or one of ours, in our terms.

    Raises UserError, naming the key, where the image tower is no plain ViT that our configs can describe.
    """
    vision = config["vision_cfg"]
    if vision.get("timm_model_name"):
        try:
            return parse_tower_name(vision["timm_model_name"])
        except ValueError as error:
            raise UserError(
                f"{name} has a timm image tower, which no config of ours can describe; in memory, convert_attention "
                "converts it where it is a plain ViT"
            ) from error
    for key, value in vision.items():
        known = key == CARRIED or key in VISION_SIZES
        if not known and value != VISION_PLAIN.get(key) and value not in (None, False, 0):
            raise UserError(
                f"{name}: no config of ours can say vision_cfg.{key} = {value!r}; in memory, convert_attention "
                "converts such a model where its blocks are OpenCLIP's default ones"
            )
    sizes = {**VISION_SIZES, **{key: vision[key] for key in VISION_SIZES if key in vision}}
    if isinstance(sizes["layers"], (list, tuple)):
        raise UserError(f"{name} has a ResNet as its image tower; only ViTs can be converted")
    side, patch = _side(sizes["image_size"]), _side(sizes["patch_size"])
    if not isinstance(side, int) or not isinstance(patch, int):
        raise UserError(f"{name}: the image size or the patches are not square ({side}, {patch})")
    return TowerName(
        width=sizes["width"],
        layers=sizes["layers"],
        heads=sizes["width"] // sizes["head_width"],
        patch=patch,
        train_tokens=(side // patch) ** 2 + 1,
        kind="softmax",
        text_train_tokens=None,
    )


def choose_target(
    name: str,
    config: Mapping[str, Any],
    kind: str,
    *,
    text: bool,
    last: int | None,
    custom_text: bool,
    image_size: Any,
) -> Target:
    """The model that a conversion of `name` to `kind` gives.

    Args:
        name, config: the source's model.
        kind: the image tower's new attention; with `text` the text tower's too.
        text: whether the text tower is converted.
        last: convert only the last so many blocks of each tower; None: all.
        custom_text: whether the source is loaded as OpenCLIP's CustomTextCLIP.
        image_size: pixels of the source's images.

    Raises UserError where no config can describe the result.
    """
    source = describe(name, config)
    last = None if last == source.layers else last
    _check_kinds(name, source, kind, text=text, last=last)
    _check_text(name, config["text_cfg"], text=text)
    if last is not None:
        _check_last(name, source.layers, config["text_cfg"], text=text, last=last)
    linear_text = text and kind != "softmax"
    tower = replace(
        source,
        kind=kind,
        last=last,
        text_train_tokens=_context_length(config) if linear_text else None,
    )
    content = _content(config, tower, custom_text=custom_text, image_size=image_size)
    for known, model in models().items():
        if model.content == content:
            return Target(known, content, registered=True)
    new = f"{_base(name, source)}-{_ending(tower)}"
    if new in models():
        new = f"{new}-{content['vision_cfg']['image_size']}"
    try:
        check_config(Path(f"{new}.json"), content)
    except UserError as error:
        raise UserError(f"no config can describe the converted model: {error}") from error
    return Target(new, content, registered=False)


def _check_kinds(name: str, source: TowerName, kind: str, *, text: bool, last: int | None) -> None:
    """Raises UserError for a conversion that changes nothing, and for mixtures that no config can describe."""
    if source.text_train_tokens and not text:
        raise UserError(
            f"the text tower of {name} has {source.kind} attention, and both towers of a model have one kind or the "
            "text tower softmax: convert it too, with --text"
        )
    if text and kind in NOT_CAUSAL:
        raise UserError(
            f"{kind} has no causal form, so it cannot be the text tower's attention: leave out --text"
        )
    whole = kind == "softmax" or bool(source.text_train_tokens) == text
    if kind == source.kind and last == source.last and whole:
        raise UserError(f"{name} has {kind} attention already")
    widened = kind == source.kind and source.last is not None and (last or source.layers) >= source.last
    if last is not None and (kind == "softmax" or not (source.kind == "softmax" or widened)):
        raise UserError(
            f"{name} has {source.kind} attention: the last {last} blocks alone can be converted from softmax to "
            "another kind, or to no fewer blocks of the kind that the last ones have"
        )


def _check_text(name: str, config: Mapping[str, Any], *, text: bool) -> None:
    if text and FOREIGN_TEXT in config:
        raise UserError(
            f"the text tower of {name} is one of transformers, and only OpenCLIP's own can be converted: leave out "
            "--text"
        )


def _check_last(name: str, layers: int, config: Mapping[str, Any], *, text: bool, last: int) -> None:
    """Raises UserError where a tower has no softmax block left before the last ones."""
    towers = {"image": layers, **({"text": config.get("layers", CLIPTextCfg.layers)} if text else {})}
    for part, blocks in towers.items():
        if last >= blocks:
            raise UserError(
                f"the {part} tower of {name} has {blocks} blocks, so the last {last} are no part of it: give a smaller "
                "--last"
            )


def tower_name(tower: TowerName) -> str:
    """The timm_model_name that `parse_tower_name` reads as this tower."""
    name = f"linattn_w{tower.width}_d{tower.layers}_h{tower.heads}_p{tower.patch}_n{tower.train_tokens}_{tower.kind}"
    name = f"{name}_last{tower.last}" if tower.last else name
    return f"{name}_text{tower.text_train_tokens}" if tower.text_train_tokens else name


def _ending(tower: TowerName) -> str:
    """The ending of a model's name that says the attention of its towers."""
    parts = (tower.kind, f"last{tower.last}" if tower.last else "", "text" if tower.text_train_tokens else "")
    return "-".join(filter(None, parts))


def _content(
    config: Mapping[str, Any], tower: TowerName, *, custom_text: bool, image_size: Any
) -> dict[str, Any]:
    content: dict[str, Any] = {
        "embed_dim": config["embed_dim"],
        "vision_cfg": {"image_size": _side(image_size), "timm_model_name": tower_name(tower), **VISION_FIXED},
        "text_cfg": {"context_length": _context_length(config), **config["text_cfg"]},
    }
    if config["vision_cfg"].get(CARRIED):
        content["vision_cfg"][CARRIED] = config["vision_cfg"][CARRIED]
    content.update({key: config[key] for key in OPTIONAL_TOP_KEYS if key in config})
    if custom_text:
        content["custom_text"] = True
    return content


def _context_length(config: Mapping[str, Any]) -> int:
    length: int = config["text_cfg"].get("context_length", DEFAULT_CONTEXT_LENGTH)
    return length


def _base(name: str, source: TowerName) -> str:
    """The source's name without what it says of its attention and activation: converted models have GELU."""
    return name.removesuffix(f"-{_ending(source)}").removesuffix("-quickgelu")


def _side(size: Any) -> Any:
    """One number for a square size, else the size as a list."""
    sides = [int(side) for side in size] if isinstance(size, (list, tuple)) else [int(size)] * 2
    return sides[0] if sides[0] == sides[1] else sides
