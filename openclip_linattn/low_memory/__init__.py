"""Image towers at high resolution: inference that holds one residual stream and chunks of everything else."""
