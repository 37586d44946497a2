"""clip_benchmark's sets by their names."""
