"""Which names of sets clip_benchmark knows."""

import difflib
import io
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from tempfile import TemporaryDirectory

from clip_benchmark.datasets.builder import build_dataset, dataset_collection, get_dataset_default_task

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.benchmarks.offline import no_network

_PREFIXES = ("wds/", "vtab/", "tfds/")  # what follows is told by the data
_OTHER_TASKS = {"zeroshot_retrieval", "image_caption_selection"}


def check_names(names: Sequence[str]) -> None:
    """Raise UserError for a name that clip_benchmark does not know, before a model is built for it."""
    for name in names:
        if not _is_known(name):
            listed = dict.fromkeys(each for group in dataset_collection.values() for each in group)
            close = difflib.get_close_matches(name, listed, n=3, cutoff=0.5)
            hint = f"; the closest are {', '.join(close)}" if close else ""
            raise UserError(
                f"clip_benchmark knows no set or collection {name!r}, and no file of that name lists sets{hint} "
                "(a folder of tars is wds/NAME)"
            )


def _is_known(name: str) -> bool:
    if name.startswith(_PREFIXES) or get_dataset_default_task(name) in _OTHER_TASKS:
        return True
    if any(name in group for group in dataset_collection.values()):
        return True
    return not _unsupported(name)


def _unsupported(name: str) -> bool:
    """Ask the builder, which has no list: in an empty folder a set that it knows fails for lack of data."""
    with (
        TemporaryDirectory() as empty,
        no_network(),
        redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            build_dataset(dataset_name=name, root=empty, download=False)
        except (Exception, SystemExit) as error:  # its builders raise many kinds, or exit
            return str(error).startswith("Unsupported dataset")
    return False
