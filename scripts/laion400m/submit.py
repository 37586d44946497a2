"""Submits a grid of training runs to SLURM: sizes x attentions x samples x seeds, one job each.

    .venv/bin/python scripts/laion400m/submit.py --sizes S,B,L --attentions softmax,normlinear,linear \\
        --samples 3B,13B --data '/scratch/laion/clean/{00000..39998}.tar' --val /scratch/laion/clean/39999.tar \\
        --logs /scratch/logs --nodes 4 --gpus-per-node 4 --sbatch=--partition=gpu --sbatch=--time=24:00:00

--dry-run prints the commands instead, to be run by hand or kept. Jobs of one run never run side by side: sent
again, a run waits for its predecessor and goes on where that one stopped.
"""

import argparse
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path

from run import ROOT, Run, add_shared_options, positive, settle


def commands(args: argparse.Namespace) -> list[tuple[Path, list[str]]]:
    """The run folders of the grid with their sbatch commands; raises ValueError where a run cannot be trained."""
    jobs = []
    for size, attention, samples, seed in product(args.sizes, args.attentions, args.samples, args.seeds):
        run = Run(size, attention, samples, seed)
        shared = {"data": args.data, "val": args.val, "logs": args.logs}
        # What cannot be trained is refused now, not in the queue.
        processes = args.nodes * (args.gpus_per_node or 1)
        run.flags(**shared, processes=processes, accumulation=args.accumulation)
        if size != "T" and args.gpus_per_node is None:
            raise ValueError(f"size {size} is trained on cards: give their number a node, --gpus-per-node")
        jobs.append((Path(args.logs) / run.name, _command(run, args, shared)))
    return jobs


def _command(run: Run, args: argparse.Namespace, shared: dict[str, str | None]) -> list[str]:
    job = {
        "job-name": run.name,
        "dependency": "singleton",
        "nodes": args.nodes,
        "chdir": ROOT,
        **({"gpus-per-node": args.gpus_per_node} if args.gpus_per_node else {}),
        "output": f"{shared['logs']}/{run.name}/slurm-%j.txt",
    }
    options = {
        "size": run.size,
        "attention": run.attention,
        "samples": run.samples,
        "seed": run.seed,
        **{key: value for key, value in shared.items() if value},
        **({"accumulation": args.accumulation} if args.accumulation else {}),
    }
    extra = ["--", *args.extra] if args.extra else []
    return [
        "sbatch",
        *(f"--{key}={value}" for key, value in job.items()),
        *args.sbatch,
        str(ROOT / "scripts" / "laion400m" / "train.sbatch"),
        *(f"--{key}={value}" for key, value in options.items()),
        *extra,
    ]


def _listed(text: str) -> list[str]:
    parts = [part for part in text.split(",") if part]
    if not parts:
        raise argparse.ArgumentTypeError("name at least one")
    return parts


def _numbers(text: str) -> list[int]:
    return [int(part) for part in _listed(text)]


def _submit(folder: Path, command: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)  # SLURM makes no folder for its output
    subprocess.run(command, check=True)


def main() -> int:
    """Submits or prints; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, example in (("sizes", "S,B,L"), ("attentions", "softmax,normlinear"), ("samples", "3B,13B")):
        parser.add_argument(f"--{name}", type=_listed, required=True, metavar=example)
    parser.add_argument("--seeds", type=_numbers, default=[0], metavar="0,1")
    parser.add_argument("--nodes", type=positive, default=1)
    parser.add_argument("--gpus-per-node", type=positive, help="cards of a node; size T needs none")
    parser.add_argument("--sbatch", action="append", default=[], help="an option for sbatch; repeatable")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, submit nothing")
    add_shared_options(parser)
    args = parser.parse_args()
    settle(parser, args, Path.cwd())
    try:
        jobs = commands(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for number, (folder, command) in enumerate(jobs):
        if args.dry_run:
            print(f"mkdir -p {shlex.quote(str(folder))} && {shlex.join(command)}")
            continue
        try:
            _submit(folder, command)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = error if isinstance(error, OSError) else f"sbatch ended with status {error.returncode}"
            print(
                f"error: {folder.name} is not submitted: {reason}; {number} of {len(jobs)} runs are",
                file=sys.stderr,
            )
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
