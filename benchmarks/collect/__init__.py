"""What it costs a program that its launches are recorded."""
