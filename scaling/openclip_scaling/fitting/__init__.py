"""From a table to fitted laws with intervals, and how well these cover."""
