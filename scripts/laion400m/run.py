"""Prints the folder of one training run and then its flags for openclip_linattn.train, one a line, for train.sbatch.

    python scripts/laion400m/run.py --nodes 4 --per-node 4 --size B --attention normlinear --samples 13B --data SHARDS

What follows `--` is added as it is, and what comes later wins in OpenCLIP.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from recipes import COMMON, FLAGS, MODELS, fewest_steps, find_recipe, local_batch

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Run:
    """One run of the grid, by what tells it from the others."""

    size: str
    attention: str
    samples: str
    seed: int

    @property
    def name(self) -> str:
        """The run's folder below the logs: size, attention, samples, learning rate and seed."""
        recipe = find_recipe(self.size, self.samples)
        model = MODELS[self.size].removeprefix("ViT-")
        return f"{model}-{self.attention}-{self.samples}-lr{_short(recipe.learning_rate)}-seed{self.seed}"

    @property
    def model(self) -> str:
        """The registered model; raises ValueError where there is none of this size and attention."""
        name = f"{MODELS[self.size]}-{self.attention}"
        if not (ROOT / "model_configs" / f"{name}.json").is_file():
            raise ValueError(f"there is no model {name}: `openclip-linattn models` lists them")
        return name

    def flags(
        self, *, data: str, logs: str, val: str | None, processes: int, accumulation: int | None
    ) -> list[str]:
        """The training command's flags; raises ValueError where the batch does not divide over the processes."""
        recipe = find_recipe(self.size, self.samples)
        steps = accumulation or fewest_steps(recipe, processes)
        pairs = {
            "model": self.model,
            "name": self.name,
            "logs": logs,
            "train-data": data,
            "train-num-samples": recipe.epoch_samples,
            "epochs": recipe.epochs,
            "batch-size": local_batch(recipe.batch, processes, steps),
            "accum-freq": steps,
            "lr": recipe.learning_rate,
            "warmup": recipe.warmup,
            "seed": self.seed,
            **({"val-data": val} if val else {}),
        }
        listed = [part for key, value in pairs.items() for part in (f"--{key}", str(value))]
        return [*listed, *COMMON, *FLAGS[self.size]]


def absolute(source: str, folder: Path) -> str:
    """A source of shards for a process that runs elsewhere: relative paths begin at `folder`, the rest stays."""
    return "::".join(
        part if "://" in part or part.startswith(("pipe:", "$")) else str(folder / part)
        for part in source.split("::")
    )


def positive(text: str) -> int:
    """A whole number above zero; raises ArgumentTypeError for anything else."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """The options that one run and the grid have in common."""
    parser.add_argument("--data", required=True, help="training shards: a folder, a pattern, ...")
    parser.add_argument("--val", help="held-out shards, one or two: the validation loss of every epoch")
    parser.add_argument("--logs", default="logs", help="folder of all runs")
    parser.add_argument(
        "--accumulation",
        type=positive,
        help="steps whose gradients are added up; by itself, as few as fit 40 GB",
    )
    parser.add_argument("extra", nargs="*", metavar="-- FLAG", help="more flags of OpenCLIP")


def settle(parser: argparse.ArgumentParser, args: argparse.Namespace, folder: Path) -> None:
    """Makes the shared paths absolute, from `folder`; ends with status 2 where the shell has expanded a pattern."""
    if args.extra and not args.extra[0].startswith("-"):
        parser.error(f"what is {args.extra[0]} for? Patterns, such as that of --data, need quotes")
    args.data = absolute(args.data, folder)
    args.val = args.val and absolute(args.val, folder)
    args.logs = str(folder / args.logs)


def _short(rate: float) -> str:
    mantissa, exponent = f"{rate:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def main() -> int:
    """Prints the folder and the flags; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", required=True, choices=MODELS)
    parser.add_argument("--attention", required=True)
    parser.add_argument("--samples", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=positive, default=1)
    parser.add_argument("--per-node", type=positive, default=1, help="processes of a node, one for each card")
    parser.add_argument("--relative-to", type=Path, default=Path.cwd(), help="where relative paths begin")
    add_shared_options(parser)
    args = parser.parse_args()
    settle(parser, args, args.relative_to)
    run = Run(args.size, args.attention, args.samples, args.seed)
    try:
        flags = run.flags(
            data=args.data,
            logs=args.logs,
            val=args.val,
            processes=args.nodes * args.per_node,
            accumulation=args.accumulation,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join([f"{args.logs}/{run.name}", *flags, *args.extra]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
