"""Moves trained models from one attention to another: in memory for several libraries, and OpenCLIP's checkpoints."""
