"""Evaluation sets for classification: what they are, how they are opened and read."""
