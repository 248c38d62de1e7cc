"""Nanoseconds from a row of features to the margin, beside other ways to evaluate the same trees."""
