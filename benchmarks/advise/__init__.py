"""Each rule of advice on a real kernel: before, and after it was changed as the rule says."""
