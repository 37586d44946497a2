"""The measurements of scripts/measure_evaluation.py, a module each."""
