"""Shards of images that cost what photographs cost, drawn from noise, for measurements of reading.

A photograph's spectrum falls as a power of the frequency; so does this noise, with the power at which its JPEG takes as
many bytes as the images of LAION-400M: 10 TB for 413 million pairs at 256 px, 24 KB each
(laion.ai/blog/laion-400-open-dataset).
"""

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from openclip_linattn.data.layout import write_tar

ASPECTS = (1.0, 4 / 3, 3 / 2, 16 / 9, 3 / 4)  # width over height
SPECTRUM = 1.85
QUALITY = 95  # that of img2dataset
_WORDS = (
    "old",
    "red",
    "bridge",
    "over",
    "a",
    "river",
    "in",
    "summer",
    "with",
    "two",
    "boats",
    "photo",
    "print",
)


def photo(seed: int, side: int = 256) -> bytes:
    """A JPEG of colored noise, its shorter side `side` pixels."""
    draw = np.random.default_rng(seed)
    aspect = ASPECTS[seed % len(ASPECTS)]
    width, height = (round(side * aspect), side) if aspect >= 1 else (side, round(side / aspect))
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = np.inf
    spectrum = np.fft.rfft2(draw.standard_normal((3, height, width))) * frequency**-SPECTRUM
    field = np.fft.irfft2(spectrum, s=(height, width))
    field /= field.std(axis=(1, 2), keepdims=True)
    # Brightness varies more than color does.
    mixed = 52 * field[:1] + 18 * field + 120
    pixels = np.clip(mixed, 0, 255).astype(np.uint8).transpose(1, 2, 0)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def caption(seed: int) -> str:
    """Three to twenty words."""
    draw = np.random.default_rng(seed)
    return " ".join(draw.choice(_WORDS, size=draw.integers(3, 21)))


def write_photo_shards(folder: Path, *, shards: int, per_shard: int, side: int = 256) -> list[Path]:
    """Writes <folder>/00000.tar and so on, with the members and json fields of LAION-400M's; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for shard in range(shards):
        members = []
        for place in range(per_shard):
            key, seed = f"{shard:05d}{place:04d}", shard * per_shard + place
            text = caption(seed)
            record = {
                "key": key,
                "caption": text,
                "status": "success",
                "NSFW": "UNLIKELY",
                "similarity": 0.33,
            }
            members.append((f"{key}.jpg", photo(seed, side)))
            members.append((f"{key}.json", json.dumps(record).encode()))
            members.append((f"{key}.txt", text.encode()))
        paths.append(folder / f"{shard:05d}.tar")
        write_tar(paths[-1], members)
    return paths
