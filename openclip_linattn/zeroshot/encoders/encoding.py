"""Image features of an evaluation set, batch by batch, shared out among processes."""

from collections.abc import Iterator

from torch import Tensor

from openclip_linattn.zeroshot.encoders.features import check_finite, image_features
from openclip_linattn.zeroshot.encoders.models import LoadedModel
from openclip_linattn.zeroshot.processes import Processes
from openclip_linattn.zeroshot.sets.kinds import EvaluationSet
from openclip_linattn.zeroshot.sets.reading import Batch, keyed_batches
from openclip_linattn.zeroshot.watching import Advance


def encoded_batches(
    loaded: LoadedModel,
    data: EvaluationSet,
    *,
    batch_size: int,
    workers: int,
    processes: Processes,
    advance: Advance,
) -> Iterator[tuple[Tensor, Batch]]:
    """Yield the features (B, embedding) of this process's batches, and the batches.

    `advance` hears the size of every batch, times the processes, which go at about one pace. Raises what
    `keyed_batches` and `check_finite` raise.
    """
    batches = keyed_batches(
        data, loaded.transform, batch_size=batch_size, workers=workers, processes=processes
    )
    for batch in batches:
        features = image_features(loaded, batch.images)
        check_finite(features, f"image features on {data.name}")
        yield features, batch
        advance(len(batch.keys) * processes.count)
