"""What the hook and the gate add to a launch."""
