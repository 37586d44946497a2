"""The forms of scaling laws."""
