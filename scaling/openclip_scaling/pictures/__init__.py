"""Figures for paper (matplotlib) and for the browser (plotly)."""
