"""What damaged files do to the programs that use them."""
