"""Stands for Python in train.sbatch where SLURM's part is tested: it trains nothing, in no time.

ACTS says what happens, in words, first run; after a restart; ...: "epoch hang; epoch" finishes an epoch and waits for a
signal, and finishes another one when it is put back. "fail" ends with status 1.
"""

import os
import sys
import time
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Does what ACTS says; whatever is no training is done by Python itself."""
    if "torch.distributed.run" not in arguments:
        os.execv(sys.executable, [sys.executable, *arguments])
    logs, name = (arguments[arguments.index(flag) + 1] for flag in ("--logs", "--name"))
    checkpoints = Path(logs, name, "checkpoints")
    checkpoints.mkdir(parents=True, exist_ok=True)
    (checkpoints.parent / "cpus").write_text(os.environ["SLURM_CPUS_PER_TASK"])
    for act in os.environ["ACTS"].split(";")[int(os.environ.get("SLURM_RESTART_COUNT", "0"))].split():
        if act == "fail":
            return 1
        if act == "hang":
            (checkpoints.parent / "hangs").touch()
            time.sleep(120)
        else:
            (checkpoints / "new.pt").write_text(act)
            (checkpoints / "new.pt").rename(checkpoints / "epoch_latest.pt")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
