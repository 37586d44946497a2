"""Run folders, logs, evaluations and published tables, read into tables of checkpoints, runs and curves."""
