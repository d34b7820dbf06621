"""What can be tried out: run from a checkout."""
