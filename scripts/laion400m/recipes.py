"""The settings of each run, by model size and samples seen, and where each number comes from.

PUBLISHED: LAION's own runs on LAION-400M, from the table of arXiv 2212.07143 at
https://github.com/LAION-AI/scaling-laws-openclip/blob/main/trained_models_info.csv (learning rate, warm-up, epochs,
and the batch as GPUs x local batch); gradient checkpointing of L from
https://github.com/mlfoundations/open_clip/blob/main/docs/PRETRAINED.md. LAION trained L/14; its numbers stand here for
L/16. OURS: what nobody published, which is all of S/16, and every run of a single pass. A size has one recipe for all
kinds of attention, so that the attention is all that differs.

AdamW's beta2 0.98, epsilon 1e-6, weight decay 0.2 and the cosine schedule are OpenCLIP's defaults for ViT models
(open_clip_train/params.py) and are not repeated. This module, run.py and submit.py need Python alone, so that they run
on a login node.
"""

from dataclasses import dataclass

PUBLISHED, OURS = "published", "ours"
# Ten epochs make one pass: OpenCLIP saves at the ends of epochs only. LAION counted 407,332,084 pairs in a pass; for
# L/14 at 13B and 34B its table says 413,000,000, which is not told apart here.
EPOCH_SAMPLES = 407_332_084 // 10
EPOCHS = {"400M": 10, "3B": 60, "13B": 320, "34B": 840}  # 1, 6, 32 and 84 passes
MODELS = {"T": "ViT-T32-8", "S": "ViT-S-16", "B": "ViT-B-16", "L": "ViT-L-16"}


@dataclass(frozen=True)
class Recipe:
    """One run but for its attention, data and seed; `batch` is global, `samples` the name of how many it sees."""

    size: str
    samples: str
    learning_rate: float
    batch: int
    warmup: int
    source: str
    epochs: int
    epoch_samples: int = EPOCH_SAMPLES


def _recipe(size: str, samples: str, learning_rate: float, batch: int, warmup: int, source: str) -> Recipe:
    return Recipe(size, samples, learning_rate, batch, warmup, source, EPOCHS[samples])


RECIPES = (
    # size, samples, learning rate, global batch, warm-up steps
    _recipe("S", "400M", 5e-4, 32_768, 2_000, OURS),
    _recipe("S", "3B", 1e-3, 88_064, 10_000, OURS),
    _recipe("S", "13B", 5e-4, 33_792, 10_000, OURS),
    _recipe("S", "34B", 1e-3, 90_112, 10_000, OURS),
    _recipe("B", "400M", 5e-4, 32_768, 2_000, OURS),
    _recipe("B", "3B", 1e-3, 88_064, 10_000, PUBLISHED),
    _recipe("B", "13B", 5e-4, 33_792, 10_000, PUBLISHED),
    _recipe("B", "34B", 1e-3, 90_112, 10_000, PUBLISHED),
    _recipe("L", "400M", 5e-4, 32_768, 2_000, OURS),
    _recipe("L", "3B", 1e-3, 88_704, 10_000, PUBLISHED),
    _recipe("L", "13B", 1e-3, 86_016, 2_000, PUBLISHED),
    _recipe("L", "34B", 1e-3, 86_016, 10_000, PUBLISHED),
    # The smoke size: the same road in seconds on a CPU.
    Recipe("T", "1k", 1.5e-3, 64, 4, OURS, epochs=2, epoch_samples=512),
)

# What holds for every run. Epochs are drawn with replacement (--dataset-resampled): an epoch of a tenth of a pass is a
# draw of shards either way, any number of shards serves any number of processes, and the number of samples stays the
# published one though fewer of them can be downloaded today. run.json states how many are distinct.
COMMON = ("--dataset-type", "webdataset", "--dataset-resampled", "--save-most-recent", "--resume", "latest")
# A numbered checkpoint per pass, beside epoch_latest.pt of every epoch.
CARD = (
    *("--precision", "amp_bf16", "--workers", "8", "--local-loss", "--gather-with-grad"),
    *("--save-frequency", "10"),
)
CPU = ("--precision", "fp32", "--workers", "1", "--device", "cpu", "--log-every-n-steps", "1")
FLAGS = {"T": CPU, "S": CARD, "B": CARD, "L": (*CARD, "--grad-checkpointing")}


# The largest batch of a process: LAION's own on cards of 40 GB for B and L, ours for the others.
LARGEST_SHARE = {"T": 64, "S": 1_024, "B": 512, "L": 224}


def find_recipe(size: str, samples: str) -> Recipe:
    """The recipe of a size and a number of samples; raises ValueError, naming what there is, for another."""
    for recipe in RECIPES:
        if (recipe.size, recipe.samples) == (size, samples):
            return recipe
    known = ", ".join(f"{recipe.size} {recipe.samples}" for recipe in RECIPES)
    raise ValueError(f"there is no recipe for size {size} and {samples} samples; there are {known}")


def fewest_steps(recipe: Recipe, processes: int) -> int:
    """How many accumulated steps a batch takes at least, in equal parts of at most LARGEST_SHARE pairs a process."""
    share, rest = divmod(recipe.batch, processes)
    if rest:
        return 1
    fits = (n for n in range(1, share + 1) if share % n == 0 and share // n <= LARGEST_SHARE[recipe.size])
    return next(fits)


def local_batch(batch: int, processes: int, accumulation: int) -> int:
    """The batch of one process in one of the accumulated steps; raises ValueError where the parts are not equal."""
    share, rest = divmod(batch, processes * accumulation)
    if not rest:
        return share
    fits = [n for n in range(1, 2 * processes) if batch % (n * accumulation) == 0]
    advice = f"use {_or(_nearest(fits, processes))} processes" if fits else "use another --accumulation"
    raise ValueError(
        f"the batch of {batch:,} cannot be cut into equal parts for {processes} processes and {accumulation} "
        f"accumulated steps: {advice}"
    )


def _nearest(numbers: list[int], to: int) -> list[int]:
    below, above = [n for n in numbers if n < to], [n for n in numbers if n > to]
    return [*below[-1:], *above[:1]]


def _or(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))
