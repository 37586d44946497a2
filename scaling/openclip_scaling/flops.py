"""Parameters and multiply-adds of OpenCLIP's ViT models, by arithmetic alone.

Units: a MAC is one multiply-add; 1 GMAC = 1e9 MAC; FLOP = 2 x MAC. Counted are the matrix products (dense
layers, attention products, patch convolution, projections) of one forward pass of one image-text pair.
Softmax, norms, biases, activations and other element-wise work are left out, and causal attention is counted
without a discount, as in OpenCLIP's own profile and in the CLIP scaling literature (Cherti et al. 2022).
What a blockwise causal form computes twice within a block is left out too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from openclip_scaling.errors import UserError

FLOP_PER_MAC = 2
TRAINING_FACTOR = 3  # forward once, backward twice; the exact figure is 2.98-2.99 (pixels need no gradient)


def _quadratic(tokens: int, width: int, heads: int) -> float:
    """Scores QK^T and their product with V over the N x N matrix: 2 N^2 d, whatever the heads."""
    del heads
    return 2.0 * tokens**2 * width


def _linear(tokens: int, width: int, heads: int) -> float:
    """K^T V and Q (K^T V) per head: 2 N d (d/h). Sums over tokens (O(N d), < 1 %) are not matrix products."""
    return 2.0 * tokens * width * (width / heads)


def _lininfsa(tokens: int, width: int, heads: int) -> float:
    """The pooled query, one score per key and one weighted sum of the values: 3 N d."""
    del heads
    return 3.0 * tokens * width


def _neumannlinear(tokens: int, width: int, heads: int) -> float:
    """Low-rank resolvent of rank r = d/h + 1: two Gram matrices, Psi^T Phi, Psi^T V, Phi X and one solve.

    Per head 3 N r^2 + 2 N r (d/h) + r^3/3 + r^2 (d/h); linear in N.
    """
    head_width = width / heads
    rank = head_width + 1
    per_token = 3 * rank**2 + 2 * rank * head_width
    return heads * (tokens * per_token + rank**3 / 3 + rank**2 * head_width)


# MAC of the attention products of one layer, from (tokens, width, heads).
ATTENTION_MACS: dict[str, Callable[[int, int, int], float]] = {
    "softmax": _quadratic,
    "linear": _linear,
    "linearelu": _linear,
    "normlinear": _linear,
    "normlinearmean": _linear,
    "infsa": _quadratic,  # one hop per layer
    "lininfsa": _lininfsa,
    "neumannlinear": _neumannlinear,
}
# Learnable numbers per head beyond the projections: rho of the InfSA forms, gamma of the Neumann form.
PARAMETERS_PER_HEAD = {"infsa": 1, "lininfsa": 1, "neumannlinear": 1}


def attention_macs(kind: str, tokens: int, width: int, heads: int) -> float:
    """MAC of the attention products of one layer (projections excluded).

    Raises UserError on an unknown kind or on sizes that do not divide.
    """
    _check_kind(kind)
    _check_sizes(tokens=tokens, width=width, heads=heads)
    if width % heads:
        raise UserError(f"A width of {width} does not divide into {heads} heads.")
    return ATTENTION_MACS[kind](tokens, width, heads)


def _check_kind(kind: str) -> None:
    if kind not in ATTENTION_MACS:
        raise UserError(f"Unknown attention kind {kind!r}; known kinds: {', '.join(ATTENTION_MACS)}.")


def _check_sizes(**sizes: Any) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name} must be a whole number of at least 1, not {value!r}.")


@dataclass(frozen=True)
class TowerName:
    """The image tower that a `linattn_...` model name of OpenCLIP's `timm_model_name` describes.

    text_train_tokens is None where the text tower has softmax. last: only the last so many blocks of a tower have the
    kind, and those before them softmax; None: all have it.
    """

    width: int
    layers: int
    heads: int
    patch: int
    train_tokens: int | None
    kind: str
    text_train_tokens: int | None
    last: int | None = None


_TOWER_NAME = re.compile(
    r"linattn_w(?P<width>\d+)_d(?P<layers>\d+)_h(?P<heads>\d+)_p(?P<patch>\d+)(?:_n(?P<tokens>\d+))?"
    r"_(?P<kind>[a-z]+?)(?:_last(?P<last>[1-9]\d*))?(?:_text(?P<text_tokens>\d+))?"
)


def parse_tower_name(name: str) -> TowerName:
    """Read width, layers, heads, patch, tokens, kind: `linattn_w384_d12_h6_p16_n197_normlinear[_last4][_text77]`.

    `_last4`: only the last 4 blocks have the kind, those before them softmax. `_text77`: the text tower uses the same
    kind in its causal form. Raises UserError on any other form.
    """
    match = _TOWER_NAME.fullmatch(name)
    if match is None:
        raise UserError(
            f"timm_model_name {name!r} does not describe a tower; "
            "expected a name like linattn_w384_d12_h6_p16_n197_normlinear or ..._normlinear_text77."
        )
    _check_kind(match["kind"])

    def optional(key: str) -> int | None:
        return int(match[key]) if match[key] else None

    return TowerName(
        width=int(match["width"]),
        layers=int(match["layers"]),
        heads=int(match["heads"]),
        patch=int(match["patch"]),
        train_tokens=optional("tokens"),
        kind=match["kind"],
        text_train_tokens=optional("text_tokens"),
        last=optional("last"),
    )


@dataclass(frozen=True)
class Tower:
    """One transformer tower: sizes, attention kind, and what surrounds its blocks.

    tokens is the sequence length of a whole input, train_tokens the part that patch dropout leaves;
    stem_macs and other_parameters belong to everything outside the residual blocks. softmax_layers: so many of the
    first layers have softmax instead.
    """

    tokens: int
    train_tokens: int
    width: int
    layers: int
    heads: int
    hidden: int
    attention: str
    stem_macs: float
    other_parameters: int
    layer_scale: bool = False
    softmax_layers: int = 0

    @property
    def attention_label(self) -> str:
        """The attention kind; normlinear_last4 where only the last 4 layers have it."""
        last = self.layers - self.softmax_layers
        return f"{self.attention}_last{last}" if self.softmax_layers else self.attention

    def macs(self, tokens: int) -> float:
        """MAC of one forward pass over `tokens` tokens: 12 n d^2 per layer at MLP ratio 4, products, stem."""
        dense = tokens * self.width * (4 * self.width + 2 * self.hidden)
        last = self.layers - self.softmax_layers
        products = last * attention_macs(self.attention, tokens, self.width, self.heads)
        products += self.softmax_layers * attention_macs("softmax", tokens, self.width, self.heads)
        return self.layers * dense + products + self.stem_macs

    def parameters(self) -> int:
        """Learnable numbers, biases and norms included."""
        d, hidden = self.width, self.hidden
        block = 4 * d + (4 * d * d + 4 * d) + (2 * d * hidden + hidden + d)
        block += 2 * d if self.layer_scale else 0
        factors = PARAMETERS_PER_HEAD.get(self.attention, 0) * self.heads
        return self.layers * block + (self.layers - self.softmax_layers) * factors + self.other_parameters


@dataclass(frozen=True)
class ClipCost:
    """Parameters, and forward cost in GMAC (1e9 multiply-adds) per image-text pair.

    train_gmac is the forward cost of a training step per pair: lower than gmac only with patch dropout.
    parameters also counts the logit scale (and bias), which belong to neither tower.
    """

    image_parameters: int
    text_parameters: int
    parameters: int
    image_gmac: float
    text_gmac: float
    gmac: float
    train_gmac: float
    image_attention: str
    text_attention: str

    def train_flops(self, samples: float) -> float:
        """Training FLOP (not MAC) for `samples` image-text pairs seen: 3 x 2 x forward MAC x samples.

        These are the model's FLOP: recomputation (checkpointing, --accum-freq) is not counted.
        """
        return TRAINING_FACTOR * FLOP_PER_MAC * self.train_gmac * 1e9 * samples

    def as_dict(self) -> dict[str, Any]:
        """The same numbers as a JSON-ready dict."""
        return asdict(self)


_VISION_KEYS = {
    "image_size", "patch_size", "width", "layers", "head_width", "mlp_ratio", "ls_init_value", "no_ln_pre",
    "patch_dropout", "timm_model_name",
}  # fmt: skip
_TEXT_KEYS = {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "ls_init_value"}
# Keys that change neither parameters nor matrix products.
_NEUTRAL_KEYS = {
    "pool_type", "final_ln_after_pool", "output_tokens", "act_kwargs", "norm_kwargs", "pad_id", "eos_id",
    "bos_id", "no_causal_mask", "timm_model_pretrained", "timm_pool", "timm_proj", "timm_proj_bias",
    "timm_drop", "timm_drop_path", "hf_tokenizer_name", "tokenizer_kwargs", "text_mask", "correct_eos_mask",
}  # fmt: skip


def clip_cost(
    config: Mapping[str, Any], image_attention: str | None = None, text_attention: str | None = None
) -> ClipCost:
    """Count the parameters and forward GMAC per pair of an OpenCLIP ViT model config (the dict of its JSON).

    The attention kinds default to what the config's `timm_model_name` says, else to "softmax".
    Raises UserError for what the arithmetic does not cover: ResNets, foreign timm or Hugging Face towers,
    unknown keys.
    """
    image, text = clip_towers(config, image_attention, text_attention)
    image_parameters, text_parameters = image.parameters(), text.parameters()
    image_gmac, text_gmac = image.macs(image.tokens) / 1e9, text.macs(text.tokens) / 1e9
    return ClipCost(
        image_parameters=image_parameters,
        text_parameters=text_parameters,
        parameters=image_parameters + text_parameters + 1 + (config.get("init_logit_bias") is not None),
        image_gmac=image_gmac,
        text_gmac=text_gmac,
        gmac=image_gmac + text_gmac,
        train_gmac=image.macs(image.train_tokens) / 1e9 + text_gmac,
        image_attention=image.attention_label,
        text_attention=text.attention_label,
    )


def clip_towers(
    config: Mapping[str, Any], image_attention: str | None = None, text_attention: str | None = None
) -> tuple[Tower, Tower]:
    """The image and the text tower of a config, in the same terms and with the same errors as `clip_cost`."""
    if "multimodal_cfg" in config or "audio_cfg" in config:
        raise UserError("Only plain CLIP configs are counted, not those with multimodal_cfg or audio_cfg.")
    vision = _section(config, "vision_cfg", _VISION_KEYS)
    text = _section(config, "text_cfg", _TEXT_KEYS)
    embed = config.get("embed_dim")
    _check_sizes(embed_dim=embed)
    image_tower, named = _image_tower(vision, int(str(embed)))
    default_text = named.kind if named and named.text_train_tokens else "softmax"
    text_tower = _text_tower(text, int(str(embed)), text_attention or default_text)
    if named and named.text_train_tokens and text_attention is None:
        text_tower = replace(text_tower, softmax_layers=_softmax_layers(text_tower.layers, named.last))
    if image_attention is not None:
        _check_kind(image_attention)
        image_tower = replace(image_tower, attention=image_attention, softmax_layers=0)
    return image_tower, text_tower


def _section(config: Mapping[str, Any], name: str, keys: set[str]) -> Mapping[str, Any]:
    section = config.get(name)
    if not isinstance(section, Mapping):
        raise UserError(f"The model config has no {name}.")
    # False and None switch a feature off, so such a key costs nothing even where it is not known here.
    foreign = sorted(
        k for k, v in section.items() if k not in keys | _NEUTRAL_KEYS and v not in (None, False)
    )
    if foreign:
        raise UserError(
            f"The cost of {name} key(s) {', '.join(foreign)} is not known; only plain ViTs are counted."
        )
    return section


def _image_tower(cfg: Mapping[str, Any], embed: int) -> tuple[Tower, TowerName | None]:
    named = parse_tower_name(cfg["timm_model_name"]) if cfg.get("timm_model_name") else None
    width, layers, heads, patch = _image_sizes(cfg, named)
    rows, columns = _pair(cfg.get("image_size", 224), "image_size")
    patch_rows, patch_columns = _pair(patch, "patch_size")
    patches = (rows // patch_rows) * (columns // patch_columns)
    _check_sizes(patches=patches)
    pixels = 3 * patch_rows * patch_columns
    norms = 2 if cfg.get("no_ln_pre") else 4
    return Tower(
        tokens=patches + 1,
        train_tokens=_kept(patches, cfg.get("patch_dropout") or 0.0) + 1,
        width=width,
        layers=layers,
        heads=heads,
        hidden=int(width * cfg.get("mlp_ratio", 4.0)),
        attention=named.kind if named else "softmax",
        # Every patch is embedded before patch dropout; only the class token is projected.
        stem_macs=patches * pixels * width + width * embed,
        other_parameters=pixels * width + (patches + 2) * width + norms * width + width * embed,
        layer_scale=cfg.get("ls_init_value") is not None,
        softmax_layers=_softmax_layers(layers, named.last) if named else 0,
    ), named


def _softmax_layers(layers: int, last: int | None) -> int:
    if last is not None and last > layers:
        raise UserError(f"A tower of {layers} layers has no last {last}.")
    return layers - last if last else 0


def _image_sizes(cfg: Mapping[str, Any], named: TowerName | None) -> tuple[int, int, int, Any]:
    if named:
        _check_sizes(width=named.width, layers=named.layers, heads=named.heads)
        return named.width, named.layers, named.heads, named.patch
    width, layers, head_width = cfg.get("width", 768), cfg.get("layers", 12), cfg.get("head_width", 64)
    if isinstance(layers, (list, tuple)):
        raise UserError("vision_cfg describes a ResNet (layers is a list); only ViTs are counted.")
    _check_sizes(width=width, layers=layers, head_width=head_width)
    if width % head_width:
        raise UserError(f"vision_cfg width {width} does not divide by head_width {head_width}.")
    return width, layers, width // head_width, cfg.get("patch_size", 16)


def _text_tower(cfg: Mapping[str, Any], embed: int, attention: str) -> Tower:
    _check_kind(attention)
    width, heads, layers = cfg.get("width", 512), cfg.get("heads", 8), cfg.get("layers", 12)
    tokens, vocabulary = cfg.get("context_length", 77), cfg.get("vocab_size", 49408)
    _check_sizes(width=width, heads=heads, layers=layers, context_length=tokens, vocab_size=vocabulary)
    return Tower(
        tokens=tokens,
        train_tokens=tokens,
        width=width,
        layers=layers,
        heads=heads,
        hidden=int(width * cfg.get("mlp_ratio", 4.0)),
        attention=attention,
        stem_macs=width * embed,
        other_parameters=(vocabulary + tokens + 2) * width + width * embed,
        layer_scale=cfg.get("ls_init_value") is not None,
    )


def _pair(value: Any, name: str) -> tuple[int, int]:
    rows, columns = value if isinstance(value, (list, tuple)) and len(value) == 2 else (value, value)
    _check_sizes(**{name: rows})
    _check_sizes(**{name: columns})
    return rows, columns


def _kept(patches: int, dropout: float) -> int:
    if not 0 <= dropout < 1:
        raise UserError(f"patch_dropout must be at least 0 and below 1, not {dropout!r}.")
    return max(1, int(patches * (1 - dropout)))
