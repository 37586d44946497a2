"""Bytes, seconds and large numbers in words."""


def bytes_text(count: float) -> str:
    """Bytes in words: 64 GiB, 1.5 MiB."""
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while count >= 1024 and unit != "TiB":
        count, unit = count / 1024, next(units)
    return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"


def seconds_text(seconds: float) -> str:
    """Seconds in words: 41.2 us, 1.35 ms, 165 s."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds)} s"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def count_text(count: float) -> str:
    """A large number in words: 640, 12.3 k, 4.56 M, 1.20 G."""
    for factor, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= factor:
            return f"{_three_digits(count / factor)}{unit}"
    return _three_digits(count)
