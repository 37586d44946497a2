"""Models of checkpoints, and the features that they compute."""
