"""Image towers by model name, each with its softmax twin, and their check against the explicit formulas."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from openclip_linattn.attention import OperatorAttention
from openclip_linattn.bench.checks import Finding, relative_error
from openclip_linattn.configs import ModelConfig
from openclip_linattn.errors import UserError
from openclip_linattn.ops.reference import REFERENCES
from openclip_linattn.registration import model_name, models
from openclip_linattn.towers import build_image_tower
from openclip_scaling.flops import FLOP_PER_MAC, Tower, clip_towers

TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative errors that are always allowed after all blocks, of the features and of the first convolution's gradient."""
OF_PLAIN = 3
"""Allowed too: this many times the error of the tower with the explicit formulas in the run's own number type.

Where a kind has a ReLU, a change in the last bit can switch a gradient on or off.
"""


@dataclass(frozen=True)
class Entrant:
    """A registered model whose image tower is measured, and the name of its softmax twin (its own, for softmax)."""

    name: str
    config: ModelConfig
    twin: str

    @property
    def patch(self) -> int:
        """Side of a patch in pixels."""
        return self.config.tower.patch

    def tokens(self, pixels: int) -> int:
        """Tokens of a square image, the class token included."""
        return (pixels // self.patch) ** 2 + 1

    def arithmetic(self, pixels: int) -> Tower:
        """Parameters and products of the tower at that image size."""
        content = self.config.content
        return clip_towers({**content, "vision_cfg": {**content["vision_cfg"], "image_size": pixels}})[0]

    def forward_flops(self, pixels: int) -> float:
        """FLOP (2 per multiply-add) of one forward pass of one image."""
        return FLOP_PER_MAC * self.arithmetic(pixels).macs(self.tokens(pixels))

    def build(self, pixels: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """The tower with new weights, the same for every kind of one size, as OpenCLIP's --force-image-size has it."""
        torch.manual_seed(0)
        tower: nn.Module = build_image_tower(
            self.config.tower, image_size=pixels, output_dim=self.config.content["embed_dim"]
        )
        return tower.to(device=device, dtype=dtype)


def entrants(names: Sequence[str], sizes: Sequence[int]) -> list[Entrant]:
    """The models of the names, each group of one size led by its softmax twin.

    Raises UserError for an unknown model, one that is not ours, a size that its patch does not divide, and models of
    different patches.
    """
    known = models()
    chosen: dict[str, Entrant] = {}
    for name in dict.fromkeys(model_name(name) for name in names):
        if name not in known:
            raise UserError(
                f"{name} is OpenCLIP's own model; `openclip-linattn models` lists those that can be measured"
            )
        twin = _twin(known[name], known)
        chosen.setdefault(twin, Entrant(twin, known[twin], twin))
        chosen.setdefault(name, Entrant(name, known[name], twin))
    _check_sizes(list(chosen.values()), sizes)
    return list(chosen.values())


def _twin(config: ModelConfig, known: dict[str, ModelConfig]) -> str:
    """The softmax model whose tower has the same sizes; training resolutions may differ."""

    def sizes(other: ModelConfig) -> Any:
        return replace(other.tower, kind="", train_tokens=None, text_train_tokens=None), other.content[
            "embed_dim"
        ]

    found = [
        name
        for name, other in known.items()
        if other.tower.kind == "softmax" and sizes(other) == sizes(config)
    ]
    if not found:
        raise UserError(f"there is no softmax model of the size of {config.name} to measure it against")
    return min(found, key=len)


def _check_sizes(chosen: Sequence[Entrant], sizes: Sequence[int]) -> None:
    patches = {entrant.patch for entrant in chosen}
    if len(patches) > 1:
        raise UserError(
            f"models with patches of {' and '.join(map(str, sorted(patches)))} pixels need runs of their own"
        )
    (patch,) = patches
    for size in sizes:
        if size < 1 or size % patch:
            raise UserError(f"--sizes: {size} pixels do not divide into patches of {patch}")


def run_tower(tower: nn.Module, images: Tensor) -> tuple[Tensor, ...]:
    """The features of a batch, without gradients."""
    with torch.no_grad():
        return (tower(images),)


def train_tower(tower: nn.Module, images: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """The features of a batch and the gradients of all parameters."""
    features: Tensor = tower(images)
    parameters = [parameter for parameter in tower.parameters() if parameter.requires_grad]
    return (features, *torch.autograd.grad(features, parameters, gradient))


def check_tower(entrant: Entrant, pixels: int, dtype: torch.dtype, device: torch.device) -> list[Finding]:
    """Features and the gradient of the first convolution against the same tower in float64 with explicit formulas."""
    tower = entrant.build(pixels, dtype, device)
    generator = torch.Generator(device).manual_seed(1)
    images = torch.randn(2, 3, pixels, pixels, generator=generator, device=device, dtype=dtype)
    tokens = entrant.tokens(pixels)
    try:
        got = _features_and_gradient(tower, images)
    except Exception as error:
        return [Finding.raised(entrant.name, tokens, error)]
    plain = _features_and_gradient(_explicit(tower), images)
    exact = _features_and_gradient(_explicit(tower).double(), images.double())
    findings = []
    for what, a, b, c in zip(("features", "patch gradient"), got, plain, exact, strict=True):
        rounding = OF_PLAIN * relative_error(b, c, c)
        allowed = max(TOLERANCES[dtype], rounding if isfinite(rounding) else 0.0)
        findings.append(Finding(entrant.name, tokens, what, relative_error(a, c, c), allowed))
    return findings


def _explicit(tower: nn.Module) -> nn.Module:
    """A copy whose operators are the N x N formulas."""
    explicit = copy.deepcopy(tower)
    for module in explicit.modules():
        if isinstance(module, OperatorAttention):
            module.operator = REFERENCES[module.kind]
    return explicit


def _features_and_gradient(tower: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    features: Tensor = tower(images)
    weight = tower.get_parameter("conv1.weight")
    # A random direction: the features are layer-normed before their projection, so a plain sum has little gradient.
    generator = torch.Generator(images.device).manual_seed(2)
    direction = torch.randn(features.shape, generator=generator, device=images.device, dtype=torch.float32)
    (gradient,) = torch.autograd.grad(features, weight, direction.to(features.dtype))
    return features.detach(), gradient
