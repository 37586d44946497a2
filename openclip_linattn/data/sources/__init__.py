"""What `--train-data` takes, as the list of shards that it stands for."""

from openclip_linattn.data.sources.finding import (
    as_pattern,
    expand,
    find_gaps,
    find_missing,
    missing_shards,
)

__all__ = ["as_pattern", "expand", "find_gaps", "find_missing", "missing_shards"]
