"""Captioned sets that are drawn or found in a package: no download."""
