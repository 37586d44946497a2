"""Zero-shot image-text retrieval: recall@k of a loaded model in both directions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openclip_linattn.zeroshot.encoders.features import check_finite, image_features
from openclip_linattn.zeroshot.encoders.models import LoadedModel
from openclip_linattn.zeroshot.encoders.text_features import encode_texts
from openclip_linattn.zeroshot.processes import ALONE, Processes, in_turn
from openclip_linattn.zeroshot.results.intervals import recall_interval
from openclip_linattn.zeroshot.retrieval.images import image_batches
from openclip_linattn.zeroshot.retrieval.opening import RetrievalSet
from openclip_linattn.zeroshot.retrieval.ranks import recall_hits
from openclip_linattn.zeroshot.watching import Advance

RECALL_AT = (1, 5, 10)


def score_retrieval(
    loaded: LoadedModel,
    data: RetrievalSet,
    *,
    batch_size: int = 64,
    workers: int = 0,
    processes: Processes = ALONE,
    advance: Advance = lambda _: None,
) -> dict[str, Any]:
    """Return task, images, texts and {image_to_text,text_to_image}_recall@{1,5,10} (fractions), with intervals.

    The recalls are clip_benchmark's text_retrieval_recall and image_retrieval_recall; see `recall_hits` for
    ties. Where there are fewer candidates than k, that recall is absent. `NAME_interval` is the 95 % interval of
    recall NAME over images (`recall_interval`). The images are dealt to the processes, and each encodes all captions.
    `advance` hears the images (as in `encoded_batches`) and the distinct captions encoded.
    Raises DataError for an image that cannot be used, and CheckpointError for features that are not finite.
    """

    def part() -> list[Tensor]:
        encoded = []
        for batch in image_batches(
            data.images, loaded.transform, batch_size=batch_size, workers=workers, processes=processes
        ):
            encoded.append(image_features(loaded, batch).cpu())
            advance(len(batch) * processes.count)
        return encoded

    images = torch.cat(in_turn(processes.collect(part)))
    check_finite(images, f"image features on {data.name}")
    texts = caption_features(loaded, data.captions, name=data.name, batch_size=batch_size, advance=advance)
    return retrieval_result(images, texts, [len(each) for each in data.captions], device=loaded.device)


def caption_features(
    loaded: LoadedModel,
    captions: Sequence[Sequence[str]],
    *,
    name: str,
    batch_size: int,
    advance: Advance = lambda _: None,
) -> Tensor:
    """Return the features (M, embedding) of all captions in the order of the images, each text encoded once.

    `advance` hears the distinct captions encoded. Raises CheckpointError for features that are not finite.
    """
    distinct = list(dict.fromkeys(text for each in captions for text in each))
    texts = encode_texts(loaded, distinct, batch_size=batch_size, advance=advance)
    check_finite(texts, f"text features on {name}")
    row = {text: number for number, text in enumerate(distinct)}
    return texts[torch.tensor([row[text] for each in captions for text in each])]


def retrieval_result(
    images: Tensor, texts: Tensor, captions: Sequence[int], *, device: torch.device
) -> dict[str, Any]:
    """Return the result of `score_retrieval` from features of norm 1, images (N, d) and texts (M, d).

    `captions` says how many texts each image has; they stand in the order of the images.
    """
    counts = torch.tensor(captions)
    owners = torch.repeat_interleave(torch.arange(len(images)), counts)
    # float64 needs a device that has it.
    hits = recall_hits(
        images, texts, owners, RECALL_AT, device=device if device.type == "cuda" else torch.device("cpu")
    )
    per_image = torch.zeros(len(images), len(RECALL_AT), dtype=torch.float64).index_add(0, owners, hits.texts)
    result: dict[str, Any] = {"task": "retrieval", "images": len(images), "texts": len(texts)}
    for direction, candidates, found, asked in (
        ("image_to_text", len(texts), hits.images, torch.ones(len(images), dtype=torch.float64)),
        ("text_to_image", len(images), per_image, counts.double()),
    ):
        for column, k in enumerate(RECALL_AT):
            if k > candidates:
                continue
            name = f"{direction}_recall@{k}"
            result[name] = float(found[:, column].sum() / asked.sum())
            result[f"{name}_interval"] = list(recall_interval(found[:, column].numpy(), asked.numpy()))
    return result
