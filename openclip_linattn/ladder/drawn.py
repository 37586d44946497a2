"""The captioned sets that are drawn where a ladder has no data of its own: colored shapes and handwritten digits."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from openclip_linattn.data.drawn.digits import write_digits
from openclip_linattn.data.drawn.shapes import write_shapes


@dataclass(frozen=True)
class DrawnSets:
    """The folders of the two captioned sets and their sources for training."""

    folder: Path

    @property
    def shapes(self) -> Path:
        """Shapes to train on, with held-out ones in test/."""
        return self.folder / "shapes"

    @property
    def digits(self) -> Path:
        """Digits, in train/ and test/."""
        return self.folder / "digits"

    @property
    def train(self) -> str:
        """Shapes and digits, mixed shard by shard."""
        return f"{self.shapes}::{self.digits / 'train'}"

    @property
    def validation(self) -> str:
        """The held-out shapes."""
        return str(self.shapes / "test")


def draw(
    folder: Path, *, shapes: int, test_shapes: int, digit_repeat: int, shard: int, console: Console
) -> DrawnSets:
    """Writes both sets, unless they are there; `shard` is the number of shapes in each tar."""
    sets = DrawnSets(folder)
    with console.status("drawing shapes and digits"):
        write_shapes(sets.shapes, shapes, test_samples=test_shapes, samples_per_shard=shard)
        write_digits(sets.digits, repeat=digit_repeat)
    return sets


def sample_pictures(sets: DrawnSets, folder: Path) -> dict[str, str]:
    """Draws samples of both sets into `folder`; returns the pictures' titles by their names."""
    from openclip_linattn.data.drawn.grid import sample_grid  # matplotlib is slow to import

    sample_grid(str(sets.shapes), folder / "samples-shapes.png", 24)
    sample_grid(str(sets.digits / "train"), folder / "samples-digits.png", 24)
    return {
        "samples-shapes.png": "Training samples: shapes",
        "samples-digits.png": "Training samples: handwritten digits",
    }
