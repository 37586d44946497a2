"""Text features of captions; those of classes are in `embeddings`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from openclip_linattn.zeroshot.encoders.features import as_float32, autocast
from openclip_linattn.zeroshot.encoders.models import LoadedModel
from openclip_linattn.zeroshot.watching import Advance


def encode_texts(
    loaded: LoadedModel, texts: Sequence[str], *, batch_size: int, advance: Advance = lambda _: None
) -> Tensor:
    """Return float32 features (M, embedding) of norm 1 of one or more texts, on the CPU.

    A text longer than the model's context is cut there, by its tokenizer. `advance` hears the size of every
    batch.
    """
    features = []
    for start in range(0, len(texts), batch_size):
        batch = list(texts[start : start + batch_size])
        tokens = loaded.tokenizer(batch).to(loaded.device)
        with torch.inference_mode(), autocast(loaded):
            encoded: Tensor = loaded.clip.encode_text(tokens, normalize=True)
            features.append(as_float32(encoded, dim=-1).cpu())
        advance(len(batch))
    return torch.cat(features)
