"""Texts encoded without their padding have the features of whole texts."""

import open_clip
import pytest
import torch
from torch import Tensor

from openclip_linattn.zeroshot.encoders import embeddings, trimmed_texts
from openclip_linattn.zeroshot.encoders.embeddings import class_embeddings
from openclip_linattn.zeroshot.encoders.models import LoadedModel
from openclip_linattn.zeroshot.encoders.trimmed_texts import can_trim, trimmed_features
from openclip_linattn.zeroshot.sets.labels import LabelSet
from openclip_linattn.zeroshot.sets.templates import NAMED

TEXTS = ("a", "a photo of a red disk, from above", "two", " ".join(["word"] * 90), "the last one of these")
LABELS = LabelSet("some", tuple(open_clip.IMAGENET_CLASSNAMES[:25]), NAMED["openai80"])


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every batch of texts that is encoded without padding."""
    seen: list[int] = []
    encode = trimmed_texts._encode

    def watched(clip: object, tokens: Tensor) -> Tensor:
        seen.append(tokens.shape[1])
        return encode(clip, tokens)

    monkeypatch.setattr(trimmed_texts, "_encode", watched)
    return seen


def built(name: str) -> LoadedModel:
    torch.manual_seed(5)
    clip = open_clip.create_model(name).eval()
    return LoadedModel(clip, open_clip.get_tokenizer(name), lambda x: x, torch.device("cpu"), "fp32")


@pytest.mark.parametrize("kind", ["softmax", "normlinear", "linear-text", "infsa-text", "neumannlinear-text"])
def test_features_are_those_of_whole_texts(kind: str, lengths: list[int]) -> None:
    loaded = built(f"ViT-T32-8-{kind}")
    tokens = loaded.tokenizer(list(TEXTS))
    assert can_trim(loaded.clip)
    with torch.inference_mode():
        found = trimmed_features(loaded.clip, tokens, most=24)
        expected = loaded.clip.encode_text(tokens, normalize=True)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    assert lengths == [32, 11, 3]


@pytest.mark.parametrize("change", ["length scale", "no mask", "pooling"])
def test_what_depends_on_the_padding_is_not_trimmed(change: str) -> None:
    clip = built("ViT-T32-8-normlinear-text" if change == "length scale" else "ViT-T32-8-softmax").clip
    if change == "no mask":
        clip.attn_mask = None
    elif change == "pooling":
        clip.text_pool_type = "last"
    assert not can_trim(clip)


def test_long_lists_of_classes_are_encoded_without_padding(
    loaded: LoadedModel, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = class_embeddings(loaded, LABELS)
    assert lengths == []
    monkeypatch.setattr(embeddings, "MIN_TRIMMED", 2000)
    heard: list[int] = []
    found = class_embeddings(loaded, LABELS, heard.append)
    torch.testing.assert_close(found, whole, atol=1e-6, rtol=0)
    assert sum(heard) == 25
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < loaded.clip.context_length
    monkeypatch.setattr(embeddings, "can_trim", lambda _: False)
    assert torch.equal(class_embeddings(loaded, LABELS), whole)


def test_embeddings_in_bfloat16_have_norm_one(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "MIN_TRIMMED", 1)
    low = LoadedModel(loaded.clip, loaded.tokenizer, loaded.transform, loaded.device, "amp_bf16")
    found = class_embeddings(low, LABELS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.norm(dim=0), torch.ones(25))
    assert (found * class_embeddings(loaded, LABELS)).sum(dim=0).min() > 0.99
