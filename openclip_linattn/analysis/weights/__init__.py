"""The N x N weights that every attention kind implies, applied without being built where their rank is low."""
