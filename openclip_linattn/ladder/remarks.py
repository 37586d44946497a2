"""What a plan's user should know before hours are spent on it, though it can be trained."""

from openclip_linattn.ladder.plan import Ladder
from openclip_scaling.fitting.metrics import LOSSES


def remarks(ladder: Ladder) -> list[str]:
    """Sentences on the losses that the report cannot fit, for the runs' batches differ."""
    spec = ladder.spec
    wanted = list(LOSSES) if spec.report.metrics is None else spec.report.metrics
    batches = {
        "batch": {rung.plan.global_batch for rung in ladder.rungs},
        "val_batch": {rung.plan.batch_size for rung in ladder.rungs},
    }
    words = {"batch": "batches", "val_batch": "batches of a process"}
    found = []
    for metric, columns in LOSSES.items():
        several = [
            f"{words[column]} of {', '.join(f'{size:,}' for size in sorted(batches[column]))}"
            for column in columns
            if len(batches[column]) > 1
        ]
        validated = metric != "val_loss" or spec.data.drawn is not None or spec.data.val is not None
        if metric in wanted and several and validated:
            found.append(
                f"{metric} will not be fitted, for it depends on the batch and the runs have {' and '.join(several)}"
            )
    return found
