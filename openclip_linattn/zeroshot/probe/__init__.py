"""The linear probe."""
