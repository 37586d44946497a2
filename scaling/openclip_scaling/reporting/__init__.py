"""The report in Markdown and HTML, and results as JSON."""
