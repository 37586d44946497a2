"""Keeps what a checkpoint chose for every image, so that models can be compared image by image later."""

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from openclip_linattn.errors import UserError
from openclip_linattn.files import atomic_path
from openclip_linattn.zeroshot.results.paired import Answers
from openclip_linattn.zeroshot.results.predictions import Predictions
from openclip_linattn.zeroshot.results.rows import Row, row_key

FOLDER = "predictions"
_DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


def save_predictions(folder: Path, row: Row, predictions: Predictions) -> str:
    """Write the predictions of `row` below `folder`, that of its checkpoint, and return their path from there.

    The file holds labels (n,) and best (n, 5 or fewer), int32, in the order of the images' names, and `asked`, the
    digest of names and labels. A row that is evaluated anew replaces its file. Raises OSError.
    """
    name = hashlib.sha256(json.dumps(row_key(row)).encode()).hexdigest()[:16]
    path = folder / FOLDER / f"{name}.npz"
    path.parent.mkdir(exist_ok=True)
    with atomic_path(path) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(
            stream,
            labels=predictions.labels,
            best=predictions.best,
            asked=np.array(predictions.digest),
        )
    return f"{FOLDER}/{name}.npz"


def load_answers(row: Row, name: str) -> Answers:
    """Return which images the checkpoint of `row` got right, called `name`; raises UserError where that is not kept."""
    if "predictions" not in row:
        raise UserError(
            f"of {name} no predictions are kept on {row['data']}: its row is from before that; evaluate "
            "with --again"
        )
    path = Path(str(row["checkpoint"])).parent / str(row["predictions"])
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as kept:
            content: dict[str, Any] = {key: kept[key] for key in ("labels", "best", "asked")}
    except _DAMAGE as error:
        raise UserError(f"{path} cannot be read ({error}); evaluate with --again") from error
    if str(content["asked"]) != row["asked"]:
        raise UserError(f"{path} belongs to another row than {name}'s; evaluate with --again")
    return Answers(name, np.equal(content["best"][:, 0], content["labels"]), str(content["asked"]))
