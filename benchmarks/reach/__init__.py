"""What damaged files do to the programs that use them, and what an installation costs."""
