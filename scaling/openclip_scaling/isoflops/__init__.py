"""The best model size at equal training compute."""
