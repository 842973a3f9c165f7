"""Measuring whether, and how well, a method answers from documents."""
