"""Rebuilds a model config from the model that OpenCLIP prints into out.log, so that any ViT can be costed.

The printout names modules, not bare parameters: the embedding width and the context length are not in it, and
the head count only where the attention module prints it. What had to be assumed is said in the notices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from openclip_scaling.errors import UserError
from openclip_scaling.flops import ATTENTION_MACS

_BLOCK = re.compile(r"^\((?:\d+|(?P<first>\d+)-(?P<last>\d+))\): (?:\d+ x )?(?P<kind>\w+)\($")
_CONV = re.compile(r"\(conv1\): Conv2d\(3, (?P<width>\d+), kernel_size=\((?P<rows>\d+), (?P<columns>\d+)\)")
_EMBEDDING = re.compile(r"\(token_embedding\): Embedding\((?P<vocabulary>\d+), (?P<width>\d+)\)")
_HIDDEN = re.compile(r"\(c_fc\): Linear\(in_features=(?P<width>\d+), out_features=(?P<hidden>\d+)")
_KIND = re.compile(r"\bkind=(?P<kind>\w+)")
_HEADS = re.compile(r"\bheads=(?P<heads>\d+)")
_LAYER_SCALE = re.compile(r"\(ls_1\): LayerScale")
_DEFAULT_CONTEXT = 77


@dataclass(frozen=True)
class Architecture:
    """A model config with its attention kinds, and a sentence for each assumption behind it."""

    config: dict[str, Any]
    image_attention: str
    text_attention: str
    notices: tuple[str, ...]


def read_architecture(
    model_repr: str, image_size: tuple[int, int] | None, context_length: int | None = None
) -> Architecture:
    """Config of the printed model. Raises UserError where it is not a plain ViT CLIP or says too little."""
    if not model_repr.strip():
        raise UserError("out.log holds no printed model")
    if image_size is None:
        raise UserError("out.log does not print the image size")
    image, text = _towers(model_repr)
    vision, image_attention = _vision(image, image_size)
    text_cfg, text_attention, embedding = _text(text)
    assumed = [f"embedding width {embedding} (that of the text tower)"]
    if context_length is None:
        assumed.append(f"context length {_DEFAULT_CONTEXT}")
    notices = [f"not printed in out.log, so assumed for its size and compute: {', '.join(assumed)}"]
    if any(line.startswith("(patch_dropout): PatchDropout") for line in image):
        notices.append(
            "the rate of patch dropout is not printed; unless forced, compute is counted without it"
        )
    text_cfg["context_length"] = context_length or _DEFAULT_CONTEXT
    config = {"embed_dim": embedding, "vision_cfg": vision, "text_cfg": text_cfg}
    return Architecture(config, image_attention, text_attention, tuple(notices))


def _towers(model_repr: str) -> tuple[list[str], list[str]]:
    """The lines below `(visual)`, and all others, told apart by their indentation."""
    lines = model_repr.splitlines()
    start = next((i for i, line in enumerate(lines) if line.strip().startswith("(visual): ")), None)
    if start is None:
        raise UserError("the printed model has no image tower called visual")
    tower = lines[start].strip()
    if not tower.startswith("(visual): VisionTransformer("):
        raise UserError(f"the image tower is not OpenCLIP's VisionTransformer but {tower!r}")
    indent = len(lines[start]) - len(lines[start].lstrip())
    end = next(
        (i for i in range(start + 1, len(lines)) if lines[i].strip() and _indent(lines[i]) <= indent),
        len(lines),
    )
    image = [line.strip() for line in lines[start:end]]
    text = [line.strip() for line in lines[:start] + lines[end:]]
    return image, text


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _layers(lines: list[str]) -> int:
    count = 0
    for line in lines:
        block = _BLOCK.match(line)
        if block and block["kind"].endswith("Block"):
            count += int(block["last"]) - int(block["first"]) + 1 if block["last"] else 1
    if not count:
        raise UserError("a tower in the printed model has no residual blocks")
    return count


def _attention(lines: list[str]) -> str:
    """The one attention kind of a tower: softmax where the modules print none."""
    kinds = sorted({match["kind"] for line in lines if (match := _KIND.search(line))})
    if len(kinds) > 1:
        raise UserError(f"a tower mixes attention kinds ({', '.join(kinds)})")
    kind = kinds[0] if kinds else "softmax"
    if kind not in ATTENTION_MACS:
        raise UserError(f"the attention kind {kind!r} is unknown")
    return kind


def _heads(lines: list[str], width: int) -> int:
    printed = _search(_HEADS, lines)
    if printed:
        return int(printed["heads"])
    # Softmax costs the same for every head count, so any divisor serves.
    return width // 64 if width % 64 == 0 else 1


def _search(pattern: re.Pattern[str], lines: list[str]) -> re.Match[str] | None:
    return next((match for line in lines if (match := pattern.search(line))), None)


def _block_options(lines: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {"layers": _layers(lines)}
    if hidden := _search(_HIDDEN, lines):
        options["mlp_ratio"] = int(hidden["hidden"]) / int(hidden["width"])
    if _search(_LAYER_SCALE, lines):
        options["ls_init_value"] = 1.0
    return options


def _vision(lines: list[str], image_size: tuple[int, int]) -> tuple[dict[str, Any], str]:
    conv = _search(_CONV, lines)
    if conv is None or any(line.startswith("(attn_pool): Att") for line in lines):
        raise UserError("the image tower has no patch convolution, or pools by attention")
    width = int(conv["width"])
    heads = _heads(lines, width)
    if width % heads:
        raise UserError(f"the image tower's width {width} does not divide into {heads} heads")
    vision = {
        "image_size": list(image_size),
        "patch_size": [int(conv["rows"]), int(conv["columns"])],
        "width": width,
        "head_width": width // heads,
        **_block_options(lines),
    }
    if any(line.startswith("(ln_pre): Identity") for line in lines):
        vision["no_ln_pre"] = True
    return vision, _attention(lines)


def _text(lines: list[str]) -> tuple[dict[str, Any], str, int]:
    embedding = _search(_EMBEDDING, lines)
    if embedding is None:
        raise UserError("the text tower is not OpenCLIP's own transformer")
    width = int(embedding["width"])
    text = {
        "vocab_size": int(embedding["vocabulary"]),
        "width": width,
        "heads": _heads(lines, width),
        **_block_options(lines),
    }
    return text, _attention(lines), width
