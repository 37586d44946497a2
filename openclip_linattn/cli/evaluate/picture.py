"""The picture of `openclip-linattn eval --picture`."""

from collections.abc import Sequence
from pathlib import Path

from openclip_linattn.cli.evaluate.titles import Row, short_names
from openclip_linattn.errors import UserError


def check_picture(path: Path | None) -> None:
    """Raise UserError where no picture could be written to `path`, before the evaluation spends its hours."""
    if path is None:
        return
    from openclip_linattn.zeroshot.results.rows import check_writable
    from openclip_scaling.plot import FORMATS  # matplotlib is slow to import

    if path.suffix.lstrip(".").lower() not in FORMATS:
        raise UserError(f"--picture {path} must end in one of {', '.join('.' + name for name in FORMATS)}")
    check_writable(path)


def draw_curves(rows: Sequence[Row], path: Path) -> None:
    """Draw the learning curves of the rows' runs; raises UserError where there are none."""
    from openclip_linattn.zeroshot.results.learning_curves import learning_curves, run_folder
    from openclip_scaling.plot import save_figure

    save_figure(learning_curves(rows, short_names(str(run_folder(row)) for row in rows)), path)
