"""Writes model_configs/*.json: every size x attention kind, their text-tower variants and fixed resolutions.

The files are what the package reads, this script only keeps them alike. A model of your own needs no script: copy a
file, change it, and hand its folder to `openclip_linattn.add_model_configs` or OPENCLIP_LINATTN_MODEL_CONFIGS.

    python scripts/write_model_configs.py
"""

import json
from dataclasses import dataclass
from pathlib import Path

KINDS = (
    "softmax",
    "linear",
    "linearelu",
    "normlinear",
    "normlinearmean",
    "infsa",
    "lininfsa",
    "neumannlinear",
)
TEXT_KINDS = tuple(kind for kind in KINDS if kind not in ("softmax", "lininfsa"))
RESOLUTIONS = (384, 512, 1024)


@dataclass(frozen=True)
class Size:
    """One model size: the image tower, the text tower and the width of the space that they share."""

    width: int
    layers: int
    heads: int
    patch: int
    pixels: int
    embed: int
    text: dict[str, int]

    @property
    def tokens(self) -> int:
        """Tokens of the image tower at its own resolution, class token included."""
        return (self.pixels // self.patch) ** 2 + 1


def _text(width: int, layers: int, context: int = 77) -> dict[str, int]:
    heads = width // (64 if width >= 256 else 16)
    return {"context_length": context, "vocab_size": 49408, "width": width, "heads": heads, "layers": layers}


# S, B and L are OpenCLIP's own ViT-S-16, ViT-B-16 and ViT-L-16. InfViT-4 is the 4-layer tower of arXiv 2603.00175, with
# heads of 16, beside L's text tower. The laptop sizes keep B/16's ratio of tokens to head width (3) near, with
# heads of 16.
SIZES = {
    "ViT-S-16": Size(384, 12, 6, 16, 224, 384, _text(384, 12)),
    "ViT-B-16": Size(768, 12, 12, 16, 224, 512, _text(512, 12)),
    "ViT-L-16": Size(1024, 24, 16, 16, 224, 768, _text(768, 12)),
    "InfViT-4-16": Size(1024, 4, 64, 16, 224, 768, _text(768, 12)),
    "ViT-T32-8": Size(32, 3, 2, 8, 48, 32, _text(32, 3, 32)),
    "ViT-T48-8": Size(48, 3, 3, 8, 48, 48, _text(48, 3, 32)),
    "ViT-T64-8": Size(64, 3, 4, 8, 48, 64, _text(64, 3, 32)),
    "ViT-T96-8": Size(96, 3, 6, 8, 48, 96, _text(96, 3, 32)),
}


def tower_name(size: Size, kind: str, *, text: bool = False) -> str:
    """The name that carries size and kind through OpenCLIP's config to our tower builder."""
    name = f"linattn_w{size.width}_d{size.layers}_h{size.heads}_p{size.patch}_n{size.tokens}_{kind}"
    return f"{name}_text{size.text['context_length']}" if text else name


def config(size: Size, kind: str, *, text: bool = False, pixels: int | None = None) -> dict[str, object]:
    """One OpenCLIP model config."""
    vision = {
        "image_size": pixels or size.pixels,
        "timm_model_name": tower_name(size, kind, text=text),
        "timm_model_pretrained": False,
        "timm_pool": "",
        "timm_proj": "",
    }
    return {"embed_dim": size.embed, "vision_cfg": vision, "text_cfg": size.text}


def all_configs() -> dict[str, dict[str, object]]:
    """Name -> config of every model that the package ships."""
    configs = {}
    for name, size in SIZES.items():
        for kind in KINDS:
            configs[f"{name}-{kind}"] = config(size, kind)
            if kind in TEXT_KINDS:
                configs[f"{name}-{kind}-text"] = config(size, kind, text=True)
            if size.pixels == 224:
                for pixels in RESOLUTIONS:
                    configs[f"{name}-{kind}-{pixels}"] = config(size, kind, pixels=pixels)
    return configs


def main() -> None:
    """Writes the files."""
    folder = Path(__file__).parents[1] / "model_configs"
    folder.mkdir(exist_ok=True)
    for name, content in all_configs().items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=4) + "\n")


if __name__ == "__main__":
    main()
