"""Draws one colored shape on a plain background, antialiased, with noise."""

from __future__ import annotations

import io
import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 215, 50),
    "purple": (140, 60, 180),
    "orange": (240, 140, 30),
    "cyan": (60, 200, 210),
    "pink": (240, 130, 180),
}
BACKGROUNDS = {
    "black": (15, 15, 15),
    "white": (240, 240, 240),
    "gray": (128, 128, 128),
    "brown": (110, 75, 40),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond", "pentagon")

SUPERSAMPLING = 4
JPEG_QUALITY = 90

Point = tuple[float, float]


def corners(count: int, radius: float, angle: float, inner: float = 1.0) -> list[Point]:
    """Corners of a regular polygon around (0, 0), the first one on top at angle 0 (radians, clockwise).

    With `inner` below 1 every second of the `count` corners lies at `inner * radius` (a star).
    """
    radii = [radius * (inner if corner % 2 else 1.0) for corner in range(count)]
    turns = [angle + 2 * math.pi * corner / count for corner in range(count)]
    return [(r * math.sin(turn), -r * math.cos(turn)) for r, turn in zip(radii, turns, strict=True)]


def _cross(radius: float, angle: float) -> list[Point]:
    arm = radius / 3
    outline = [(arm, -radius), (arm, -arm), (radius, -arm), (radius, arm), (arm, arm), (arm, radius)]
    outline += [(-x, -y) for x, y in outline]
    cos, sin = math.cos(angle), math.sin(angle)
    return [(x * cos - y * sin, x * sin + y * cos) for x, y in outline]


def outline(shape: str, radius: float, angle: float) -> list[Point]:
    """Corners of an angular shape around (0, 0); the factors give the shapes like areas."""
    if shape == "cross":
        return _cross(radius * 1.1, angle)
    if shape == "diamond":
        # Narrow, and turned less than the square, so that the two cannot be mistaken for each other.
        return [(0.8 * x, 1.25 * y) for x, y in corners(4, radius, 0.3 * angle)]
    count, factor, turn, inner = {
        "square": (4, 1.2, math.pi / 4, 1.0),
        "triangle": (3, 1.2, 0.0, 1.0),
        "pentagon": (5, 1.1, 0.0, 1.0),
        "star": (10, 1.25, 0.0, 0.45),
    }[shape]
    return corners(count, factor * radius, angle + turn, inner)


def coverage(shape: str, center: Point, radius: float, angle: float, image_size: int) -> Image.Image:
    """Share of each pixel that the shape covers, as a greyscale image (255: the whole pixel).

    `center` and `radius` are in pixels, `angle` in radians (clockwise).
    """
    k = SUPERSAMPLING
    mask = Image.new("L", (image_size * k, image_size * k))
    draw = ImageDraw.Draw(mask)
    (x, y), r = (center[0] * k, center[1] * k), radius * k
    if shape in ("circle", "ring"):
        draw.ellipse((x - r, y - r, x + r, y + r), fill=255)
        if shape == "ring":
            hole = 0.6 * r
            draw.ellipse((x - hole, y - hole, x + hole, y + hole), fill=0)
    else:
        draw.polygon([(x + dx, y + dy) for dx, dy in outline(shape, r, angle)], fill=255)
    return mask.reduce(k)


def bounding_box(mask: Image.Image) -> tuple[int, int, int, int]:
    """Box (x0, y0, x1, y1) around the pixels covered by half or more; x1 and y1 are exclusive."""
    box = mask.point([0] * 128 + [255] * 128).getbbox()
    if box is None:
        raise ValueError("The shape covers no pixel by half.")
    return box


def paint(
    mask: Image.Image,
    color: NDArray[np.float64],
    background: NDArray[np.float64],
    noise: NDArray[np.int8],
) -> bytes:
    """JPEG of `color` over `background` (each 3 values of 0 to 255) by the mask, plus noise (H, W, 3)."""
    alpha = np.asarray(mask, dtype=np.float32)[..., None] / np.float32(255)
    back, front = background.astype(np.float32), color.astype(np.float32)
    pixels = back + alpha * (front - back) + noise
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    return encode_jpeg(image)


def encode_jpeg(image: Image.Image) -> bytes:
    """JPEG bytes with full color resolution: at these sizes halved chroma would smear the colors."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    return buffer.getvalue()
