"""Profile one forward and backward pass of an image tower on this machine's CPU, one thread.

    python scripts/profile_tower.py [MODEL] [--image-size 224] [--batch 8]

Prints what the time goes into (matrix products, copies, the rest), and what each operation of one attention module
allocates, in units of T, the size of its queries: 3 T for the packed projection, T for the output and 3 T for the
gradient of the projection are what the mathematics needs.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import open_clip
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile

from openclip_linattn.registration import models

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mkldnn_convolution", "convolution", "_scaled_dot_product")
COPIES = ("copy_", "clone", "cat", "stack", "contiguous", "fill_", "zero_")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="ViT-B-16-normlinear")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    if args.model not in models():
        parser.error(f"unknown model {args.model!r}; `openclip-linattn models` lists them")
    torch.set_num_threads(1)
    tower = open_clip.create_model(args.model, force_image_size=args.image_size).visual
    images = torch.randn(args.batch, 3, args.image_size, args.image_size)
    console = Console(width=None if Console().is_terminal else 110)
    console.print(
        times(recorded(lambda: tower(images)), f"{args.model}, {args.image_size} px, {args.batch} images")
    )
    block = tower.transformer.resblocks[0]
    tokens = (args.image_size // block_patch(tower)) ** 2 + 1
    x = torch.randn(args.batch, tokens, block.attn.in_proj_weight.shape[1], requires_grad=True)
    console.print(allocations(recorded(lambda: attention(block.attn, x)), x.nbytes))


def attention(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output of an attention module as OpenCLIP's block calls it."""
    output: torch.Tensor = module(x, x, x, need_weights=False)[0]
    return output


def block_patch(tower: nn.Module) -> int:
    """The side of a patch in pixels."""
    size: int = tower.conv1.kernel_size[0]
    return size


def recorded(forward: Callable[[], torch.Tensor]) -> Any:
    """The profile of one forward and backward pass, after one to warm up."""

    gradient = torch.ones_like(forward())

    def run() -> None:
        forward().backward(gradient)

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as result:
        run()
    return result


def times(result: Any, title: str) -> Table:
    """Calls and own time of the operations, by what they do."""
    groups: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in result.key_averages():
        name = event.key.removeprefix("aten::").rstrip("_")
        kind = "everything else"
        if any(name == x.rstrip("_") or name.startswith(f"{x}_") for x in PRODUCTS):
            kind = "matrix products"
        elif any(name == x.rstrip("_") for x in COPIES):
            kind = "copies"
        groups[kind][0] += event.count
        groups[kind][1] += event.self_cpu_time_total / 1e3
    total = sum(time for _, time in groups.values())
    table = Table("operations", "calls", "ms", "share", title=title)
    for kind, (calls, time) in sorted(groups.items(), key=lambda item: -item[1][1]):
        table.add_row(kind, f"{calls:,}", f"{time:,.0f}", f"{time / total:.0%}")
    table.add_row("all", "", f"{total:,.0f}", "")
    return table


def allocations(result: Any, unit: int) -> Table:
    """What the operations of one attention module allocate, from half of T on."""
    table = Table("operation", "calls", "allocated / T", title="One attention module, forward and backward")
    for event in sorted(result.key_averages(), key=lambda event: -event.self_cpu_memory_usage):
        if event.self_cpu_memory_usage >= unit / 2 and not event.key.startswith("["):
            table.add_row(event.key, str(event.count), f"{event.self_cpu_memory_usage / unit:.1f}")
    return table


if __name__ == "__main__":
    main()
