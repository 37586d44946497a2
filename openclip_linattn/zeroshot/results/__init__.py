"""What is kept and shown of an evaluation: rows, predictions, intervals, paired tests, curves."""
