"""Text features without the padding behind the texts: of a prompt's 77 tokens about a dozen are its own."""

from typing import Any

import open_clip
from torch import Tensor
from torch.func import functional_call


def can_trim(clip: Any) -> bool:
    """Return whether the features of a text depend on nothing behind its end, nor on how much stands there.

    So it is in OpenCLIP's CLIP, whose text tower is causal and reads the features off the end. It is not where an
    attention takes its length scale from the number of tokens.
    """
    return (
        isinstance(clip, open_clip.CLIP)
        and clip.attn_mask is not None
        and clip.text_pool_type == "argmax"
        and not any(getattr(block.attn, "options", None) for block in clip.transformer.resblocks)
    )


def trimmed_features(clip: Any, tokens: Tensor, *, most: int) -> Tensor:
    """Return the features (M, embedding) of norm 1 of M texts as OpenCLIP tokenizes them.

    Texts of about one length are encoded together, cut behind the longest, `most` tokens at a time (or one text).
    `clip` is one that `can_trim`. The features are those of whole texts up to rounding.
    """
    ends = tokens.argmax(dim=1)  # the token of the end has the largest number
    order = ends.argsort(descending=True)
    found: Tensor | None = None
    done = 0
    while done < len(order):
        length = int(ends[order[done]]) + 1
        rows = order[done : done + max(1, most // length)]
        part = _encode(clip, tokens[rows, :length])
        if found is None:
            found = part.new_empty(len(tokens), part.shape[1])
        found[rows] = part
        done += len(rows)
    assert found is not None
    return found


def _encode(clip: Any, tokens: Tensor) -> Tensor:
    """Encode texts of fewer tokens than the context has, with as much of the model's positions and of its mask."""
    length = tokens.shape[1]
    shorter = {
        "positional_embedding": clip.positional_embedding[:length],
        "attn_mask": clip.attn_mask[:length, :length],
    }
    output = functional_call(clip, shorter, kwargs={"text": tokens})
    features: Tensor = output["text_features"] if isinstance(output, dict) else output[1]
    return features
