"""What is measured where nothing else is asked for: on a CPU, on a GPU, and in the smoke form."""

from dataclasses import dataclass, replace

_LENGTHS = (64, 197, 256, 1024, 4096, 16384, 65536, 262144, 524288, 1048576, 2097152, 4194304)
_PIXELS = (224, 384, 512, 1024, 2048, 4096, 9216)
_KINDS = ("linear", "normlinear", "lininfsa", "infsa", "neumannlinear")


@dataclass(frozen=True)
class Protocol:
    """The defaults of one type of device; sizes as in `OperatorSettings` and `TowerSettings`."""

    batch: int
    heads: int
    dtype: str
    rounds: int
    seconds: float
    quadratic_limit: int | None
    extrapolate: bool
    operators: tuple[str, ...] = _KINDS
    tokens: tuple[int, ...] = _LENGTHS
    models: tuple[str, ...] = tuple(f"ViT-B-16-{kind}" for kind in _KINDS)
    pixels: tuple[int, ...] = _PIXELS


_PROTOCOLS = {
    "cpu": Protocol(1, 6, "fp32", 15, 240.0, None, extrapolate=False),
    # The published comparison: batch 4, 8 heads of width 64, bf16, softmax measured up to 2^19 tokens.
    "cuda": Protocol(4, 8, "bf16", 30, 240.0, 1 << 19, extrapolate=True),
}


def protocol(device_type: str, *, tiny: bool = False) -> Protocol:
    """The protocol of a type of device, or its smoke form."""
    usual = _PROTOCOLS[device_type]
    if not tiny:
        return usual
    return replace(
        usual,
        rounds=3,
        seconds=5.0,
        operators=("linear", "normlinear"),
        tokens=(64, 197),
        models=("ViT-T32-8-linear", "ViT-T32-8-normlinear"),
        pixels=(48, 64),
    )
