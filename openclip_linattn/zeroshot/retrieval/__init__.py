"""Image-text retrieval: its sets, and recall in blocks."""
