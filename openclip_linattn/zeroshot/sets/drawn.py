"""Drawn images in the folders of ImageNet-1K, to try an evaluation on without ImageNet."""

from pathlib import Path

from openclip_linattn.data.drawn.shapes import TEST, draw_sample
from openclip_linattn.zeroshot.sets.wnids import imagenet1k_wnids


def write_imagenet_folders(root: Path, *, per_class: int = 1, image_size: int = 32, seed: int = 5) -> Path:
    """Write `per_class` drawn shapes of `image_size` pixels into each of the 1,000 class folders, and return `root`.

    What they show has nothing to do with the classes.
    """
    for index, wnid in enumerate(imagenet1k_wnids()):
        (root / wnid).mkdir(parents=True)
        for number in range(index, 1000 * per_class, 1000):
            image = draw_sample(number, seed=seed, image_size=image_size, split=TEST).jpeg
            (root / wnid / f"drawn_{number:06d}.JPEG").write_bytes(image)
    return root
