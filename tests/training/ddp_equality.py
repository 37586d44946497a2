"""Test only, under torchrun with gloo: a step of N processes equals a step of one with the whole batch."""

import sys

import open_clip
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import openclip_linattn

PAIRS = 8


def gradients(
    model: torch.nn.Module, images: torch.Tensor, texts: torch.Tensor, loss: torch.nn.Module
) -> dict:
    out = model(images, texts)
    loss(out["image_features"], out["text_features"], out["logit_scale"]).backward()
    return {key.removeprefix("module."): p.grad for key, p in model.named_parameters()}


def main(names: list[str]) -> None:
    assert openclip_linattn.__version__
    dist.init_process_group("gloo")
    for name in names:
        compare(name, dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


def compare(name: str, rank: int, world: int) -> None:
    torch.manual_seed(0)
    images = torch.randn(PAIRS, 3, 48, 48)
    texts = open_clip.get_tokenizer(name)([f"number {i}" for i in range(PAIRS)])
    torch.manual_seed(1)
    whole = open_clip.create_model(name, output_dict=True)
    expected = gradients(whole, images, texts, open_clip.ClipLoss())
    torch.manual_seed(1)
    part = DistributedDataParallel(open_clip.create_model(name, output_dict=True))
    loss = open_clip.ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=world)
    mine = slice(rank * PAIRS // world, (rank + 1) * PAIRS // world)
    for _ in range(2):  # a second pass fails where a parameter had no gradient in the first
        part.zero_grad()
        found = gradients(part, images[mine], texts[mine], loss)
    for key, gradient in expected.items():
        # Rounding in float32 goes with the largest element: some gradients of this step are as large as 16, and off
        # by 2e-5 from float64 in one process too.
        atol = 1e-5 * max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(
            found[key], gradient, rtol=1e-5, atol=atol, msg=lambda text, key=key: f"{name}, {key}: {text}"
        )
    print(f"{name}, rank {rank} of {world}: equal")


if __name__ == "__main__":
    main(sys.argv[1:])
