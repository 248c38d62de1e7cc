"""What it costs to be seen."""
