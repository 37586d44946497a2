"""The picture of an evaluation: learning curves, and accuracy against resolution."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.results.learning_curves import learning_panels, learning_rows
from openclip_linattn.zeroshot.results.looks import run_looks, run_path
from openclip_linattn.zeroshot.results.picture import figure_of
from openclip_linattn.zeroshot.results.resolution_curves import resolution_panels, resolution_rows
from openclip_linattn.zeroshot.results.rows import Row


def accuracy_picture(rows: Sequence[Row], names: Mapping[str, str]) -> Figure:
    """Draw top-1 against the samples seen and, where there are several image sizes, against these.

    `names` says what a run's folder is called. Curves of single points are left out beside others. Raises UserError
    where there is nothing to draw.
    """
    learning, by_size = learning_rows(rows), resolution_rows(rows)
    if by_size and not _several_epochs(learning):
        learning = []
    drawn = [*learning, *by_size]
    if not drawn:
        raise UserError(
            "no row has a top-1 at the image size of training and a known epoch, and there are no two sizes, so there "
            "is no curve to draw"
        )
    looks = run_looks(drawn, names)
    panels = [*learning_panels(learning, looks), *resolution_panels(by_size, looks)]
    return figure_of(panels, len(looks))


def _several_epochs(rows: Sequence[Row]) -> bool:
    epochs: dict[str, set[int]] = {}
    for row in rows:
        epochs.setdefault(str(run_path(row)), set()).add(int(row["epoch"]))
    return any(len(each) > 1 for each in epochs.values())
