"""Reports of runs: one HTML file that needs nothing else, and the same as Markdown."""
