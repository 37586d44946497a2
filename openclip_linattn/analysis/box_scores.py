"""How well a map finds the pixels inside an object's boxes."""

from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from openclip_linattn.analysis.deletion import enlarge


def box_scores(maps: Tensor, inside: Tensor) -> list[tuple[float, float]]:
    """ROC-AUC and PR-AUC (average precision) of each map against the pixels inside the boxes.

    maps: (B, grid height, grid width), enlarged bilinearly; inside: bool (B, height, width), with pixels of either
    sort in every image. A map that knows nothing has ROC-AUC 1/2, and for PR-AUC the area of the boxes.
    """
    enlarged = enlarge(maps, (inside.shape[1], inside.shape[2])).cpu().flatten(1).double().numpy()
    truth = inside.flatten(1).cpu().numpy()
    return [
        (float(roc_auc_score(y, x)), float(average_precision_score(y, x)))
        for x, y in zip(enlarged, truth, strict=True)
    ]
